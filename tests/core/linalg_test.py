"""Batched linear algebra against NumPy in float64."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prism_optax._linalg import _factorizations, _frames, _products
from prism_optax.fixed_rank import _lifts

pytestmark = pytest.mark.usefixtures('x64')


def test_a_gram_matrix_as_a_tpu_computes_it():
  x = np.random.default_rng(0).normal(size=(2, 50, 3))
  found = _products.gram_tpu(jnp.asarray(x))
  expected = np.einsum('bmr,bms->brs', x, x)
  np.testing.assert_allclose(found, expected, rtol=1e-12)


@pytest.mark.parametrize(
  ('call', 'word'),
  [
    (lambda x: _products.matmul(_products.Tall((x,)), x), 'barrier'),
    (lambda x: _products.gram(*[x[..., :2]] * 2), 'stablehlo.concatenate'),
    (_frames.orthonormal_basis, '@Eigh'),
    (_factorizations.dominant_pairs, '@Eigh'),
  ],
)
def test_a_tpu_is_spared_what_it_compiles_slowly(call, word):
  """Lowered for machines that need not be there."""
  traced = jax.jit(call).trace(np.ones((1, 40, 40), np.float32))
  for platform in ('cpu', 'cuda', 'tpu'):
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    assert (word in text) is (platform == 'tpu')


@pytest.mark.parametrize(
  ('call', 'shape', 'where'),
  [
    (_factorizations.svd, (40, 9, 2), ['tpu']),
    (_factorizations.svd, (1, 40, 2), ['cuda', 'tpu']),
    # By the compiler's own SVD, which loops: all columns are needed.
    (lambda x: _lifts.sylvester_of_grams(x, x, x), (1, 40, 40), ['tpu']),
  ],
)
def test_where_an_svd_is_made_of_eigenvalues(call, shape, where):
  traced = jax.jit(call).trace(np.ones(shape, np.float32))
  texts = {
    platform: traced.lower(lowering_platforms=(platform,)).as_text()
    for platform in ('cpu', 'cuda', 'tpu')
  }
  assert [x for x in texts if re.search('eigh|syev', texts[x], re.I)] == where
  assert ('stablehlo.while' in texts['tpu']) != (call is _factorizations.svd)


def test_norms_are_of_each_column():
  x = -np.random.default_rng(0).uniform(size=(2, 5, 3)) * [0, 1, 1e200]
  found = jax.jit(_products.column_norms)(x)
  expected = [[np.hypot.reduce(column) for column in y.T] for y in x]
  np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_frame_is_scale_free():
  """Columns of any size: the same frame, down to the smallest normal ones."""
  rng = np.random.default_rng(2)
  x = rng.normal(size=(7, 3)).astype(np.float32)
  expected, *_ = _frames.orthonormal_frame(jnp.asarray(x))
  for scale in ([1e-12, 1, 1e12], [1e-18, 1e-18, 1e-18], [1e18, 1e-15, 1]):
    q, core, inverse, _ = _frames.orthonormal_frame(
      jnp.asarray(x * np.float32(scale))
    )
    np.testing.assert_allclose(q, expected, atol=1e-5)
    assert np.isfinite(core).all()
    assert np.isfinite(inverse).all()


def test_a_zero_column_stays_zero_where_the_others_are_rounded():
  """And one whose squares are zero, in float32."""
  x = np.random.default_rng(2).normal(size=(7, 4)) * [1, 0, 1, 1e-25]
  _, core, inverse, _ = _frames.orthonormal_frame(np.float32(x))
  assert not core[:, [1, 3]].any()
  assert not inverse[jnp.array([1, 3])].any()


def test_columns_that_are_nearly_orthonormal_keep_all_digits(x64):
  """Whose cores are the identity and half of what is missing to it."""
  q = np.linalg.qr(np.random.default_rng(2).normal(size=(9, 3)))[0]
  x = q @ (np.eye(3) + 1e-9 * np.ones((3, 3)))
  frame, core, inverse, _ = _frames.orthonormal_frame(jnp.asarray(x))
  np.testing.assert_allclose(frame, q, atol=1e-15)
  np.testing.assert_allclose(frame @ core, x, atol=1e-15)
  np.testing.assert_allclose(x @ inverse, frame, atol=1e-15)


def test_one_matrix_that_loses_digits_is_seen_among_others():
  """Squares of its entries are denormal; of one column none is crooked."""
  q = np.linalg.qr(np.random.default_rng(2).normal(size=(9, 1)))[0]
  x = np.float32(q * np.array([1, 3e-19])[:, None, None])
  found, core, _, _ = _frames.orthonormal_frame(jnp.asarray(x))
  np.testing.assert_allclose(np.abs(found), np.abs([q, q]), atol=1e-6)
  np.testing.assert_allclose(core[1] / 3e-19, 1, atol=1e-5)


def test_polar_is_a_partial_isometry():
  rng = np.random.default_rng(3)
  x = rng.normal(size=(5, 4, 4))
  x[1] = 0
  x[2, :, 0] = 0
  got = _products.polar(jnp.asarray(x))
  for a, b in zip(x, got, strict=True):
    u, s, vt = np.linalg.svd(a)
    kept = s > 1e-10
    np.testing.assert_allclose(b, u[:, kept] @ vt[kept], atol=1e-12)


def test_vmap_and_leading_axes_agree_with_single_matrices():
  rng = np.random.default_rng(6)
  x = jnp.asarray(rng.normal(size=(2, 3, 6, 4)))
  batched = _frames.orthonormal_frame(x)
  mapped = jax.vmap(jax.vmap(_frames.orthonormal_frame))(x)
  for got, other in zip(batched, mapped, strict=True):
    np.testing.assert_allclose(got, other, atol=1e-13)
  one = _frames.orthonormal_frame(x[1, 2])
  np.testing.assert_allclose(batched[0][1, 2], one[0], atol=1e-13)


def test_vmap_does_not_bring_batched_factorisations_back_on_cpu():
  """One LAPACK call in a loop, not one call for a batch: see the module."""
  if jax.default_backend() != 'cpu':
    pytest.skip('The rule is for CPU.')
  mapped = jax.jit(jax.vmap(_frames.orthonormal_frame))
  text = mapped.lower(jnp.ones((5, 6, 4))).compile().as_text()
  calls = [line for line in text.splitlines() if 'custom-call(' in line]
  assert any('geqrf' in line for line in calls)
  assert not [line for line in calls if 'geqrf' in line and '[5,' in line]
