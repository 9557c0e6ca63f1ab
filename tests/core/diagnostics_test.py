"""Closed forms against simulation, and gauge dependence where it belongs."""

import functools

import jax
import numpy as np
import pytest

from prism_optax import diagnostics
from tests import cases
from tests.oracles import oracles

pytestmark = pytest.mark.usefixtures('x64')
M, N, RANK = 9, 7, 3


def _factors(seed=0):
  return oracles.random_factors(np.random.default_rng(seed), M, N, RANK, 3.0)


def _clip_statistics(scale, space):
  left, right = _factors()
  factors = [(left * scale, right / scale)]
  dense = [np.random.default_rng(4).normal(size=(50, M, N))]
  statistics = jax.jit(
    functools.partial(
      diagnostics.nonprivate_clip_statistics, l2_clip_norm=6.3, space=space
    )
  )
  return (
    statistics(cases.factor_gradients(factors, dense), cases.tree_of(factors)),
    dense[0],
    factors[0],
  )


def test_clip_statistics_depend_on_the_gauge_in_factors_only():
  base, dense, factors = _clip_statistics(1.0, 'tangent')
  point = oracles.Point.from_factors(*factors)
  norms = np.linalg.norm(point.project(dense), axis=(1, 2))
  np.testing.assert_allclose(base.norms, norms, rtol=1e-12)
  assert float(base.clipped_fraction) == pytest.approx(np.mean(norms > 6.3))
  assert float(base.mean_coefficient) == pytest.approx(
    np.mean(np.minimum(1, 6.3 / norms))
  )
  assert 0 < base.clipped_fraction < 1
  for scale in (0.25, 4.0):
    other, *_ = _clip_statistics(scale, 'tangent')
    np.testing.assert_allclose(other.norms, norms, rtol=1e-12)
  fractions = [
    float(_clip_statistics(c, 'factor')[0].clipped_fraction)
    for c in (0.1, 1.0, 10.0)
  ]
  assert max(fractions) - min(fractions) > 0.5
