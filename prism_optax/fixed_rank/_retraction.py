"""Retractions: from a tangent vector back to the manifold."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from prism_optax import _linalg, _validate
from prism_optax._linalg import gram, matmul
from prism_optax.fixed_rank._combinations import (
  Combination,
  Products,
  RankMatrices,
  combination,
  multiply_out,
  products,
)
from prism_optax.fixed_rank._points import Factors, Frame
from prism_optax.fixed_rank._tangents import Tangent, check_fits, remove


def retract(
  frame: Frame,
  tangent: Tangent | Combination,
  *,
  method: str = 'svd',
  align: bool = False,
) -> Factors:
  """Moves from Z along T and back to the manifold.

  The best rank-r approximation of ``Z + T`` (PRISM, arXiv:2606.00944, Eq. 22;
  it differs from ``Z + T`` in second order, Eq. 23).

  ``'svd'`` takes it from the SVD of a 2r x 2r core, in the balanced SVD gauge
  ``(U s^1/2, V s^1/2)`` with signs that point along the old factors.
  ``'second_order'`` (Vandereycken 2013) agrees with it to third order in the
  step and needs no SVD; where ``||S^-1|| ||T|| > 0.1`` for any matrix of the
  batch, ``S = C_L C_R^T``, the SVD is used for the whole batch.

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
    tangent: The step, with its sign and learning rate: coordinates, or a
      combination that is not multiplied out.
    method: ``'svd'`` or ``'second_order'``.
    align: Turn the pair by the orthogonal r x r matrix that brings it closest
      to the old factors (Procrustes). It costs the orthogonal columns.

  Returns:
    The new factors, (..., m, r) and (..., n, r).

  Raises:
    ValueError: For another ``method``, or shapes that do not fit the frame.

  Example:
    >>> import jax.numpy as jnp
    >>> from prism_optax import fixed_rank
    >>> z = fixed_rank.Factors(jnp.eye(3, 1), jnp.eye(2, 1))
    >>> q = fixed_rank.frame(z)
    >>> x = fixed_rank.Tangent(jnp.zeros((3, 1)), 3.0 * jnp.eye(2, 1))
    >>> new = fixed_rank.retract(q, x)  # Z + T = 4 Z is of rank 1 already.
    >>> print((new.left @ new.right.mT).round(3))
    [[4. 0.]
     [0. 0.]
     [0. 0.]]
  """
  _validate.one_of('method', method, ('svd', 'second_order'))
  x = combination(frame, tangent)
  check_fits(frame, 'tangent', x.columns)
  inner = products(frame, x)
  shift = [
    jnp.zeros_like(w) if s is None else s
    for w, s in zip(x.weights, x.shift, strict=True)
  ]
  arrays = (
    *frame,
    *x.columns,
    *x.weights,
    *shift,
    *inner.along,
    *inner.squares,
  )
  return Factors(*_method(method, bool(align))(*arrays))


@functools.cache
def _method(method: str, align: bool) -> Callable:
  by_svd = functools.partial(_by_svd, align=align)
  fn = by_svd
  if method == 'second_order':
    fn = functools.partial(_second_order, align=align, fallback=by_svd)
  sides = len(Frame._fields)

  def call(*arrays):
    left, right, *matrices = arrays[sides:]
    weights, shift, along, squares = (
      RankMatrices(*matrices[i : i + 2]) for i in range(0, 8, 2)
    )
    nothing = RankMatrices(None, None)  # Q^T X is in `along`.
    x = Combination(Tangent(left, right), nothing, weights, shift)
    return fn(Frame(*arrays[:sides]), x, Products(along, squares))

  return _linalg.flat_batch(call)


# Largest sum of squares of the inverse of a Cholesky factor, its columns of
# unit length, for which a basis by Cholesky is used: the orthogonality of the
# basis is off by as many machine epsilons.
_LARGEST_INVERSE = 32


def _by_svd(frame, tangent, inner, *, align):
  """Best rank-r approximation of Z + T, for (b, ., .) arrays.

  The outer blocks of T need orthonormal bases. Where they are well conditioned,
  as noise and what is preconditioned against it are, their Cholesky factors
  give bases ``X' W`` that are never formed; else Householder QR.
  """
  along, squares = inner
  # D = Q_L^T T Q_R, since X_R = X_R' + Q_R D^T.
  best = functools.partial(_best, frame, along.right.mT, align=align)
  (r_left, w_left, fine_left), (r_right, w_right, fine_right) = map(
    _cholesky, along, squares
  )

  def by_cholesky():
    u, v = best(r_left, r_right)

    def coefficients(rows, w):
      inside, outside = jnp.split(rows, 2, axis=-2)
      return inside, matmul(w, outside)

    return _factors(
      frame, tangent, along, coefficients(u, w_left), coefficients(v, w_right)
    )

  def by_householder():
    q_left, q_right = frame.left, frame.right
    x_left, x_right = multiply_out(frame, tangent)
    sides = ((q_left, x_left), (q_right, x_right))
    (y_left, r_left), (y_right, r_right) = (
      _linalg.qr(remove(q, x)) for q, x in sides
    )
    u, v = best(r_left, r_right)
    moved = jnp.any(x_left != 0, (-2, -1)) | jnp.any(x_right != 0, (-2, -1))

    def factor(q, y, coefficients, old):
      stay = jnp.concatenate([old, jnp.zeros_like(old)], -2)
      coefficients = jnp.where(moved[:, None, None], coefficients, stay)
      return matmul(jnp.concatenate([q, y], -1), coefficients)

    return (
      factor(q_left, y_left, u, frame.left_core),
      factor(q_right, y_right, v, frame.right_core),
    )

  return jax.lax.cond(fine_left & fine_right, by_cholesky, by_householder)


def _factors(frame, tangent, along, left, right):
  """``Q inside + (I - P) X outside`` on either side."""

  def side(q, columns, weights, shift, a, coefficients):
    inside, outside = coefficients
    # (I - P) X = X - Q a, and X itself is a combination of columns and of Q.
    inside = inside + matmul(shift - a, outside)
    return matmul(q, inside) + matmul(columns, matmul(weights, outside))

  x = tangent
  return (
    side(
      frame.left, x.columns.left, x.weights.left, x.shift.left, along.left, left
    ),
    side(
      frame.right, x.columns.right, x.weights.right, x.shift.right, along.right,
      right,
    ),
  )  # fmt: skip


def _cholesky(along, total):
  """``R`` and ``W`` with ``(I - q q^T) x = Y R`` and ``Y = (I - q q^T) x W``.

  From ``q^T x`` and ``x^T x``. And whether they are to be used, for the whole
  batch: Y orthonormal, and no digits lost where what lies along q is
  subtracted.
  """
  outer = total - gram(along, along)
  squares = jnp.diagonal(outer, axis1=-2, axis2=-1)
  totals = jnp.diagonal(total, axis1=-2, axis2=-1)
  tiny = jnp.finfo(total.dtype).tiny / jnp.finfo(total.dtype).eps
  fine = jnp.all((squares > totals / 8) & (squares > tiny))
  scale = jnp.sqrt(jnp.where(squares > 0, squares, 1))
  inverse = _linalg.inverse_cholesky(
    outer / (scale[:, :, None] * scale[:, None, :])
  )
  size = jnp.sum(jnp.square(inverse), axis=(-2, -1))
  # A failed factorisation is NaN, and fails this comparison.
  fine &= jnp.all(size <= _LARGEST_INVERSE * total.shape[-1])
  weights = inverse / scale[:, :, None]
  return gram(weights, outer), weights, fine


def _best(frame, core, r_left, r_right, *, align):
  """New factors, as coefficients (b, 2r, r) in the bases ``[Q, Y]``."""
  c_left, c_right = frame.left_core, frame.right_core
  rank = core.shape[-1]
  zeros = jnp.zeros_like(core)
  blocks = jnp.concatenate(
    [
      jnp.concatenate([matmul(c_left, c_right.mT) + core, r_right.mT], -1),
      jnp.concatenate([r_left, zeros], -1),
    ],
    -2,
  )
  u, s, vt = _linalg.svd(blocks)
  u, s, v = u[..., :rank], s[..., :rank], vt.mT[..., :rank]
  # Rounding errors of a 2r x 2r matrix.
  lost = s <= 2 * rank * jnp.finfo(s.dtype).eps * s[:, :1]
  masks = frame.left_mask, frame.right_mask
  u, v = jax.lax.cond(
    jnp.any(lost), _keep_one_side, lambda *a: a[:2], u, v, lost, *masks
  )
  # Lost columns get the scale of the largest, or of the old factors at Z = 0.
  sizes = [jnp.max(_linalg.column_norms(c), -1) for c in (c_left, c_right)]
  largest = jnp.where(s[:, 0] > 0, jnp.sqrt(s[:, 0]), jnp.maximum(*sizes))
  root = jnp.where(lost, largest[:, None], jnp.sqrt(s))[:, None, :]
  u, v = u * root, v * root
  overlap = gram(u[:, :rank], c_left) + gram(v[:, :rank], c_right)
  if align:
    turn = _linalg.orthogonal_polar(overlap)
    return matmul(u, turn), matmul(v, turn)
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
  left_rank, right_rank = (
    jnp.trace(mask, axis1=-2, axis2=-1) for mask in (left_mask, right_mask)
  )
  # Both are integers up to rounding; half a unit keeps ties stable.
  keep_right = (right_rank > left_rank - 0.5)[:, None, None]

  def complete(basis, mask):
    basis = basis * ~lost[:, None, :]
    # The old directions, Q's r coordinates masked to its range, without what
    # the basis has; as many as were lost, the most independent ones first.
    old = jnp.concatenate([mask, jnp.zeros_like(mask)], -2)
    rest = old - matmul(basis, gram(basis, old))
    fresh, size, _ = _linalg.svd(rest)
    fresh = fresh[..., :rank] * (size[:, None, :rank] > 0.5)
    # `lost` marks the last columns, since singular values descend: reversed
    # order puts the first of the fresh ones on the last column.
    return basis + fresh[..., ::-1] * lost[:, None, :]

  zero = ~lost[:, None, :]
  return (
    jnp.where(keep_right, u * zero, complete(u, left_mask)),
    jnp.where(keep_right, complete(v, right_mask), v * zero),
  )


def _second_order(frame, tangent, inner, *, align, fallback):
  """``Z_U S^-1 Z_V^T`` of Vandereycken (2013), or ``fallback``."""
  q_left, q_right, c_left, c_right, i_left, i_right, *masks = frame
  inverse = matmul(i_right.mT, i_left)  # S^-1 for S = C_L C_R^T.
  energies = [jnp.trace(x, axis1=-2, axis2=-1) for x in inner.squares]
  ranks = [jnp.trace(mask, axis1=-2, axis2=-1) for mask in masks]
  full = jnp.minimum(*ranks) > inverse.shape[-1] - 0.5
  norm = jnp.sqrt(jnp.maximum(sum(energies), 0))
  size = jnp.linalg.norm(inverse, axis=(-2, -1)) * norm

  def expand(*_):
    s, core = matmul(c_left, c_right.mT), inner.along.right.mT  # S, D
    across = matmul(inverse, core)  # S^-1 D
    back = matmul(core, inverse)  # D S^-1
    cubic = matmul(core, across)
    eye = jnp.eye(core.shape[-1], dtype=core.dtype)

    # Z_U = Q_L (S + D/2 - D S^-1 D / 8) + X_L (I - S^-1 D / 2), and the new
    # left factor is Z_U C_R^-T, so that the pair keeps its balance.
    def side(s, core, cubic, inverse_core, weight):
      inside = matmul(s + core / 2 - cubic / 8, weight)
      return inside, matmul(eye - inverse_core / 2, weight)

    left, right = _factors(
      frame,
      tangent,
      inner.along,
      side(s, core, cubic, across, i_right.mT),
      side(s.mT, core.mT, cubic.mT, back.mT, i_left.mT),
    )
    if align:
      old_left, old_right = matmul(q_left, c_left), matmul(q_right, c_right)
      overlap = gram(left, old_left) + gram(right, old_right)
      turn = _linalg.orthogonal_polar(overlap)
      left, right = matmul(left, turn), matmul(right, turn)
    return left, right

  return jax.lax.cond(
    jnp.all(full & (size <= 0.1)), expand, fallback, frame, tangent, inner
  )
