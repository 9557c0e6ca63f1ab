"""The Newton-Schulz iteration of DP-Muon, and its options."""

import functools
import itertools
import operator
from collections.abc import Callable

import jax
import jax.numpy as jnp

from prism_optax._linalg import _products
from prism_optax._linalg._products import at_least_float32
from prism_optax._types import DTypeLike
from prism_optax.muon._polynomials import Steps, check_options, polynomials


def frobenius_norm(*blocks: jax.Array) -> jax.Array:
  """One norm (..., 1, 1) over the last two axes of all blocks together.

  The blocks are parts of one matrix, or of one tangent vector. The squares do
  not overflow. The norm is not finite where an entry is not, zero for zeros.
  """
  largest = jnp.zeros((), blocks[0].dtype)
  for x in blocks:
    largest = jnp.maximum(
      largest, jnp.max(jnp.abs(x), axis=(-2, -1), keepdims=True, initial=0.0)
    )
  # An infinite scale would make NaN of infinity: the norm shall be infinite.
  scale = jnp.where((largest > 0) & jnp.isfinite(largest), largest, 1)
  squares = sum(
    jnp.sum(jnp.square(x / scale), axis=(-2, -1), keepdims=True) for x in blocks
  )
  return scale * jnp.sqrt(squares)


def divisor(normalize: str, norm: jax.Array) -> jax.Array:
  """The number that a matrix of this Frobenius norm is first divided by.

  ``'max1'`` gives ``max(1, norm)`` as in DP-Muon (arXiv:2605.12994),
  ``'frobenius'`` the norm (1 for a zero matrix), ``'none'`` gives 1.
  """
  if normalize == 'max1':
    return jnp.maximum(norm, 1)
  if normalize == 'frobenius':
    return jnp.where(norm > 0, norm, 1)
  return jnp.ones_like(norm)


def _product(
  a: jax.Array, b: jax.Array, dtype: DTypeLike | None = None
) -> jax.Array:
  """``a @ b``, of factors rounded to ``dtype``, summed in their own type."""
  if dtype is None:
    return _products.matmul(a, b)
  return jnp.matmul(
    a.astype(dtype), b.astype(dtype), preferred_element_type=a.dtype
  )


# How much rounding errors of a Gram matrix may grow before it is formed anew.
# They end at a ten-thousandth of its largest entries.
_LARGEST_GROWTH = 1e3


def _polynomial(
  square: jax.Array,
  c: tuple[float, ...],
  product: Callable[[jax.Array, jax.Array], jax.Array],
) -> jax.Array:
  """``p(Y Y^T)`` of the square.

  Horner in ``I - Y Y^T``, which is small where the iteration has converged: no
  cancellation of large powers there.
  """
  eye = jnp.eye(square.shape[-1], dtype=square.dtype)
  rest = eye - square
  poly = c[-1] * rest + c[-2] * eye
  for x in reversed(c[:-2]):
    poly = product(poly, rest) + x * eye
  return poly


def _on_gram_matrix(y: jax.Array, rows: list[tuple[float, ...]]) -> jax.Array:
  """The steps on ``G = Y Y^T`` alone, and one product with Y for all of them.

  ``G <- p(G) G p(G)``, and Y is multiplied by the product of the ``p(G)``. In
  each step small eigenvalues of G grow by ``p(0)^2``, and so do its rounding
  errors, which are as large for all eigenvalues.
  """
  while rows:
    growth = itertools.accumulate((sum(c) ** 2 for c in rows), operator.mul)
    count = max(sum(x <= _LARGEST_GROWTH for x in growth), 1)
    square = _products.matmul(y, y.mT)
    factor = poly = _polynomial(square, rows[0], _products.matmul)
    for c in rows[1:count]:
      square = _products.matmul(_products.matmul(poly, square), poly)
      poly = _polynomial(square, c, _products.matmul)
      factor = _products.matmul(poly, factor)
    y = _products.matmul(factor, y)
    rows = rows[count:]
  return y


def newton_schulz(
  matrix: jax.Array,
  *,
  degree: int = 2,
  steps: Steps = 5,
  normalize: str = 'max1',
  matmul_dtype: DTypeLike | None = None,
) -> jax.Array:
  """Brings the singular values of matrices towards one.

  It applies ``Y <- p(Y Y^T) Y`` ``steps`` times, see :mod:`prism_optax.muon`.
  The function commutes with rotations, ``F(U M V^T) = U F(M) V^T``, and with
  transposition; the products are formed on the smaller side. Where the other
  one is twice as long or longer, the steps are taken on the Gram matrix, with
  the same polynomial: five steps of degree 2 on 384 x 1536 then have 0.56 of
  the multiplications.

  =======================  ====================================================
  zero matrix              zero
  norm below one           with ``'max1'`` the matrix is not scaled up: its
                           singular values grow by ``p(0)`` a step at most
  lost rank                zero singular values stay zero
  no rows or no columns    unchanged
  NaN or Inf in an entry   this matrix is not finite, others are not affected
  more rows than columns   transposed, iterated and transposed back
  =======================  ====================================================

  Args:
    matrix: (..., m, n); every matrix of the stack is treated by itself.
    degree: Degree kappa of the polynomial.
    steps: Number q of steps; or the coefficients of another polynomial for each
      of them, from :func:`minimax_coefficients`.
    normalize: The divisor of the matrix before the first step. ``'max1'`` is
      ``max(1, norm)`` as in the source: a matrix of Frobenius norm below one
      keeps its size. ``'frobenius'`` is the norm, as in optax's Muon: zero
      stays zero. ``'none'`` is 1: singular values above ``sqrt(3)`` may
      diverge.
    matmul_dtype: Type of the factors of every product, for instance
      ``jnp.bfloat16``; sums and everything else stay in float32. ``None``: the
      working type, at the highest precision the platform has.

  Returns:
    (..., m, n), in the type of ``matrix``; computed in float32, or in float64
    for float64. Singular values are at most 1 with ``'max1'`` and
    ``'frobenius'``.

  Raises:
    ValueError: If ``matrix`` has fewer than two axes, or for an option that is
      not allowed.

  References:
    DP-Muon, arXiv:2605.12994.

  Example:
    >>> import jax.numpy as jnp
    >>> from prism_optax import muon
    >>> x = jnp.diag(jnp.array([3.0, 4.0]))
    >>> y = muon.newton_schulz(x, steps=8)
    >>> bool(jnp.allclose(y, jnp.eye(2), atol=1e-6))
    True
  """
  check_options(degree, steps, normalize)
  matrix = jnp.asarray(matrix)
  if matrix.ndim < 2:
    raise ValueError(
      f'Expected matrix to have shape (..., m, n), got {matrix.shape=}.'
    )
  y = at_least_float32(matrix)
  y = y / divisor(normalize, frobenius_norm(y))
  tall = y.shape[-2] > y.shape[-1]
  if tall:
    y = y.mT
  rows = polynomials(degree, steps)
  # A square rounded to fewer bits would lose what it is iterated for.
  if matmul_dtype is None and y.shape[-1] >= 2 * y.shape[-2]:
    y = _on_gram_matrix(y, rows)
  else:
    product = functools.partial(_product, dtype=matmul_dtype)
    for c in rows:
      y = product(_polynomial(product(y, y.mT), c, product), y)
  return (y.mT if tall else y).astype(matrix.dtype)
