"""Laws of noise on a moving tangent space, and of optimizers around it."""

import functools

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given

import prism_optax
from prism_optax import transforms
from tests.oracles import oracles, problems
from tests.properties import cases

x64 = pytest.mark.usefixtures('x64')
PROBLEM = problems.Problem([(5, 4, 2), (4, 6, 1)])
CONDITIONS = st.sampled_from([1.0, 1e3])


@cases.settings
@given(
  cases.seeds,
  st.integers(1, 8),
  st.integers(0, 4),
  st.sampled_from([0.0, 1e-6, 1e6]),
)
def test_correlated_noise_has_the_size_of_its_rows(seed, steps, more, stddev):
  rng = np.random.default_rng(seed)
  noising = np.tril(rng.normal(size=(steps + more,) * 2))
  found = transforms.correlated_noise_stddev(noising, stddev, steps)
  covariance = stddev**2 * noising @ noising.T
  np.testing.assert_allclose(
    found, np.sqrt(np.diag(covariance))[:steps], rtol=1e-9
  )

  class Streaming:
    def row_norms_squared(self, steps):
      return np.sum(noising[:steps] ** 2, axis=1)

  again = transforms.correlated_noise_stddev(Streaming(), stddev, steps)
  np.testing.assert_allclose(again, found, rtol=1e-12)


def _listening(key):
  """Adds the same numbers in every step, and remembers what it has seen."""

  def init(tree):
    noise = optax.tree.random_like(key, tree, jax.random.normal)
    return noise, jax.tree.map(jnp.zeros_like, tree)

  def update(tree, state, params=None):
    del params
    return optax.tree.add(tree, state[0]), (state[0], tree)

  return optax.GradientTransformation(init, update)


@functools.cache
def _correlated():
  return prism_optax.correlated_tangent_privatizer(
    _listening, steps=3, prng_key=0
  )


@jax.jit
def _correlated_update(updates, state, params):
  noisy, state = _correlated().update(updates, state, params)
  silent = prism_optax.tangent_privatizer(0.0, prng_key=0)
  projected, _ = silent.update(noisy, silent.init(params), params)
  return noisy, state, projected


def _seen(state):
  return state.inner.inner[1]


def _norm_of_difference(a, b):
  return cases.norm(jax.tree.map(jnp.subtract, a, b))


def _problem(seed):
  """Factors, dense matrices, and arrays in the shapes of the parameters."""
  rng = np.random.default_rng(seed)
  factors = [oracles.random_factors(rng, *x, 3.0) for x in PROBLEM.shapes]
  return rng, factors, rng.normal(size=5)


def _regauged(rng, factors, condition):
  return [
    oracles.change_gauge(
      x, oracles.random_gauge(rng, x[0].shape[-1], condition)
    )
    for x in factors
  ]


@pytest.mark.slow
@x64
@cases.few
@given(cases.seeds, CONDITIONS, st.sampled_from([1e-6, 1.0, 1e6]))
def test_correlated_noise_stays_where_the_matrix_stays(seed, condition, size):
  rng, factors, extra = _problem(seed)
  params = PROBLEM.params(factors, extra)

  def draw():
    return jax.tree.map(lambda x: size * rng.normal(size=x.shape), params)

  state = _correlated().init(params)
  zeros = jax.tree.map(jnp.zeros_like, params)
  first, state, _ = _correlated_update(zeros, state, params)
  dense = PROBLEM.embed(params, first)
  # In other gauges of the same matrices it is the same noise of Z.
  for _ in range(2):
    turned = PROBLEM.params(_regauged(rng, factors, condition), extra)
    before = state
    noise, state, projected = _correlated_update(zeros, state, turned)
    for x, y in zip(
      dense.modules, PROBLEM.embed(turned, noise).modules, strict=True
    ):
      np.testing.assert_allclose(x, y, atol=1e-9)
  # It is tangent there, and the privatizer sees every distance as it is.
  assert _norm_of_difference(noise, projected) <= 1e-9
  x, y = draw(), draw()
  distance = _norm_of_difference(x, y)
  seen = [_correlated_update(z, before, turned)[1] for z in (x, y)]
  assert _norm_of_difference(*map(_seen, seen)) == pytest.approx(
    distance, rel=1e-9
  )
  # Three updates were made, the horizon: nothing from there on.
  late, _, _ = _correlated_update(x, state, turned)
  assert cases.norm(late) == 0


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


@pytest.mark.slow
@x64
@cases.few
@given(cases.seeds, CONDITIONS)
def test_augmented_optimizers_walk_as_the_dense_gradient_says(seed, condition):
  """Norms that are clipped and matrices reached, in every gauge."""
  rng, factors, extra = _problem(seed)
  init, update = _augmented()
  for pairs in (factors, _regauged(rng, factors, condition)):
    params = PROBLEM.params(pairs, extra)
    state = init(params)
    points = PROBLEM.points(params)
    expected = extra
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
