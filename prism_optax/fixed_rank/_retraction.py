"""The retraction: from a tangent vector back to the manifold."""

import jax
import jax.numpy as jnp

from prism_optax._linalg import _factorizations, _frames, _products
from prism_optax._linalg._products import gram, matmul
from prism_optax.fixed_rank._points import Factors, Frame, right_has_rank
from prism_optax.fixed_rank._tangents import (
  TallSum,
  Tangent,
  TangentSum,
  as_sum,
  check_fits,
  multiply_out,
  remove,
)


def retraction(
  frame: Frame, tangent: Tangent | TangentSum, *, align: bool = False
) -> Factors:
  """Moves from Z along T and back to the manifold.

  The best rank-r approximation of ``Z + T`` (PRISM, arXiv:2606.00944, Eq. 22;
  it differs from ``Z + T`` in second order, Eq. 23) in the balanced SVD gauge
  ``(U s^1/2, V s^1/2)`` with signs that point along the old factors, computed
  without an (m, n) matrix.

  ============================  ==============================================
  ``T = 0`` exactly             the old factors (``Q C``), unturned
  ``Z + T`` of rank below r     the lost columns are zero on one side and keep
                                old directions on the other: Z is unchanged by
                                them, and training can use them again
  one factor zero               as above: the step is one-sided
  NaN or Inf in ``T``           NaN in both factors of this module
  ============================  ==============================================

  Args:
    frame: Frame of Z, (..., m, r) and (..., n, r).
    tangent: The step, with its sign and learning rate: coordinates as arrays,
      or a sum that is not multiplied out.
    align: Turn the pair by the orthogonal r x r matrix that brings it closest
      to the old factors (Procrustes). It costs the orthogonal columns.

  Returns:
    The new factors, (..., m, r) and (..., n, r).

  Raises:
    ValueError: If shapes do not fit the frame.

  Example:
    >>> import jax.numpy as jnp
    >>> from prism_optax import fixed_rank
    >>> z = fixed_rank.Factors(jnp.eye(3, 1), jnp.eye(2, 1))
    >>> q = fixed_rank.frame(z)
    >>> x = fixed_rank.Tangent(jnp.zeros((3, 1)), 3.0 * jnp.eye(2, 1))
    >>> new = fixed_rank.retraction(q, x)  # Z + T = 4 Z is of rank 1 already.
    >>> print((new.left @ new.right.mT).round(3))
    [[4. 0.]
     [0. 0.]
     [0. 0.]]
  """
  x = as_sum(frame, tangent)
  for left, right in zip(x.left.terms, x.right.terms, strict=False):
    check_fits(frame, 'tangent', Tangent(left[0], right[0]))
  new = _best_approximation(frame, x)
  if align:
    along_left = matmul(gram(new.left, frame.left), frame.left_core)
    along_right = matmul(gram(new.right, frame.right), frame.right_core)
    turn = _products.orthogonal_polar(along_left + along_right)
    new = Factors(matmul(new.left, turn), matmul(new.right, turn))
  return new


# Largest sum of squares of the inverse of a Cholesky factor, its columns of
# unit length, for which a basis by Cholesky is used: the orthogonality of the
# basis is off by as many machine epsilons.
_LARGEST_INVERSE = 32


@_products.flat_batch
def _best_approximation(frame: Frame, x: TangentSum) -> Factors:
  """Best rank-r approximation of Z + T, for (b, ., .) arrays.

  With orthonormal bases Y of the outer blocks, ``(I - P) X = Y R``,
  ``Z + T = [Q_L Y_L] M [Q_R Y_R]^T`` with a 2r x 2r core M, and the SVD of M
  gives the new factors. Where the outer blocks are well conditioned,
  as noise and what is preconditioned against it are, Y is ``(I - P) X W`` with
  W from a Cholesky factorisation, and is never formed; else it comes from
  Householder QR (on a TPU from products).
  """
  s = matmul(frame.left_core, frame.right_core.mT)
  core = x.right.along.mT  # D = Q_L^T T Q_R
  rows, weights, fine = _cholesky(x)

  def new_factors(rows):
    r_left, r_right = jnp.split(rows, 2)
    # Z + T = [Q_L Y_L] M [Q_R Y_R]^T
    m = jnp.block([[s + core, r_right.mT], [r_left, jnp.zeros_like(core)]])
    return _new_factors(frame, m)

  def by_cholesky():
    def factor(x: TallSum, rows: jax.Array, w: jax.Array) -> jax.Array:
      inside, outside = jnp.split(rows, 2, axis=-2)
      return (x.outside() @ matmul(w, outside)).shifted(inside).multiply_out()

    u, v = new_factors(rows)
    w_left, w_right = jnp.split(weights, 2)
    return Factors(factor(x.left, u, w_left), factor(x.right, v, w_right))

  def by_basis():
    x_left, x_right = multiply_out(x)
    y_left, r_left = _frames.orthonormal_basis(remove(frame.left, x_left))
    y_right, r_right = _frames.orthonormal_basis(remove(frame.right, x_right))
    u, v = new_factors(jnp.concatenate([r_left, r_right]))
    norms = [_products.column_norms(x) for x in (x_left, x_right)]
    moves = jnp.any(jnp.concatenate(norms, -1) != 0, -1)[:, None, None]

    def factor(q, y, rows, old):
      unmoved = jnp.concatenate([old, jnp.zeros_like(old)], -2)
      inside, outside = jnp.split(jnp.where(moves, rows, unmoved), 2, axis=-2)
      return matmul(q, inside) + matmul(y, outside)

    return Factors(
      factor(frame.left, y_left, u, frame.left_core),
      factor(frame.right, y_right, v, frame.right_core),
    )

  return jax.lax.cond(fine, by_cholesky, by_basis)


def _cholesky(x: TangentSum) -> tuple[jax.Array, jax.Array, jax.Array]:
  """``R`` and ``W`` with ``(I - P) X = Y R`` and ``Y = (I - P) X W``.

  First of the left side, then of the right. And whether they are to be used,
  for the whole batch: Y orthonormal, and no digits lost where what lies along
  the basis is subtracted.
  """
  squares = jnp.concatenate([side.squares() for side in x])
  along = jnp.concatenate([side.along for side in x])
  outer = squares - gram(along, along)
  totals = jnp.diagonal(squares, axis1=-2, axis2=-1)
  lengths = jnp.diagonal(outer, axis1=-2, axis2=-1)
  limits = jnp.finfo(outer.dtype)
  fine = jnp.all((lengths > totals / 8) & (lengths > limits.tiny / limits.eps))
  scale = jnp.sqrt(jnp.where(lengths > 0, lengths, 1))
  inverse = _products.inverse_cholesky(
    outer / (scale[:, :, None] * scale[:, None, :])
  )
  size = jnp.sum(jnp.square(inverse), axis=(-2, -1))
  # A failed factorisation is NaN, and fails this comparison.
  fine &= jnp.all(size <= _LARGEST_INVERSE * outer.shape[-1])
  weights = inverse / scale[:, :, None]
  return gram(weights, outer), weights, fine


def _new_factors(frame: Frame, core: jax.Array) -> tuple[jax.Array, jax.Array]:
  """New factors, as rows (b, 2r, r) of coefficients in the bases ``[Q, Y]``.

  ``core`` (b, 2r, 2r) is ``Z + T`` in these bases.
  """
  c_left, c_right = frame.left_core, frame.right_core
  rank = c_left.shape[-1]
  u, s, v = _factorizations.dominant_pairs(core)
  lost = _factorizations.negligible(s, 2 * rank)
  masks = frame.left_mask, frame.right_mask
  u, v = jax.lax.cond(
    jnp.any(lost), _keep_one_side, lambda *a: a[:2], u, v, lost, *masks
  )
  # Lost columns get the scale of the largest, or of the old factors at Z = 0.
  sizes = [jnp.max(_products.column_norms(c), -1) for c in (c_left, c_right)]
  largest = jnp.where(s[:, 0] > 0, jnp.sqrt(s[:, 0]), jnp.maximum(*sizes))
  root = jnp.where(lost, largest[:, None], jnp.sqrt(s))[:, None, :]
  u, v = u * root, v * root
  overlap = gram(u[:, :rank], c_left) + gram(v[:, :rank], c_right)
  # Signs along the old factors: small steps change the arrays little.
  along = jnp.diagonal(overlap, axis1=-2, axis2=-1)
  sign = jnp.where(along < 0, -1, 1).astype(u.dtype)[:, None, :]
  return u * sign, v * sign


def _keep_one_side(u, v, lost, left_mask, right_mask):
  """Replaces lost singular pairs by (0, old direction) or (old direction, 0).

  ``u`` and ``v`` (b, 2r, r) are in the bases ``[Q, Y]``; the side whose frame
  has the higher rank keeps its directions (ties: the right, input, side).
  """
  rank = u.shape[-1]
  keep_right = right_has_rank(left_mask, right_mask)

  def complete(basis, mask, lost):
    basis = basis * ~lost[:, None, :]
    # The old directions, Q's r coordinates masked to its range, without what
    # the basis has; as many as were lost, the most independent ones first.
    old = jnp.concatenate([mask, jnp.zeros_like(mask)], -2)
    fresh, size, _ = _factorizations.svd(remove(basis, old))
    fresh = fresh[..., :rank] * (size[:, None, :rank] > 0.5)
    # `lost` marks the last columns, since singular values descend: reversed
    # order puts the first of the fresh ones on the last column.
    return basis + fresh[..., ::-1] * lost[:, None, :]

  both = ((u, v), (left_mask, right_mask), (lost, lost))
  new_u, new_v = jnp.split(complete(*map(jnp.concatenate, both)), 2)
  zero = ~lost[:, None, :]
  return (
    jnp.where(keep_right, u * zero, new_u),
    jnp.where(keep_right, new_v, v * zero),
  )
