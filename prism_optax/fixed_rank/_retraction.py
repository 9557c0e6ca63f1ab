"""Retractions: from a tangent vector back to the manifold."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from prism_optax import _linalg, _validate
from prism_optax._linalg import gram, matmul
from prism_optax.fixed_rank._points import Factors, Frame
from prism_optax.fixed_rank._tangents import Tangent, check_fits, remove


def retract(
  frame: Frame,
  tangent: Tangent,
  *,
  method: str = 'svd',
  align: bool = False,
) -> Factors:
  """Moves from Z along T and back to the manifold (PRISM, Eq. 22).

  ``'svd'`` returns the best rank-r approximation of ``Z + T`` from the SVD of
  a 2r x 2r core, in the balanced SVD gauge ``(U s^1/2, V s^1/2)`` with signs
  that point along the old factors. ``'second_order'`` (Vandereycken 2013)
  agrees with it to third order in the step and needs no SVD; where
  ``||S^-1|| ||T|| > 0.1`` for any matrix of the batch, ``S = C_L C_R^T``, the
  SVD is used for the whole batch.

  ============================  ==============================================
  ``T = 0`` exactly             the old factors (``Q C``), unturned
  ``Z + T`` of rank below r     the lost columns are zero on one side and keep
                                old directions on the other: Z is unchanged by
                                them, and training can use them again
  one factor zero               as above: the step is one-sided
  ============================  ==============================================

  Args:
    frame: Frame of Z, (..., m, r) and (..., n, r).
    tangent: The step, with its sign and learning rate.
    method: ``'svd'`` or ``'second_order'``.
    align: Turn the pair by the orthogonal r x r matrix that brings it closest
      to the old factors (Procrustes). It costs the orthogonal columns.

  Returns:
    The new factors.

  Raises:
    ValueError: For another ``method``, or shapes that do not fit the frame.
  """
  _validate.one_of('method', method, ('svd', 'second_order'))
  check_fits(frame, 'tangent', tangent)
  return Factors(*_method(method, bool(align))(*frame, *tangent))


@functools.cache
def _method(method: str, align: bool) -> Callable:
  by_svd = functools.partial(_by_svd, align=align)
  if method == 'svd':
    return _linalg.flat_batch(by_svd)
  return _linalg.flat_batch(
    functools.partial(_second_order, align=align, fallback=by_svd)
  )


def _by_svd(q_left, q_right, c_left, c_right, _, __, x_left, x_right, *, align):
  """Best rank-r approximation of Z + T, for (b, ., .) arrays.

  Everything after the factorisations acts on coefficients (b, 2r, r) with
  respect to the bases ``[Q, Y]``; one product at the end makes the factors.
  """
  rank = x_left.shape[-1]
  core = gram(x_right, q_right)  # D = Q_L^T T Q_R, since X_R = X_R' + Q_R D^T.
  y_left, r_left = _linalg.qr(remove(q_left, x_left))
  y_right, r_right = _linalg.qr(remove(q_right, x_right))
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
  lost = s <= rank * jnp.finfo(s.dtype).eps * s[:, :1]
  u, v = jax.lax.cond(
    jnp.any(lost), _keep_one_side, lambda *a: a[:2], u, v, lost, q_left, q_right
  )
  # Lost columns get the scale of the largest, or of the old factors at Z = 0.
  sizes = [jnp.max(_linalg.column_norms(c), -1) for c in (c_left, c_right)]
  largest = jnp.where(s[:, 0] > 0, jnp.sqrt(s[:, 0]), jnp.maximum(*sizes))
  root = jnp.where(lost, largest[:, None], jnp.sqrt(s))[:, None, :]
  u, v = u * root, v * root
  if align:
    overlap = gram(u[:, :rank], c_left) + gram(v[:, :rank], c_right)
    turn = _linalg.orthogonal_polar(overlap)
    u, v = matmul(u, turn), matmul(v, turn)
  else:  # Signs along the old factors: small steps change the arrays little.
    overlap = jnp.sum(u[:, :rank] * c_left + v[:, :rank] * c_right, -2)
    sign = jnp.where(overlap < 0, -1, 1).astype(u.dtype)[:, None, :]
    u, v = u * sign, v * sign
  moved = jnp.any(x_left != 0, (-2, -1)) | jnp.any(x_right != 0, (-2, -1))

  def factor(q, y, coefficients, old):
    stay = jnp.concatenate([old, zeros], -2)
    coefficients = jnp.where(moved[:, None, None], coefficients, stay)
    return matmul(jnp.concatenate([q, y], -1), coefficients)

  return factor(q_left, y_left, u, c_left), factor(q_right, y_right, v, c_right)


def _keep_one_side(u, v, lost, q_left, q_right):
  """Replaces lost singular pairs by (0, old direction) or (old direction, 0).

  ``u`` and ``v`` (b, 2r, r) are in the bases ``[Q, Y]``; the side whose frame
  has the higher rank keeps its directions (ties: the right, input, side).
  """
  rank = u.shape[-1]
  left_rank = jnp.sum(jnp.square(q_left), axis=(-2, -1))
  right_rank = jnp.sum(jnp.square(q_right), axis=(-2, -1))
  # Both are integers up to rounding; half a unit keeps ties stable.
  keep_right = (right_rank > left_rank - 0.5)[:, None, None]

  def complete(basis, q):
    basis = basis * ~lost[:, None, :]
    # The old directions, Q's r coordinates masked to its range, without what
    # the basis has; as many as were lost, the most independent ones first.
    old = jnp.concatenate([gram(q, q), jnp.zeros_like(gram(q, q))], -2)
    rest = old - matmul(basis, gram(basis, old))
    fresh, size, _ = _linalg.svd(rest)
    fresh = fresh[..., :rank] * (size[:, None, :rank] > 0.5)
    # `lost` marks the last columns, since singular values descend: reversed
    # order puts the first of the fresh ones on the last column.
    return basis + fresh[..., ::-1] * lost[:, None, :]

  zero = ~lost[:, None, :]
  return (
    jnp.where(keep_right, u * zero, complete(u, q_left)),
    jnp.where(keep_right, complete(v, q_right), v * zero),
  )


def _second_order(
  q_left, q_right, c_left, c_right, i_left, i_right, x_left, x_right, *,
  align, fallback,
):  # fmt: skip
  """``Z_U S^-1 Z_V^T`` of Vandereycken (2013), or ``fallback``."""
  inverse = matmul(i_right.mT, i_left)  # S^-1 for S = C_L C_R^T.
  norms = [jnp.linalg.norm(a, axis=(-2, -1)) for a in (x_left, x_right)]
  ranks = [jnp.sum(jnp.square(a), axis=(-2, -1)) for a in (q_left, q_right)]
  full = jnp.minimum(*ranks) > x_left.shape[-1] - 0.5
  size = jnp.linalg.norm(inverse, axis=(-2, -1)) * jnp.hypot(*norms)

  def expand(*_):
    s, core = matmul(c_left, c_right.mT), gram(x_right, q_right)  # S, D
    across = matmul(inverse, core)  # S^-1 D
    back = matmul(core, inverse)  # D S^-1
    cubic = matmul(core, across)

    # Z_U = Q_L (S + D/2 - D S^-1 D / 8) + X_L (I - S^-1 D / 2), and the new
    # left factor is Z_U C_R^-T, so that the pair keeps its balance.
    def side(q, x, s, core, cubic, inverse_core, weight):
      eye = jnp.eye(core.shape[-1], dtype=core.dtype)
      inside = matmul(s + core / 2 - cubic / 8, weight)
      outside = matmul(eye - inverse_core / 2, weight)
      return matmul(q, inside) + matmul(remove(q, x), outside)

    left = side(q_left, x_left, s, core, cubic, across, i_right.mT)
    right = side(q_right, x_right, s.mT, core.mT, cubic.mT, back.mT, i_left.mT)
    if align:
      old_left, old_right = matmul(q_left, c_left), matmul(q_right, c_right)
      overlap = gram(left, old_left) + gram(right, old_right)
      turn = _linalg.orthogonal_polar(overlap)
      left, right = matmul(left, turn), matmul(right, turn)
    return left, right

  args = (
    q_left, q_right, c_left, c_right, i_left, i_right, x_left, x_right
  )  # fmt: skip
  return jax.lax.cond(jnp.all(full & (size <= 0.1)), expand, fallback, *args)
