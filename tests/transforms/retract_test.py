"""The last transform: where the parameters land, and what it leaves alone."""

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


def _problem(seed=0, condition=10.0):
  rng = np.random.default_rng(seed)
  factors, dense = cases.random_problem(rng, SHAPES, 1, condition)
  params = cases.tree_of(factors, np.ones(4))
  grads = cases.factor_gradients(
    factors, [g[0] for g in dense], rng.normal(size=4)
  )
  step = _coordinates(params, grads)
  return factors, [g[0] for g in dense], params, step


@functools.cache
def _compiled(**options):
  return jax.jit(prism_optax.retract(**options).update)


def _land(params, step, **options):
  state = prism_optax.retract(**options).init(params)
  updates, _ = _compiled(**options)(step, state, params)
  return optax.apply_updates(params, updates)


@pytest.mark.parametrize('align', [False, True])
def test_lands_on_the_best_approximation(align):
  factors, dense, params, step = _problem()
  eta = 1e-3
  new = _land(params, jax.tree.map(lambda x: eta * x, step), align=align)
  for z, (left, right), g in zip(
    cases.products_of(new), factors, dense, strict=True
  ):
    point = oracles.Point.from_factors(left, right)
    want = point.retract(eta * point.project(g), left.shape[1]).z
    assert np.abs(z - want).max() < 1e-12
    assert np.linalg.matrix_rank(z) == left.shape[1]
  np.testing.assert_allclose(
    new['extra'], params['extra'] + eta * step['extra']
  )


def test_output_is_in_the_balanced_svd_gauge():
  _, _, params, step = _problem()
  new = _land(params, step)
  for left, right in cases.factors_of(new):
    grams = left.T @ left, right.T @ right
    np.testing.assert_allclose(*grams, atol=1e-12)
    off = grams[0] - np.diag(np.diag(grams[0]))
    assert np.abs(off).max() < 1e-12 * grams[0].max()


def test_small_steps_change_the_arrays_little():
  """Signs follow the old factors, so apply_updates loses no digits."""
  factors, _, _, step = _problem()
  params = cases.tree_of(
    [oracles.balance(pair) for pair in factors], np.ones(4)
  )
  step = jax.tree.map(lambda x: 1e-6 * x, step)
  new = _land(params, step)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=1e-3), params, new
  )


def test_a_step_of_zero_keeps_the_parameters_to_rounding():
  """The first step of a warm-up has learning rate zero."""
  _, _, params, step = _problem()
  params['m0']['lora_b'] = jnp.zeros_like(params['m0']['lora_b'])
  zero = jax.tree.map(jnp.zeros_like, step)
  new = _land(params, zero)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=1e-14), params, new
  )


@pytest.mark.parametrize('zero', ['lora_a', 'lora_b'])
def test_a_step_of_low_rank_from_zero_loses_no_direction(zero):
  """Rank one into a zero start of rank three: the rest can still be trained."""
  rng = np.random.default_rng(5)
  left, right = oracles.random_factors(rng, 9, 7, 3)
  params = cases.tree_of([(left, right)])
  params['m0'][zero] = jnp.zeros_like(params['m0'][zero])
  other = 'lora_a' if zero == 'lora_b' else 'lora_b'
  dense = np.outer(rng.normal(size=9), rng.normal(size=7))
  for _ in range(3):
    factors = cases.factors_of(params)
    point = oracles.Point.from_factors(*factors[0])
    grads = cases.factor_gradients(factors, [dense])
    step = _coordinates(params, grads)
    params = _land(params, step)
    want = point.z + point.project(dense)
    (got,) = cases.products_of(params)
    np.testing.assert_allclose(got, oracles.best_approximation(want, 3),
                               atol=1e-12)  # fmt: skip
    assert np.linalg.matrix_rank(params['m0'][other]) == 3
    dense = np.outer(rng.normal(size=9), rng.normal(size=7))
  assert np.linalg.matrix_rank(params['m0'][zero]) == 3  # One a step.


def test_scale_is_inside_the_step():
  """Z = scale L R^T moves by the step, whatever the scale."""
  factors, _, params, step = _problem()
  layout = lora.Layout(scale=4.0)
  halved = cases.tree_of(
    [(left / 2, right / 2) for left, right in factors], np.ones(4)
  )
  new = _land(halved, step, layout=layout)
  for z, want in zip(
    cases.products_of(new), cases.products_of(_land(params, step)), strict=True
  ):
    np.testing.assert_allclose(4 * z, want, atol=1e-12)
