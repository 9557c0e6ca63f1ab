"""Laws of what is done with tangent coordinates, for drawn factors."""

import functools

import hypothesis.strategies as st
import jax
import numpy as np
import optax
import pytest
from hypothesis import given

import prism_optax
from prism_optax import contrib, transforms
from tests.oracles import oracles, problems
from tests.properties import cases

# Many small programs, called one by one.
pytestmark = [pytest.mark.usefixtures('x64'), pytest.mark.slow]
PROBLEM = problems.Problem([(5, 4, 2), (4, 6, 1)])


@functools.cache
def _processed(name):
  """What each transformation gives, and its projection: one program."""
  layout = cases.layout_of(name)
  silent = prism_optax.tangent_privatizer(0.0, prng_key=0, layout=layout)
  txs = (
    prism_optax.scale_by_rank_preconditioner(noise_stddev=1.0, layout=layout),
    contrib.scale_by_row_moments(noise_stddev=1.0, layout=layout),
    contrib.orthogonalize_tangents(layout=layout),
    prism_optax.add_decayed_factors(0.1, layout=layout),
  )

  @jax.jit
  def processed(params, grads):
    x = prism_optax.tangent_coordinates(params, layout=layout)(grads)
    found = [tx.update(x, tx.init(params), params)[0] for tx in txs]
    state = silent.init(params)
    return [(y, silent.update(y, state, params)[0]) for y in found]

  return processed


@cases.settings
@given(cases.trees, cases.seeds, st.sampled_from([0.0, 1e-6, 1.0, 1e6]))
def test_post_processing_is_finite_and_stays_tangent(name, seed, size):
  params = cases.draw_tree(name, seed)
  grads = cases.draw_tree(name, seed + 1, scale=size)
  for out, again in jax.device_get(_processed(name)(params, grads)):
    largest = 1 + max(float(np.max(np.abs(a))) for a in jax.tree.leaves(out))
    for a, b in zip(jax.tree.leaves(out), jax.tree.leaves(again), strict=True):
      assert np.all(np.isfinite(a))
      np.testing.assert_allclose(a, b, atol=1e-4 * largest)


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
