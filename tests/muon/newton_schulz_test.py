"""Newton-Schulz on arrays against its definition, and its bias correction."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prism_optax import muon
from tests.oracles import muon_oracle

# The many small operations take longer one by one.
newton_schulz = jax.jit(
  muon.newton_schulz,
  static_argnames=('degree', 'steps', 'normalize', 'matmul_dtype'),
)


def slope_at_zero(degree):
  """sum_j C(2j, j) / 4^j = (2k + 1) C(2k, k) / 4^k."""
  return (2 * degree + 1) * math.comb(2 * degree, degree) / 4**degree


@pytest.mark.parametrize('decades', [0, 4])
@pytest.mark.parametrize(('degree', 'steps'), [(1, 9), (2, 5), (3, 5), (2, 12)])
def test_a_gram_matrix_loses_no_digits(degree, steps, decades):
  """Small singular values would be lost in a square that is kept too long."""
  rng = np.random.default_rng(1)
  left, right = (np.linalg.qr(rng.normal(size=(k, 24)))[0] for k in (24, 96))
  matrix = (left * np.logspace(0, -decades, 24)) @ right.T
  out = newton_schulz(np.float32(matrix), degree=degree, steps=steps)
  expected = muon_oracle.orthogonalize(matrix, degree, steps)
  # What float32 makes of the entries grows by the slope at zero in each step.
  slope = slope_at_zero(degree) ** steps if decades else 1
  np.testing.assert_allclose(out, expected, atol=1.2e-7 * (8 + slope / 8))


@pytest.mark.parametrize(
  ('least', 'steps', 'degree'), [(0.1, 3, 2), (1e-3, 5, 2), (0.02, 4, 1)]
)
def test_no_odd_polynomial_is_nearer_to_one(least, steps, degree):
  """Chebyshev: equal errors with signs in turn, at one point more than it has
  coefficients; in each step, on what the step before has left."""
  table = muon.minimax_coefficients(least, steps, degree=degree)
  lower, upper = least, 1.0
  for i, row in enumerate(table):
    x = lower + (upper - lower) * np.sin(np.linspace(0, np.pi / 2, 20_001)) ** 2
    found = muon_oracle.by_rows(x, [row])
    if i + 1 == steps:  # Scaled, so that nothing ends above one.
      assert found.max() <= 1 + 1e-11
      found = found / (found.max() / 2 + found.min() / 2)
    error = found - 1
    largest = np.abs(error).max()
    if largest > 1e-9:  # Below it rounding of the coefficients is seen.
      signs = np.sign(error[np.abs(error) > largest * (1 - 1e-6)])
      assert np.count_nonzero(np.diff(signs)) == degree + 1
    lower, upper = 1 - largest, 1 + largest


@pytest.mark.parametrize('shape', [(24, 24), (24, 30), (96, 24), (24, 400)])
@pytest.mark.parametrize(('least', 'steps'), [(0.1, 3), (1e-3, 6)])
def test_rows_of_coefficients_in_float32(shape, least, steps):
  """Square, wide and on the Gram matrix: what the scalars become."""
  table = muon.minimax_coefficients(least, steps)
  rng = np.random.default_rng(2)
  left, right = (np.linalg.qr(rng.normal(size=(k, 24)))[0] for k in shape)
  values = np.logspace(0, -3, 24)
  matrix = (left * values) @ right.T
  out = newton_schulz(np.float32(matrix), steps=table, normalize='none')
  expected = (left * muon_oracle.by_rows(values, table)) @ right.T
  # What float32 makes of the entries grows by the slope at zero in each step.
  slope = math.prod(map(sum, table))
  np.testing.assert_allclose(out, expected, atol=1.2e-7 * (8 + slope))


def test_a_stack_may_hold_matrices_of_any_sizes():
  matrix = np.float32(np.random.default_rng(4).normal(size=(4, 7)))
  sizes = np.array([1e-30, 1.0, 1e30], np.float32)[:, None, None]
  out = np.asarray(newton_schulz(sizes * matrix, normalize='frobenius'))
  expected = muon_oracle.orthogonalize(matrix, 2, 5, 'frobenius')
  for one in out:
    np.testing.assert_allclose(one, expected, atol=1e-5)
  assert newton_schulz(matrix[:0]).shape == (0, 7)


@pytest.mark.parametrize('bad', [np.nan, np.inf])
def test_not_finite_in_not_finite_out(bad):
  """Never a wrong number that looks right."""
  stack = np.ones((2, 3, 4), np.float32)
  stack[0, 1, 2] = bad
  out = np.asarray(newton_schulz(stack))
  assert not np.any(np.isfinite(out[0]))
  assert np.all(np.isfinite(out[1]))


def test_bfloat16_matmuls_accumulate_in_float32():
  """bfloat16 factors have 8 bits: 0.4 % a product, a few steps."""
  rng = np.random.default_rng(5)
  matrix = rng.standard_normal((64, 96)).astype(np.float32)
  exact = muon_oracle.orthogonalize(matrix, 2, 5)
  out = newton_schulz(matrix, matmul_dtype=jnp.bfloat16)
  assert out.dtype == jnp.float32
  error = np.linalg.norm(out - exact) / np.linalg.norm(exact)
  assert 1e-4 < error < 2e-2
  low = newton_schulz(matrix.astype(jnp.bfloat16))
  assert low.dtype == jnp.bfloat16
  # Only input and output are rounded: singular values near zero have a slope
  # of 23, on entries of 1 / sqrt(96).
  assert np.linalg.norm(np.float64(low) - exact) / np.linalg.norm(exact) < 2e-2


def test_accelerators_multiply_bfloat16_and_sum_float32():
  """Lowered for a GPU, which this machine need not have."""

  def call(x):
    return muon.newton_schulz(x, matmul_dtype=jnp.bfloat16)

  x = jax.ShapeDtypeStruct((8, 24), jnp.float32)
  text = jax.jit(call).trace(x).lower(lowering_platforms=('cuda',)).as_text()
  products = [line for line in text.splitlines() if 'dot_general' in line]
  assert len(products) == 5 * 3  # Steps times products of a quintic.
  for line in products:
    inputs, output = line.split(':')[-1].split('->')
    assert inputs.count('bf16') == 2
    assert 'f32' in output
