"""Factorisations of several small matrices, on each kind of device.

On a CPU they run one after the other, elsewhere batched: XLA's CPU runtime
shares one thread pool between independent operations and the batch loop inside
LAPACK calls, and two such calls at once can wait for each other for ever.
"""

import functools
import math
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np

# Beyond this size cuSOLVER has no batched SVD, and they run one by one.
_LARGEST_BATCHED = 32
# Beyond this size `dominant_pairs` takes less time on a CPU than an SVD.
_LARGEST_DIRECT = 32
# Largest sum of squares of a graph: orthogonality is off by as many epsilons.
_LARGEST_GRAPH = 16

# A TPU multiplies float32 in bfloat16 unless it is told not to.
matmul = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)

Out = TypeVar('Out')


def map_matrices(fn: Callable[..., Out], *args: jax.Array) -> Out:
  """Maps ``fn`` over axis 0: in turn on CPU, batched elsewhere."""
  if args[0].shape[0] == 1:  # No loop for a single matrix.
    return jax.tree.map(lambda y: y[None], fn(*(a[0] for a in args)))
  out: Out = jax.lax.platform_dependent(
    *args,
    cpu=lambda *xs: jax.lax.map(lambda x: fn(*x), xs),
    default=jax.vmap(fn),
  )
  return out


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
  return s <= size * jnp.finfo(s.dtype).eps * s[:, :1]


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

  def direct(x):
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
  values, vectors = jnp.linalg.eigh(both + both.mT)
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
    x = matmul(x, 1.5 * eye - matmul(x.mT, x) / 2)
  return x


def dominant_pairs(
  core: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """The r largest singular values of (b, 2r, 2r) cores, and their vectors.

  On a CPU, matrix after matrix: where these values stand clear of the others,
  as they do after a few steps of training, from products and one SVD of half
  the size.

  Args:
    core: (b, 2r, 2r), the lower right r x r block zero.

  Returns:
    u (b, 2r, r), s (b, r) and v (b, 2r, r), as from :func:`svd`.
  """
  rank = core.shape[-1] // 2

  def direct(core: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    u, s, vt = svd(core)
    return u[..., :rank], s[:, :rank], vt.mT[..., :rank]

  if 2 * rank <= _LARGEST_DIRECT:
    return direct(core)

  def each(core):
    *found, is_found = pairs_by_iteration(core)
    return jax.lax.cond(
      is_found,
      lambda: tuple(found),
      lambda: tuple(x[0] for x in direct(core[None])),
    )

  out: tuple[jax.Array, jax.Array, jax.Array] = jax.lax.platform_dependent(
    core, cpu=lambda x: map_matrices(each, x), default=direct
  )
  return out


def pairs_by_iteration(
  core: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
  """:func:`dominant_pairs` of one matrix, and whether they are to be used.

  Subspace iteration (Golub and Van Loan, section 8.2) from the first r unit
  vectors, the subspaces as graphs ``[I, Q]`` and ``[I, P]``: with
  ``core = [[A, B], [C, 0]]`` it is ``Q = C (A + B P)^-1`` and
  ``P = B^T (A^T + C^T Q)^-1``, r x r throughout. A step takes the square of
  the ratio of the largest value that is left out to the smallest that is kept.
  The pairs are refused unless what couples the subspaces to the rest is
  rounding, the rest is smaller than all that is kept, and Q and P are so small
  that Cholesky factors make them orthonormal.
  """
  rank = core.shape[-1] // 2
  largest = jnp.max(jnp.abs(core))
  scale = jnp.where(largest > 0, largest, 1)
  core = core / scale  # No square of an entry under- or overflows.
  a, b, c = core[:rank, :rank], core[:rank, rank:], core[rank:, :rank]
  eye = jnp.eye(rank, dtype=core.dtype)

  def divided(x: jax.Array, y: jax.Array) -> jax.Array:  # x y^-1
    quotient: jax.Array = jnp.linalg.solve(y.T, x.T)
    return quotient.T

  # An SVD's error is as large: the norm of A is at most root r singular values.
  eps = float(np.finfo(core.dtype).eps)
  limit = eps * math.sqrt(2 * rank) * jnp.linalg.norm(a)

  def goes_on(state):
    *_, coupling, last = state
    return (coupling > limit) & (coupling < last / 8)

  def step(state):
    p, _, last, _ = state
    q = divided(c, a + matmul(b, p))
    p = divided(b.T, (a + matmul(q.T, c)).T)
    coupling = jnp.linalg.norm(c - matmul(q, a + matmul(b, p)))
    return p, q, coupling, last

  none = jnp.zeros_like(a)
  infinite = jnp.array(jnp.inf, core.dtype)
  state = step((none, none, infinite, infinite))
  p, q, coupling, _ = jax.lax.while_loop(goes_on, step, state)

  def whitening(x: jax.Array) -> jax.Array:  # W with W^T (I + x^T x) W = I
    lower = jnp.linalg.cholesky(eye + matmul(x.T, x))
    return jax.scipy.linalg.solve_triangular(lower, eye, lower=True).T

  w_left, w_right = whitening(q), whitening(p)
  kept = a + matmul(b, p) + matmul(q.T, c)  # [I, Q^T] core [I, P]
  # Where A is singular there may be infinity.
  kept = no_infinity(matmul(w_left.T, matmul(kept, w_right)))
  u, s, vt = jnp.linalg.svd(kept)
  # [-Q, I] core [-P^T, I]: at least as large as in orthonormal bases.
  rest = matmul(q, matmul(a, p.T) - b) - matmul(c, p.T)
  sizes = jnp.stack([jnp.sum(jnp.square(x)) for x in (q, p)])
  is_found = (
    (coupling <= limit)
    & jnp.all(sizes <= _LARGEST_GRAPH)
    & (jnp.linalg.norm(rest) < s[-1] / 2)
  )
  u, v = matmul(w_left, u), matmul(w_right, vt.T)
  u = jnp.concatenate([u, matmul(q, u)])
  return u, s * scale, jnp.concatenate([v, matmul(p, v)]), is_found
