"""Laws of the measures: dense oracles, and the same in every gauge."""

import functools

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


def _factors(seed, shape):
  rng = np.random.default_rng(seed)
  return [rng.normal(size=(k, shape[-1])) for k in shape[:-1]]


def _regauged(factors, seed, condition):
  rng = np.random.default_rng(seed)
  gauge = oracles.random_gauge(rng, factors[0].shape[-1], condition)
  return oracles.change_gauge(factors, gauge)


@functools.cache
def _statistics(space):
  return jax.jit(
    functools.partial(diagnostics.nonprivate_clip_statistics, space=space)
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
  factors = [_factors(seed + i, s) for i, s in enumerate(shapes)]
  rng = np.random.default_rng(seed)
  dense = [length * size * rng.normal(size=(3, m, n)) for m, n, _ in shapes]
  extra = length * size * rng.normal(size=(3, 5))
  others = [_regauged(x, seed, condition) for x in factors]
  points = [oracles.Point.from_factors(*x) for x in factors]
  *_, exact = oracles.clipped_mean(points, dense, [extra], l2_clip_norm=size)
  for pairs in (factors, others):
    params = tree_of(pairs, extra[0])
    grads = factor_gradients(pairs, dense, extra)
    for space in ('tangent', 'factor'):
      found = _statistics(space)(grads, params, size)
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
