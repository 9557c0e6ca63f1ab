"""Optimizers whose pre-clipping transform reads the state, at drawn factors."""

import functools

import hypothesis.strategies as st
import jax
import numpy as np
import optax
import pytest
from hypothesis import given

import prism_optax
from prism_optax import transforms
from tests.oracles import oracles, problems
from tests.properties import cases

pytestmark = [pytest.mark.usefixtures('x64'), pytest.mark.slow]
PROBLEM = problems.Problem([(5, 4, 2), (4, 6, 1)])


@functools.cache
def _augmented():
  init, inner, pre_clipping_transform = transforms.augmented_optimizer(
    optax.chain(optax.scale(-0.1), prism_optax.retract())
  )

  @jax.jit
  def update(grads, state, params):
    x = pre_clipping_transform(state)(grads)
    updates, state = inner(x, state, params)
    return x, optax.apply_updates(params, updates), state

  return init, update


@cases.few
@given(cases.seeds, st.sampled_from([1.0, 1e3]))
def test_augmented_optimizers_walk_as_the_dense_gradient_says(seed, condition):
  """Norms that are clipped and matrices reached, in every gauge."""
  rng = np.random.default_rng(seed)
  factors = [oracles.random_factors(rng, *x, 3.0) for x in PROBLEM.shapes]
  extra, (init, update) = rng.normal(size=5), _augmented()
  for gauge in (None, condition):
    if gauge:
      factors = [
        oracles.change_gauge(x, oracles.random_gauge(rng, rank, gauge))
        for x, rank in zip(factors, PROBLEM.ranks, strict=True)
      ]
    params = PROBLEM.params(factors, extra)
    state, points, expected = init(params), PROBLEM.points(params), extra
    for step in range(2):
      dense = PROBLEM.ambient_noise(seed + step)
      grads = PROBLEM.factor_gradients(params, dense)
      x, params, state = update(grads, state, params)
      tangents = [
        point.project(g) for point, g in zip(points, dense.modules, strict=True)
      ]
      assert cases.norm(x) == pytest.approx(
        cases.norm([*tangents, dense.extra]), rel=1e-9
      )
      points = [
        point.retract(-0.1 * t, rank)
        for point, t, rank in zip(points, tangents, PROBLEM.ranks, strict=True)
      ]
      expected = expected - 0.1 * dense.extra
      found = PROBLEM.dense(params)
      for z, point in zip(found.modules, points, strict=True):
        np.testing.assert_allclose(z, point.z, atol=1e-9)
      np.testing.assert_allclose(found.extra, expected, rtol=1e-12)
