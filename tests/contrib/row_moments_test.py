"""Scales of rows: the dense formula, in every gauge; nothing is amplified."""

import jax
import numpy as np
import pytest

from prism_optax import contrib
from tests.oracles import oracles, problems

SHAPES = [(5, 6, 2), (5, 6, 2), (7, 4, 3)]
STDDEV, B2, FACTOR, CONDITION = 0.3, 0.9, 2.0, 50.0
OPTIONS = {
  'b2': B2, 'noise_stddev': STDDEV, 'floor_factor': FACTOR,
  'max_condition_number': CONDITION,
}  # fmt: skip


def _expected(factors, dense, moments, noise, floor_factor, condition):
  """One step on m x n matrices; ``moments`` are lists of two, kept."""
  (left, right), rank = factors, factors[0].shape[1]
  ql, qr = np.linalg.qr(left)[0], np.linalg.qr(right)[0]
  pl, pr = ql @ ql.T, qr @ qr.T
  tangent = pl @ dense + dense @ pr - pl @ dense @ pr
  scaled = []
  for side, seen in enumerate((tangent @ pr, tangent.T @ pl)):
    # The rows in r orthonormal coordinates are as long as in all n.
    square = np.sum(np.square(seen), 1) / rank
    moments[side] = B2 * moments[side] + (1 - B2) * square
    floor = max(floor_factor * noise, moments[side].max() / condition)
    scaled.append(
      seen * np.sqrt(floor / np.maximum(moments[side], floor))[:, None]
    )
  outputs, inputs = scaled
  core = (pl @ outputs @ pr + pl @ inputs.T @ pr) / 2
  return outputs - pl @ outputs + inputs.T - inputs.T @ pr + core, tangent


@pytest.mark.parametrize('stddevs', [[STDDEV] * 3, [0.3, 0.1, 0.1], [0.0] * 3])
def test_equals_the_formula(x64, stddevs):
  """Three steps at points far apart; a schedule's last entry holds."""
  problem = problems.Problem(SHAPES)
  rng = np.random.default_rng(0)
  given = stddevs[0] if len(set(stddevs)) == 1 else np.array(stddevs[:2])
  tx = contrib.scale_by_row_moments(**OPTIONS | {'noise_stddev': given})
  update = jax.jit(tx.update)
  moments = [[np.zeros(m), np.zeros(n)] for m, n, _ in SHAPES]
  state, noise, shrunk = None, 0.0, 0
  for t, stddev in enumerate(stddevs):
    noise = B2 * noise + (1 - B2) * stddev**2
    factors = [oracles.random_factors(rng, *x, 3.0) for x in SHAPES]
    sizes = [np.exp(2 * rng.normal(size=(m, 1))) for m, *_ in SHAPES]
    dense = problems.Dense(
      [x * rng.normal(size=s[:2]) for x, s in zip(sizes, SHAPES, strict=True)],
      rng.normal(size=5),
    )
    params = problem.params(factors, rng.normal(size=5))
    state = tx.init(params) if state is None else state
    out, state = update(problem.coordinates(params, dense), state, params)
    found = problem.embed(params, out)
    np.testing.assert_array_equal(found.extra, dense.extra)
    assert int(state.count) == t + 1
    for x, z, g, old in zip(
      found.modules, factors, dense.modules, moments, strict=True
    ):
      expected, tangent = _expected(z, g, old, noise, FACTOR, CONDITION)
      np.testing.assert_allclose(x, expected, rtol=1e-9, atol=1e-9)
      assert np.linalg.norm(x) <= np.linalg.norm(tangent) * (1 + 1e-9)
      shrunk += np.linalg.norm(x) < 0.8 * np.linalg.norm(tangent)
  assert shrunk >= 5  # Of 9: the formula was at work.
