"""Scales of rows: the formula, in every gauge; nothing is amplified."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.common import row_moments
from prism_optax import fixed_rank

STDDEV, B2 = 0.1, 0.9


def _problem(seed, turn):
  """A dense gradient, and factors in a gauge: B A with A turned."""
  rng = np.random.default_rng(seed)
  a, b = rng.normal(size=(6, 2)), rng.normal(size=(2, 5))
  dense = rng.normal(size=(5, 6))  # (out, in)
  params = {'lora_a': a @ turn, 'lora_b': np.linalg.solve(turn, b)}
  return jax.tree.map(jnp.asarray, params), dense


def _coordinates(params, dense):
  """In the shapes of the parameters, and the frame they are written in."""
  left, right = params['lora_b'].T, params['lora_a']
  frame = fixed_rank.frame(fixed_rank.Factors(left, right))
  grads = fixed_rank.Factors(dense @ right, dense.T @ left)
  return frame, fixed_rank.tangent_from_gradients(frame, grads)


@pytest.fixture
def steps(x64):
  """``steps(turn)``, dense coordinates in and out of three steps."""

  def run(turn):
    tx = row_moments.scale_by_row_moments(STDDEV, B2)
    state, found = None, []
    for t in range(3):
      params, dense = _problem(t, turn)
      state = tx.init(params) if state is None else state
      frame, x = _coordinates(
        params, dense * (1 + 10 * (np.arange(5) == t))[:, None]
      )
      tree = {'lora_a': x.right, 'lora_b': x.left.T}
      out, state = tx.update(tree, state, params)
      y = fixed_rank.Tangent(out['lora_b'].T, out['lora_a'])
      found.append((frame, x, y))
    return found

  return run


def test_equals_the_formula(steps):
  moments = [np.zeros(5), np.zeros(6)]
  for t, (frame, x, y) in enumerate(steps(np.eye(2)), start=1):
    scaled = []
    for side in range(2):
      mean = np.mean(np.square(x[side]), 1)
      moments[side] = B2 * moments[side] + (1 - B2) * mean
      ratio = moments[side] / (1 - B2**t) / STDDEV**2
      scaled.append(x[side] / np.sqrt(np.maximum(ratio, 1))[:, None])
    expected = fixed_rank.project(frame, fixed_rank.Tangent(*scaled))
    for got, wanted, before in zip(y, expected, x, strict=True):
      np.testing.assert_allclose(got, wanted, rtol=1e-10, atol=1e-12)
      assert np.linalg.norm(got) < np.linalg.norm(before)


def test_is_the_same_in_every_gauge(steps):
  turn = np.array([[3.0, 1.0], [0.5, -0.2]])
  for (frame, _, y), (turned_frame, _, turned) in zip(
    steps(np.eye(2)), steps(turn), strict=True
  ):
    np.testing.assert_allclose(
      fixed_rank.embed(turned_frame, turned),
      fixed_rank.embed(frame, y),
      atol=1e-10,
    )
