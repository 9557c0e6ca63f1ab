"""Orthonormal bases and frames of tall matrices."""

import jax
import jax.numpy as jnp

from prism_optax._linalg._factorizations import svd
from prism_optax._linalg._products import (
  Matrices,
  Tall,
  column_norms,
  columns_times,
  eigh,
  flat_batch,
  gram,
  matmul,
  qr,
  safe_reciprocal,
)


def orthonormal_basis(x: Matrices) -> tuple[Matrices, jax.Array]:
  """``x = basis @ core`` of (b, m, r) matrices, the basis orthonormal.

  On a TPU it is made of products: the compiler's own QR of what is tall takes
  most of a minute to compile, for each height. Columns of this basis may be
  shorter than one in directions that are rounding errors in ``x``, those of
  singular values below ``r`` times the machine epsilon of the largest.
  """
  if min(y.shape[-2] for y in _stacks(x)) < _stacks(x)[0].shape[-1]:
    return qr(x)  # Small, and with fewer columns than x has.
  out: tuple[Matrices, jax.Array] = jax.lax.platform_dependent(
    x, tpu=basis_by_products, default=qr
  )
  return out


def basis_by_products(x: Matrices) -> tuple[Matrices, jax.Array]:
  """:func:`orthonormal_basis` from eigenvectors of Gram matrices.

  A Gram matrix resolves directions down to the root of the machine epsilon:
  shorter ones are stretched by no more than that. The second time they stand
  out, and the third time all columns are nearly orthonormal (as in the shifted
  Cholesky QR of Fukaya et al. 2020, whose factorisation can break down).
  """
  largest = jnp.concatenate(
    [jnp.max(jnp.abs(y), (1, 2), keepdims=True) for y in _stacks(x)]
  )
  # The reciprocal of what is not normal is infinite.
  scale = jnp.where(largest >= jnp.finfo(largest.dtype).tiny, largest, 1)
  eye = jnp.eye(_stacks(x)[0].shape[-1], dtype=scale.dtype)

  def once(state):
    count, _, x, core = state
    values, vectors = eigh(gram(x, x))
    least = values.shape[-1] * jnp.finfo(values.dtype).eps * values[:, -1:]
    roots = jnp.sqrt(jnp.maximum(values, least))
    x = matmul(x, vectors * safe_reciprocal(roots, roots > 0)[:, None, :])
    crooked = jnp.any(values[:, 0] < values[:, -1] / 4)
    return count + 1, crooked, x, roots[:, :, None] * gram(vectors, core)

  # A loop whose rounds the compiler does not know: it would write out three.
  start = 0, jnp.asarray(True), columns_times(x, 1 / scale), eye * scale
  *_, basis, core = jax.lax.while_loop(
    lambda state: (state[0] < 3) & state[1], once, start
  )
  return basis, core


def _stacks(x: Matrices) -> tuple[jax.Array, ...]:
  return x.stacks if isinstance(x, Tall) else (x,)


@flat_batch
def orthonormal_frame(
  x: Matrices,
) -> tuple[Matrices, jax.Array, jax.Array, jax.Array]:
  """The polar frame of the normalised columns of ``x``.

  With ``D`` the column norms and ``N = x D^+``, the frame is the polar factor
  ``Q = N (N^T N)^(+1/2)``, a partial isometry on the numerical range of ``x``;
  ``x = Q core`` with ``core = (N^T N)^(1/2) D``. It is a continuous function
  of ``x`` wherever the rank is constant (no signs of singular vectors), and
  ``x O`` has the frame ``Q O`` up to an orthogonal matrix.

  Normalising the columns first makes a diagonal change of gauge harmless at
  any condition. Singular values of ``N`` below ``r`` times the machine
  epsilon, relative to the largest, count as zero: their directions are
  rounding errors.

  Args:
    x: (..., m, r), or ``Tall``.

  Returns:
    ``Q`` like ``x``, ``core`` (..., r, r), its inverse, generalised so that
    ``core @ inverse = Q^T Q``, and the projector ``Q^T Q`` itself.
  """
  products = gram(x, x)
  rank, limits = products.shape[-1], jnp.finfo(products.dtype)
  eye = jnp.eye(rank, dtype=products.dtype)
  squares = jnp.diagonal(products, axis1=-2, axis2=-1)
  alive = squares > 0
  norms = jnp.sqrt(squares)
  reciprocals = safe_reciprocal(norms, alive)
  # A zero column has no diagonal entry of its own; it stays zero below.
  excess = (
    reciprocals[:, :, None] * products * reciprocals[:, None, :]
    - eye * alive[:, None, :]
  )
  # One Newton-Schulz step squares the distance E to orthonormal columns, so
  # ||E||_2 <= sqrt(eps) is enough for full accuracy, if no square has lost
  # digits or is infinite.
  exact = (squares > limits.tiny / limits.eps) & (squares < limits.max)
  nearly_orthogonal = jnp.all(exact | ~alive) & (
    jnp.max(jnp.abs(excess)) <= jnp.sqrt(limits.eps) / rank
  )

  def by_newton_schulz():
    # With x = N D: (N^T N)^(-1/2) = I - E/2 + O(E^2), its inverse I + E/2.
    inverse = reciprocals[:, :, None] * (eye - excess / 2)
    core = (eye + excess / 2) * norms[:, None, :]
    # Rows and columns of dead directions must be exactly zero.
    both = alive[:, None, :] & alive[:, :, None]
    inverse = jnp.where(both, inverse, 0)
    core = jnp.where(both, core, 0)
    return matmul(x, inverse), core, inverse, eye * alive[:, None, :]

  def by_basis():
    norms = column_norms(x)
    # Below this a square underflows; such a column is zero for all purposes.
    alive = norms > jnp.sqrt(limits.tiny)
    norms = jnp.where(alive, norms, 0)
    reciprocals = safe_reciprocal(norms, alive)
    q, within = orthonormal_basis(columns_times(x, reciprocals[:, None, :]))
    u, s, vt = svd(within)
    kept = s > rank * limits.eps * s[:, :1]
    vt = vt * kept[:, :, None]
    frame = matmul(q, matmul(u, vt))
    core = gram(vt, s[:, :, None] * vt) * norms[:, None, :]
    pseudo = gram(vt, safe_reciprocal(s, kept)[:, :, None] * vt)
    inverse = reciprocals[:, :, None] * pseudo
    return frame, core, inverse, gram(vt, vt)

  return jax.lax.cond(nearly_orthogonal, by_newton_schulz, by_basis)
