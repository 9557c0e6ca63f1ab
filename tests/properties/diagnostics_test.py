"""Laws of the measures: dense oracles, and the same in every gauge."""

import hypothesis.strategies as st
import jax
import numpy as np
import pytest
from hypothesis import given

from prism_optax import diagnostics
from tests.cases import factor_gradients, tree_of
from tests.oracles import oracles
from tests.properties import cases

CONDITIONS = st.sampled_from([1.0, 1e3])
x64 = pytest.mark.usefixtures('x64')


_statistics = jax.jit(
  diagnostics.nonprivate_clip_statistics, static_argnames='space'
)


@x64
@cases.few
@given(
  cases.seeds, CONDITIONS, st.sampled_from([1e-8, 1.0, 1e8]),
  st.sampled_from([0.0, 1e-3, 1.0, 1e3]),
)  # fmt: skip
def test_clip_statistics_are_those_of_the_norms(seed, condition, size, length):
  """In the tangent space the same in every gauge, on factors by definition."""
  shapes = [(5, 4, 2), (3, 6, 1)]
  rng = np.random.default_rng(seed)
  factors = [
    tuple(rng.normal(size=(k, rank)) for k in (m, n)) for m, n, rank in shapes
  ]
  dense = [length * size * rng.normal(size=(3, m, n)) for m, n, _ in shapes]
  extra = length * size * rng.normal(size=(3, 5))
  others = [
    oracles.change_gauge(x, oracles.random_gauge(rng, x[0].shape[1], condition))
    for x in factors
  ]
  points = [oracles.Point.from_factors(*x) for x in factors]
  *_, exact = oracles.clipped_mean(points, dense, [extra], l2_clip_norm=size)
  for pairs in (factors, others):
    params = tree_of(pairs, extra[0])
    grads = factor_gradients(pairs, dense, extra)
    for space in ('tangent', 'factor'):
      found = _statistics(grads, params, size, space=space)
      if space == 'tangent':
        norms = exact
      else:
        norms = [
          cases.norm(jax.tree.map(lambda x, i=i: x[i], grads)) for i in range(3)
        ]
      np.testing.assert_allclose(
        found.norms, norms, rtol=1e-6 if condition > 1 else 1e-10
      )
      ratio = np.asarray(found.norms) / size
      assert float(found.clipped_fraction) == pytest.approx(np.mean(ratio > 1))
      assert float(found.mean_coefficient) == pytest.approx(
        np.mean(1 / np.maximum(ratio, 1)), rel=1e-6
      )
