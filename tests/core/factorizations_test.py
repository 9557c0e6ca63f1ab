"""SVDs and bases from eigenvalues are as good as LAPACK's, which a CPU uses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prism_optax._linalg import _factorizations, _frames, _products

# Types are those of what comes in.
pytestmark = pytest.mark.usefixtures('x64')
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
  'one small': np.r_[np.ones(15), 1e-4],
  'of rank 3': np.r_[3.0, 2, 1, np.zeros(13)],
  'huge': np.logspace(0, -2, 16) * 1e30,
  'tiny': np.logspace(0, -2, 16) * 1e-30,
  'zero': np.zeros(16),
}


@pytest.mark.parametrize('shape', [(16, 16), (100, 16), (16, 20)])
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
  if name not in ('below it', 'of rank 3', 'zero') and size < 100:
    assert not gone.any()
  for basis in (u, vt.swapaxes(1, 2)):
    eye = np.eye(16) * ~gone[:, None, :]
    square = basis.swapaxes(1, 2) @ basis
    np.testing.assert_allclose(square, eye, atol=2e-6)


def test_no_size_beside_another_overflows():
  x = np.float32(np.full((3, 16, 16), 1e-20) - 1e30 * np.eye(16))
  np.testing.assert_allclose(by_eigh(x)[1], 1e30, rtol=1e-5)


@pytest.mark.parametrize('name', SPECTRA)
def test_a_basis_from_products(name):
  """Orthonormal, but for directions that are rounding errors; exact in x."""
  spectra = np.stack([SPECTRA[name]] * 2 + [SPECTRA['flat']])
  largest = np.maximum(spectra[:, :1, None], 1e-38)
  rows = [slice(0, 2), slice(2, 3)]
  stacks = [
    np.stack([_with_values(x, m, 16, seed) for seed, x in enumerate(spectra)])
    for m in (300, 24)
  ]
  stacks = [x[at] for x, at in zip(stacks, rows, strict=True)]
  x = _products.Tall(tuple(np.float32(y) for y in stacks))
  basis, core = jax.jit(_frames.basis_by_products)(x)
  core = np.float64(core) / largest
  u, s, _ = np.linalg.svd(core)
  np.testing.assert_allclose(s, spectra / largest[:, 0], atol=100 * EPS)
  kept = s > 16 * EPS * s[:, :1]
  for y, found, at in zip(stacks, basis.stacks, rows, strict=True):
    found = np.float64(found)
    same = y / largest[at]
    np.testing.assert_allclose(found @ core[at], same, atol=30 * EPS)
    inside = found @ (u[at] * kept[at][:, None, :])
    np.testing.assert_allclose(
      inside.swapaxes(1, 2) @ inside, np.eye(16) * kept[at][:, None, :],
      atol=1e-5,
    )  # fmt: skip


RANK = 20
pairs = jax.jit(_factorizations.dominant_pairs)
is_found = jax.jit(jax.vmap(lambda x: _factorizations.pairs_by_iteration(x)[3]))


def _core(values, coupling, seed=0, along=0.0):
  """[[A, B], [C, 0]], A diagonal and something, the others of this norm."""
  rng = np.random.default_rng(seed)
  core = np.zeros((2 * RANK, 2 * RANK))
  core[:RANK, :RANK] = np.diag(values)
  for rows, columns, size in (
    (0, 0, along), (0, 1, coupling), (1, 0, coupling),
  ):  # fmt: skip
    block = rng.normal(size=(RANK, RANK))
    block *= size / np.linalg.norm(block, 2)
    rows, columns = (slice(RANK * i, RANK * (i + 1)) for i in (rows, columns))
    core[rows, columns] += block
  return core


def _one_turned(values, coupling):
  core = _core(values, 0.0)
  core[0, RANK] = core[RANK, 0] = coupling
  return core


def _at_an_angle(values, tangent):
  core = _core(values, 0.0)
  core[RANK:, :RANK] = -tangent * np.diag(values)
  return core


GROWN = np.linspace(2, 1, RANK)
CORES = {
  # A few steps of training: the values stand clear of the others.
  'a small step': (True, _core(GROWN, 0.05, along=0.05)),
  'a step': (True, _core(GROWN, 0.3, along=0.3)),
  'no step': (True, _core(GROWN, 0.0)),
  'turned': (True, _core(GROWN, 0.2, along=3.0)),
  'decades': (True, _core(np.logspace(0, -3, RANK), 3e-4)),
  'huge': (True, -1e30 * np.abs(_core(GROWN, 0.05))),
  'tiny': (True, 1e-30 * _core(GROWN, 0.3)),
  # Nothing tells the subspaces apart, or the first steps do not see them.
  'a large step': (False, _core(GROWN, 2.0)),
  'at the start': (False, _core(np.zeros(RANK), 1.0)),
  'one-sided': (False, np.tril(_core(np.zeros(RANK), 1.0, along=1e-9))),
  'of lower rank': (False, _core(np.r_[GROWN[:-1], 0], 0.0)),
  'others are larger': (False, _core(np.r_[GROWN[:-1], 1e-3], 0.3)),
  # One direction is turned: what it leaves is more than others have, or near.
  'unseen by the others': (False, _one_turned(np.r_[100, GROWN[1:]], 60)),
  'larger than some': (False, _one_turned(np.r_[100, 8, np.ones(18)], 14)),
  'slow': (False, _one_turned(np.r_[1, np.full(RANK - 1, 2)], 0.95)),
  'less slow': (True, _one_turned(np.r_[1, np.full(RANK - 1, 2)], 0.9)),
  # Squares of tangents add up to 15.8 and 16.2.
  'far off': (True, _at_an_angle(GROWN, 0.89)),
  'too far off': (False, _at_an_angle(GROWN, 0.9)),
  'zero': (False, np.zeros((2 * RANK, 2 * RANK))),
}  # fmt: skip


def test_dominant_pairs_are_those_of_an_svd():
  """The best approximation, and orthonormal columns, of whatever comes in."""
  cores = np.float32(np.stack([core for _, core in CORES.values()]))
  assert dict(zip(CORES, np.asarray(is_found(cores)), strict=True)) == {
    name: expected for name, (expected, _) in CORES.items()
  }
  found = map(np.float64, pairs(cores))
  for name, core, u, s, v in zip(CORES, np.float64(cores), *found, strict=True):
    left, values, right = np.linalg.svd(core)
    best = (left[:, :RANK] * values[:RANK]) @ right[:RANK]
    # Backward errors of two SVDs; nothing is lost where values are close.
    atol = 2 * RANK * EPS * values[0]
    np.testing.assert_allclose(s, values[:RANK], atol=atol, err_msg=name)
    if values[RANK] < 0.99 * values[RANK - 1]:  # Else it is one of many.
      np.testing.assert_allclose((u * s) @ v.T, best, atol=atol, err_msg=name)
    for basis in (u, v):
      np.testing.assert_allclose(
        basis.T @ basis, np.eye(RANK), atol=RANK * EPS, err_msg=name
      )


@pytest.mark.parametrize('wrong', [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(
  'factorize',
  # LAPACK leaves an eigenvector be that nothing touches.
  [_factorizations.svd, lambda x: _products.eigh(x)[:1], by_eigh, pairs],
)
def test_what_is_not_finite_ends_in_nan_and_touches_no_other(factorize, wrong):
  """LAPACK loops for ever over an infinite entry."""
  x = np.float32(np.stack([_core(GROWN, 0.1, seed) for seed in range(2)]))
  alone = factorize(jnp.asarray(x))
  x[1, 3, 4] = wrong
  for one, other in zip(alone, factorize(jnp.asarray(x)), strict=True):
    np.testing.assert_array_equal(one[0], other[0])
    assert np.isnan(other[1]).all()
