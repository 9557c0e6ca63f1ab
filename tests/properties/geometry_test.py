"""Laws of the geometry and of adapters, for drawn factors of any size."""

import functools

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given

import prism_optax
from prism_optax import contrib, fixed_rank, lora, muon
from tests.properties import cases

# Many small programs, called one by one.
pytestmark = [pytest.mark.usefixtures('x64'), pytest.mark.slow]
SHAPES = st.sampled_from([(5, 4, 2), (3, 3, 3), (6, 2, 1)])
SIZES = st.sampled_from([1e-6, 1.0, 1e6])


def _pair(kind, seed, shape, size=1.0):
  m, n, rank = shape
  rng = np.random.default_rng(seed)
  return kind(
    *(jnp.asarray(size * rng.standard_normal((k, rank))) for k in (m, n))
  )


def _close(a, b, size=1.0):
  """To rounding in float64, relative to what went in."""
  for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
    np.testing.assert_allclose(x, y, atol=1e-8 * size)


@jax.jit
def _laws(factors, other, grads, noise):
  """What must be equal at every pair of points."""
  here, there = fixed_rank.frame(factors), fixed_rank.frame(other)
  x = fixed_rank.tangent_from_gradients(here, grads)
  t = fixed_rank.project(here, noise)
  dense, moved = _embed(here, t), fixed_rank.transport(here, there, t)
  left, right = (q @ q.T for q in (there.left, there.right))
  new = fixed_rank.retraction(here, t)
  size = jnp.sqrt(sum(jnp.sum(y**2) for y in t))
  return {
    'frame': (
      here.left @ here.left_core, here.right @ here.right_core, *factors,
    ),
    'projected': (*fixed_rank.project(here, x), *x),
    'norm': (size, jnp.linalg.norm(dense)),
    'arrays': (*fixed_rank.multiply_out(t), *t),
    'transport': (
      _embed(there, moved), left @ dense + dense @ right - left @ dense @ right
    ),
    'retraction': (
      _product(new), _best(_product(factors) + dense, new.left.shape[-1])
    ),
  }  # fmt: skip


def _embed(frame, tangent):
  return tangent.left @ frame.right.T + frame.left @ tangent.right.T


def _product(factors):
  return factors.left @ factors.right.T


def _best(z, rank):
  u, s, vt = jnp.linalg.svd(z, full_matrices=False)
  return (u[:, :rank] * s[:rank]) @ vt[:rank]


@cases.settings
@given(SHAPES, cases.seeds, SIZES)
def test_points_and_tangents(shape, seed, size):
  """Frames, projection, lifts, transport and retraction, at once."""
  factors = _pair(fixed_rank.Factors, seed, shape, size**0.5)
  other = _pair(fixed_rank.Factors, seed + 1, shape, size**0.5)
  grads = _pair(fixed_rank.Factors, seed + 2, shape)
  noise = _pair(fixed_rank.Tangent, seed + 3, shape, size)
  # Gradients of the factors have a core that both show: a dense gradient's.
  dense = grads.left @ grads.right.T
  grads = fixed_rank.Factors(dense @ factors.right, dense.T @ factors.left)
  scale = max(size, 1.0)
  for name, values in _laws(factors, other, grads, noise).items():
    half = len(values) // 2
    condition = max(np.linalg.cond(f) ** 2 for f in factors)
    try:
      _close(values[:half], values[half:], scale * min(condition, 1e4))
    except AssertionError as error:
      raise AssertionError(name) from error


@functools.partial(jax.jit, static_argnums=1)
def _of(params, name):
  """The products, the factors, and the products of what is cut to its rank."""
  layout = cases.layout_of(name)
  factors = lora.deltas(params, layout=layout)
  most = max(pair.left.shape[-1] for pair in factors.values())
  cut = lora.truncate(params, most, layout=layout)
  return _products(params, layout), factors, _products(cut, layout)


def _products(params, layout):
  return lora.deltas(params, layout=layout, dense=True)


@cases.settings
@given(cases.trees, cases.seeds, st.sampled_from([1e-3, 1.0, 1e3]))
def test_truncation_to_the_same_rank_keeps_the_product(name, seed, size):
  params, layout = (
    cases.draw_tree(name, seed, scale=size, dtype=np.float64),
    cases.layout_of(name),
  )
  z, factors, cut = _of(params, name)
  _close(cut, z, size**2)
  described = lora.describe_pairs(params, layout=layout)
  assert all(module in described for module in factors)
  start = lora.initialize(params, seed % 2**31, layout=layout)
  for change in _of(start, name)[0].values():
    assert not np.any(change)


@cases.settings
@given(cases.seeds, st.sampled_from([0.5, 1.0, 4.0]))
def test_weights_merge_and_come_apart(seed, scale):
  layout = lora.Layout(scale=scale)
  rng = np.random.default_rng(seed)
  params = {'d': {'lora_a': jnp.asarray(rng.normal(size=(6, 2))),
                  'lora_b': jnp.asarray(rng.normal(size=(2, 5)))}}  # fmt: skip
  weights = {'d': {'kernel': jnp.asarray(rng.normal(size=(6, 5)))}}
  merged = lora.merge(params, weights, layout=layout)
  change = merged['d']['kernel'] - weights['d']['kernel']
  _close(change.T, _products(params, layout)['d'])
  negative = {'d': params['d'] | {'lora_b': -params['d']['lora_b']}}
  _close(lora.merge(negative, merged, layout=layout), weights)
  start, frozen = lora.spectral_residual(params, weights, 0, layout=layout)
  _close(lora.merge(start, frozen, layout=layout), weights, 10)


@functools.cache
def _chain(name):
  layout = cases.layout_of(name)
  return [
    prism_optax.scale_by_rank_preconditioner(noise_stddev=1.0, layout=layout),
    contrib.scale_by_row_moments(noise_stddev=1.0, layout=layout),
    contrib.orthogonalize_tangents(layout=layout),
    prism_optax.add_decayed_factors(0.1, layout=layout),
  ]


@functools.cache
def _processed(name):
  """What each transformation gives, and its projection: one program."""
  layout = cases.layout_of(name)
  silent = prism_optax.tangent_privatizer(0.0, prng_key=0, layout=layout)

  @jax.jit
  def processed(params, grads):
    x = prism_optax.tangent_coordinates(params, layout=layout)(grads)
    found = []
    for tx in _chain(name):
      out, _ = tx.update(x, tx.init(params), params)
      again, _ = silent.update(out, silent.init(params), params)
      found.append((out, again))
    return found

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


@cases.settings
@given(
  cases.seeds, SIZES, st.integers(1, 3), st.sampled_from(['max1', 'frobenius'])
)
def test_orthogonalize_is_bounded_and_odd(seed, size, degree, normalize):
  x = _pair(fixed_rank.Factors, seed, (5, 4, 3), size).left
  y, minus = (
    muon.newton_schulz(z, degree=degree, normalize=normalize) for z in (x, -x)
  )
  assert np.linalg.norm(y, 2) <= 1.3
  _close(y, -minus)
