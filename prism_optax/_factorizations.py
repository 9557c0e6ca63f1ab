"""Factorisations of several small matrices, on each kind of device.

On a CPU they run one after the other, elsewhere batched: XLA's CPU runtime
shares one thread pool between independent operations and the batch loop inside
LAPACK calls, and two such calls at once can wait for each other for ever.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# Beyond this size cuSOLVER has no batched SVD, and they run one by one.
_LARGEST_BATCHED = 32


def map_matrices(fn: Callable[..., Any], *args: jax.Array) -> Any:
  """Maps ``fn`` over axis 0: in turn on CPU, batched elsewhere."""
  if args[0].shape[0] == 1:  # No loop for a single matrix.
    return jax.tree.map(lambda y: y[None], fn(*(a[0] for a in args)))
  return jax.lax.platform_dependent(
    *args,
    cpu=lambda *xs: jax.lax.map(lambda x: fn(*x), xs),
    default=jax.vmap(fn),
  )


def no_infinity(x: jax.Array) -> jax.Array:
  """All NaN in place of matrices with an entry that is not finite.

  LAPACK returns NaN for NaN, and for an infinite entry it never returns.
  """
  finite = jnp.all(jnp.isfinite(x), axis=(-2, -1), keepdims=True)
  return jnp.where(finite, x, jnp.nan)


def negligible(s: jax.Array, size: int) -> jax.Array:
  """Which singular values (b, k), the largest first, are rounding errors.

  Of matrices whose larger side is ``size``.
  """
  eps = float(np.finfo(s.dtype).eps)
  return s <= size * eps * s[:, :1]


def svd(
  x: jax.Array, *, complete: bool = False
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Thin SVD ``u @ diag(s) @ vt`` of (b, m, n) matrices.

  On a TPU, and on a GPU where they are large, it is made of eigenvalues: the
  compiler's own SVD there is five loops that take minutes to compile, or one
  solver call after the other.

  Args:
    x: (b, m, n).
    complete: Whether u and v have orthonormal columns also where singular
      values are :func:`negligible`. If not, these columns may be zero.

  Returns:
    u (b, m, k), s (b, k) and vt (b, k, n) with k = min(m, n). All NaN for a
    matrix with an entry that is not finite.
  """

  def direct(x: jax.Array) -> Any:
    return map_matrices(
      lambda a: tuple(jnp.linalg.svd(a, full_matrices=False)), x
    )

  x = no_infinity(x)
  if complete:
    u, s, vt = direct(x)
    return u, s, vt
  on_gpu = direct if max(x.shape[1:]) <= _LARGEST_BATCHED else svd_by_eigh
  out: tuple[jax.Array, jax.Array, jax.Array] = jax.lax.platform_dependent(
    x, tpu=svd_by_eigh, cuda=on_gpu, default=direct
  )
  return out


def svd_by_eigh(x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
  """:func:`svd` from eigenvectors ``(u, v) / sqrt(2)`` of [[0, x], [x^T, 0]].

  The eigenvalues are plus and minus the singular values (Golub and Van Loan,
  section 8.6), so that small ones are not squared, as they are in ``x^T x``. An
  eigenvector of a small one is mixed with that of its negative, by as much as
  the spectrum is spread times the machine epsilon. That leaves the product as
  it is and takes u and v from orthonormal: Newton-Schulz steps bring them back.
  """
  m, n = x.shape[1:]
  largest = jnp.max(jnp.abs(x), (1, 2), keepdims=True)
  scale = jnp.where(largest > 0, largest, 1)
  x = x / scale  # No square of an entry under- or overflows.
  both = jnp.pad(x, ((0, 0), (0, n), (m, 0)))
  values, vectors = jax.vmap(jnp.linalg.eigh)(both + both.mT)
  k = min(m, n)
  s = jnp.maximum(values[:, ::-1][:, :k], 0)
  leading = math.sqrt(2) * vectors[:, :, ::-1][:, :, :k]
  leading = jnp.where(negligible(s, max(m, n))[:, None, :], 0, leading)
  u, v = _orthonormal(leading[:, :m]), _orthonormal(leading[:, m:])
  return u, s * scale[:, 0], v.mT


def _orthonormal(x: jax.Array) -> jax.Array:
  """The polar factor of nearly orthonormal columns; zero columns stay.

  A step leaves 3/4 of the square of the error. What is not negligible is mixed
  by a tenth at most: three steps leave rounding.
  """
  eye = jnp.eye(x.shape[-1], dtype=x.dtype)
  for _ in range(3):
    square = jnp.matmul(x.mT, x, precision=jax.lax.Precision.HIGHEST)
    x = jnp.matmul(x, 1.5 * eye - square / 2, precision='highest')
  return x
