"""SVDs and bases from eigenvalues are as good as LAPACK's, which a CPU uses."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import prism_optax
from prism_optax import _factorizations, _frames, _linalg, fixed_rank
from prism_optax.fixed_rank import _retraction

EPS = float(jnp.finfo(jnp.float32).eps)
by_eigh = jax.jit(_factorizations.svd_by_eigh)


def _with_values(values, m, n, seed=0):
  """Random (m, n) matrices, float64, of these singular values."""
  rng = np.random.default_rng(seed)
  u, v = (np.linalg.qr(rng.normal(size=(k, len(values))))[0] for k in (m, n))
  return (u * values) @ v.T


SPECTRA = {
  'flat': np.ones(16),
  'decades': np.logspace(0, -3, 16),
  'spread': np.r_[np.ones(8), np.full(8, 1e-4)],
  'at the edge': np.r_[np.ones(8), np.logspace(-4.5, -5.3, 8)],
  'below it': np.r_[np.ones(8), np.logspace(-4, -9, 8)],
  'of rank 3': np.r_[3.0, 2, 1, np.zeros(13)],
  'huge': np.logspace(0, -2, 16) * 1e30,
  'tiny': np.logspace(0, -2, 16) * 1e-30,
  'zero': np.zeros(16),
}


@pytest.mark.parametrize('shape', [(16, 16), (24, 16), (16, 20)])
@pytest.mark.parametrize('name', SPECTRA)
def test_the_product_and_the_columns(name, shape):
  values = SPECTRA[name]
  x = np.stack([_with_values(values, *shape, seed) for seed in range(3)])
  u, s, vt = (np.float64(y) for y in by_eigh(np.float32(x)))
  largest, size = max(values[0], 1e-38), max(shape)
  # Rounding of x to float32 and the backward error of the eigenvalues.
  tolerance = 3 * size * EPS * largest
  np.testing.assert_allclose(s, np.tile(values, (3, 1)), atol=tolerance)
  product = (u * s[:, None, :]) @ vt
  np.testing.assert_allclose(product, x, atol=tolerance)
  gone = s <= size * EPS * s[:, :1]
  if name in ('flat', 'decades', 'spread', 'at the edge', 'huge', 'tiny'):
    assert not gone.any()
  for basis in (u, vt.swapaxes(1, 2)):
    eye = np.eye(16) * ~gone[:, None, :]
    square = basis.swapaxes(1, 2) @ basis
    np.testing.assert_allclose(square, eye, atol=2e-6)


def test_pairs_of_equal_values_belong_together():
  """Any basis of their space will do for u, but then v is given by it."""
  x = np.float32(_with_values(np.full(8, 2.0), 12, 8))[None]
  u, _, vt = by_eigh(x)
  np.testing.assert_allclose(u @ vt, x / 2, atol=4e-6)


def test_what_is_not_finite_stays_in_its_matrix():
  x = np.stack([np.eye(4, dtype=np.float32)] * 3)
  x[1, 0, 0] = np.nan
  for out in by_eigh(x):
    found = np.isfinite(out).reshape(3, -1)
    assert found[[0, 2]].all()
    assert not found[1].any()


@pytest.mark.parametrize('name', SPECTRA)
def test_a_basis_from_products(name):
  """Orthonormal, but for directions that are rounding errors; exact in x."""
  values = SPECTRA[name]
  shapes = [(2, 300), (1, 24)]
  stacks = [
    np.stack([_with_values(values, m, 16, seed) for seed in range(k)])
    for k, m in shapes
  ]
  x = _linalg.Tall(tuple(np.float32(y) for y in stacks))
  basis, core = jax.jit(_frames.basis_by_products)(x)
  largest = max(values[0], 1e-38)
  u, s, _ = np.linalg.svd(np.float64(core))
  np.testing.assert_allclose(
    s, np.tile(values, (3, 1)), atol=100 * EPS * largest
  )
  kept = s > 16 * EPS * s[:, :1]
  rows = [slice(0, 2), slice(2, 3)]
  for y, found, at in zip(stacks, basis.stacks, rows, strict=True):
    found = np.float64(found)
    np.testing.assert_allclose(found @ core[at], y, atol=30 * EPS * largest)
    inside = found @ (u[at] * kept[at][:, None, :])
    np.testing.assert_allclose(
      inside.swapaxes(1, 2) @ inside, np.eye(16) * kept[at][:, None, :],
      atol=1e-5,
    )  # fmt: skip


@pytest.mark.parametrize('losing', [False, True])
def test_a_retraction_by_eigenvalues(losing, monkeypatch):
  """With the SVD that accelerators get, the same matrix and as many columns."""
  rng = np.random.default_rng(0)
  z = fixed_rank.Factors(*np.float32(rng.normal(size=(2, 3, 20, 4))))
  frame = fixed_rank.frame(z)
  if losing:  # Z + T = 0 but for one direction.
    step = fixed_rank.Tangent(
      -z.left @ frame.right_core.mT, jnp.zeros_like(z.right)
    )
    step = step._replace(left=step.left.at[:, :, 0].multiply(0.5))
  else:
    step = fixed_rank.tangent_from_gradients(
      frame, fixed_rank.Factors(*np.float32(rng.normal(size=(2, 3, 20, 4))))
    )
  direct = fixed_rank.retract(frame, step)
  monkeypatch.setattr(
    _factorizations, 'svd', lambda x: _factorizations.svd_by_eigh(x)
  )
  monkeypatch.setattr(_frames, 'qr', _frames.basis_by_products)
  # Without what was compiled before.
  body = _retraction._best_approximation.__wrapped__
  found = jax.jit(body)(frame, _retraction.as_sum(frame, step))
  one, other = (np.float64(x.left @ x.right.mT) for x in (found, direct))
  np.testing.assert_allclose(one, other, atol=1e-5 * np.abs(one).max())
  for side in found:  # A direction that is lost stays on one side.
    norms = np.linalg.norm(side, axis=1)
    assert (norms > 0).sum() >= 3
  alive = [np.linalg.norm(x, axis=1) > 0 for x in found]
  assert np.all(alive[0] | alive[1])


@pytest.mark.slow
def test_every_kind_of_device_gets_a_program():
  """One export for all: what only accelerators compile is lowered at least."""
  params = {'lora_a': jnp.ones((40, 20)), 'lora_b': jnp.ones((20, 30))}
  tx = prism_optax.prism(
    0.1, l2_clip_norm=1.0, noise_multiplier=1.0, expected_batch_size=2,
    per_example_gradients=False, prng_key=0,
  )  # fmt: skip
  state = tx.init(params)
  exported = jax.export.export(
    jax.jit(tx.update), platforms=('cpu', 'cuda', 'tpu')
  )(params, state, params)
  assert exported.platforms == ('cpu', 'cuda', 'tpu')
  found, _ = exported.call(params, state, params)
  expected, _ = jax.jit(tx.update)(params, state, params)
  jax.tree.map(
    functools.partial(np.testing.assert_allclose, atol=1e-6), found, expected
  )
