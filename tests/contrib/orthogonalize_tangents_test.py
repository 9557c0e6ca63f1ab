"""Muon on the manifold over whole trajectories, against dense matrices."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import prism_optax
from prism_optax import contrib
from tests import cases
from tests.oracles import muon_oracle, oracles

# (m, n, r). One shape, one stack: what is done with it is compiled once.
SHAPES = [(11, 7, 3), (11, 7, 3)]
RATE, BETA, STEPS = 0.05, 0.9, 8


@functools.cache
def _optimizer():
  """Compiled once for all tests: same shapes, float64."""
  tx = optax.chain(
    prism_optax.intrinsic_clip(1e6),
    contrib.orthogonalize_tangents(BETA),
    optax.scale_by_learning_rate(RATE),
    prism_optax.retract(),
  )
  return tx.init, jax.jit(tx.update)


def _gradient(t, products):
  """A smooth dense gradient that depends on Z and on the step."""
  out = []
  for i, z in enumerate(products):
    # Squares: sines of a i + b j alone would have rank two.
    phase = np.square(np.arange(z.size)).reshape(z.shape)
    out.append(0.3 * z + 3.0 ** (i - 1) * np.sin(z + t + phase))
  return out


def _trajectory(factors):
  """All Z along the way, from factors in any gauge."""
  params = cases.tree_of(factors)
  init, update = _optimizer()
  state, path = init(params), []
  for t in range(STEPS):
    dense = _gradient(t, cases.products_of(params))
    grads = cases.factor_gradients(
      cases.factors_of(params), [g[None] for g in dense]
    )
    updates, state = update(grads, state, params)
    params = optax.apply_updates(params, updates)
    path.append(cases.products_of(params))
  return path


def _project(z, dense, rank):
  u, _, vt = np.linalg.svd(z)
  p_left, p_right = u[:, :rank] @ u[:, :rank].T, vt[:rank].T @ vt[:rank]
  return p_left @ dense + dense @ p_right - p_left @ dense @ p_right


def _dense_trajectory(factors):
  """The same with m x n matrices: projectors, SVDs, no frames."""
  products = [left @ right.T for left, right in factors]
  ranks = [left.shape[1] for left, _ in factors]
  momenta = [np.zeros_like(z) for z in products]
  path = []
  for t in range(STEPS):
    gradients = _gradient(t, products)
    for i, (z, rank) in enumerate(zip(products, ranks, strict=True)):
      m = BETA * _project(z, momenta[i], rank)
      momenta[i] = m + _project(z, gradients[i], rank)
      direction = muon_oracle.orthogonalize(momenta[i], 2, 5)
      step = -RATE * _project(z, direction, rank)
      products[i] = oracles.best_approximation(z + step, rank)
    path.append(list(products))
  return path


def _factors(condition=1.0, seed=0):
  rng = np.random.default_rng(seed)
  return [oracles.random_factors(rng, m, n, r, condition) for m, n, r in SHAPES]


def test_trajectory_is_the_dense_one(x64):
  factors = _factors()
  for ours, dense in zip(
    _trajectory(factors), _dense_trajectory(factors), strict=True
  ):
    for z, expected in zip(ours, dense, strict=True):
      np.testing.assert_allclose(z, expected, atol=1e-11)


def test_other_leaves_get_adam(x64):
  params = cases.tree_of(_factors()[:1], extra=np.arange(4.0))
  tx = contrib.orthogonalize_tangents(b1=0.8, b2=0.9, eps=1e-6)
  adam = optax.scale_by_adam(0.8, 0.9, 1e-6)
  state, adam_state = tx.init(params), adam.init(jnp.arange(4.0))
  update, rng = jax.jit(tx.update), np.random.default_rng(2)
  for _ in range(3):
    grads = jax.tree.map(
      lambda p: jnp.asarray(rng.standard_normal(p.shape)), params
    )
    updates, state = update(grads, state, params)
    expected, adam_state = adam.update(grads['extra'], adam_state)
    np.testing.assert_allclose(updates['extra'], expected, rtol=1e-12)


def test_coordinate_rms_makes_the_coordinates_of_that_size(x64):
  """With both outer blocks dominating, 2r singular values of one."""
  rng = np.random.default_rng(3)
  m, n, rank = 40, 30, 2
  params = cases.tree_of([oracles.random_factors(rng, m, n, rank)])
  grads = jax.tree.map(
    lambda p: jnp.asarray(10 * rng.standard_normal(p.shape)), params
  )

  @jax.jit
  def sizes(grads):
    out = {}
    for rms in (None, 0.5):
      tx = contrib.orthogonalize_tangents(steps=12, coordinate_rms=rms)
      updates, _ = tx.update(grads, tx.init(params), params)
      out[str(rms)] = optax.tree.norm(updates)
    return out

  norms = {
    None if k == 'None' else 0.5: float(x) for k, x in sizes(grads).items()
  }
  factor = 0.5 * math.sqrt((m + n - rank) / 2)
  assert norms[0.5] == pytest.approx(factor * norms[None])
  # The projection loses the block of the two outer bases, a small part here.
  expected = 0.5 * math.sqrt(rank * (m + n - rank))
  assert 0.9 * expected < norms[0.5] <= expected * (1 + 1e-6)
