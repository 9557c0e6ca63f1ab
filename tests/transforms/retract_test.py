"""Decay and retraction: where the parameters land, and what stays."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import prism_optax
from prism_optax import lora
from tests import cases
from tests.oracles import oracles

# Of one shape: one stack, and half of the compiling.
SHAPES = [(9, 7, 3)] * 2
pytestmark = pytest.mark.usefixtures('x64')


@jax.jit
def _coordinates(params, grads):
  return prism_optax.tangent_coordinates(params)(grads)


@functools.partial(jax.jit, static_argnames='layout')
def _land(params, step, layout=None):
  tx = prism_optax.retract(layout=layout)
  updates, _ = tx.update(step, tx.init(params), params)
  return optax.apply_updates(params, updates)


@pytest.mark.slow
@pytest.mark.parametrize('zero', ['lora_a', 'lora_b'])
def test_a_step_of_low_rank_from_zero_loses_no_direction(zero):
  """Rank one into a zero start of rank three: the rest can still be trained."""
  rng = np.random.default_rng(5)
  params = cases.tree_of([oracles.random_factors(rng, 9, 7, 3)])
  params['m0'][zero] = jnp.zeros_like(params['m0'][zero])
  other = 'lora_a' if zero == 'lora_b' else 'lora_b'
  # The first step of a warm-up has learning rate zero.
  still = _land(params, jax.tree.map(jnp.zeros_like, params))
  cases.assert_close(still, params, 1e-14)
  for _ in range(3):
    dense = np.outer(rng.normal(size=9), rng.normal(size=7))
    factors = cases.factors_of(params)
    point = oracles.Point.from_factors(*factors[0])
    grads = cases.factor_gradients(factors, [dense])
    params = _land(params, _coordinates(params, grads))
    want = oracles.best_approximation(point.z + point.project(dense), 3)
    np.testing.assert_allclose(cases.products_of(params)[0], want, atol=1e-12)
    assert np.linalg.matrix_rank(params['m0'][other]) == 3
  assert np.linalg.matrix_rank(params['m0'][zero]) == 3  # One a step.


def test_scale_is_inside_the_step():
  """Z = scale L R^T moves by the step, whatever the scale."""
  rng = np.random.default_rng(0)
  factors, dense = cases.random_problem(rng, SHAPES, 1, 10.0)
  grads = cases.factor_gradients(factors, dense, rng.normal(size=(1, 4)))
  params = cases.tree_of(factors, np.ones(4))
  step = _coordinates(params, jax.tree.map(lambda x: x[0], grads))
  halved = cases.tree_of([(x / 2, y / 2) for x, y in factors], np.ones(4))
  found = _land(halved, step, layout=lora.Layout(scale=4.0))
  expected = cases.products_of(_land(params, step))
  for z, want in zip(cases.products_of(found), expected, strict=True):
    np.testing.assert_allclose(4 * z, want, atol=1e-12)
