"""Geometry of the manifold of m x n matrices of rank r, on arrays.

A point is a pair of factors, ``Z = left @ right.mT``. A tangent vector at Z is
written in orthonormal coordinates with respect to a frame of Z: with
``left = Q_L C_L`` and ``right = Q_R C_R`` (orthonormal ``Q``, square ``C``)

    T = X_L Q_R^T + Q_L X_R^T,        Q_L^T X_L = 0,

so that ``||T||_F^2 = ||X_L||_F^2 + ||X_R||_F^2``: the Euclidean norm of the
coordinates is the intrinsic norm (PRISM, arXiv:2606.00944, Eq. 15), and every
gauge ``(left K, right K^-T)`` of the same Z gives the same coordinates up to
orthogonal matrices on the right. The coordinates have the shapes of the
factors.

Where a factor is zero or rank-deficient its frame is a partial isometry on the
numerical range: directions that the gradients of the factors do not show are
left out (their coordinates are zero), not invented.

All functions broadcast over leading axes and compute in the type of their
arguments, float32 or float64. ``m`` is the output side, ``n`` the input side.
Frames are not differentiated (``stop_gradient``).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from prism_optax import _linalg, _validate
from prism_optax._linalg import gram, matmul


class Factors(NamedTuple):
  """A rank-r matrix ``Z = left @ right.mT``, or a step or gradient of the pair.

  Attributes:
    left: (..., m, r), the output side.
    right: (..., n, r), the input side.
  """

  left: jax.Array
  right: jax.Array


class Tangent(NamedTuple):
  """Orthonormal coordinates of ``T = left Q_R^T + Q_L right^T``.

  Attributes:
    left: ``X_L`` (..., m, r), orthogonal to the columns of ``Q_L``.
    right: ``X_R`` (..., n, r).
  """

  left: jax.Array
  right: jax.Array


class Frame(NamedTuple):
  """Orthonormal bases of the two factors and their r x r cores.

  ``factors.left = left @ left_core``, ``factors.right = right @ right_core``.
  ``left.mT @ left`` is the r x r projector on the observed directions: the
  identity, or less where the factor has lost rank.

  Attributes:
    left: ``Q_L`` (..., m, r).
    right: ``Q_R`` (..., n, r).
    left_core: ``C_L`` (..., r, r).
    right_core: ``C_R`` (..., r, r).
    left_inverse: pseudo-inverse of ``C_L`` (..., r, r).
    right_inverse: pseudo-inverse of ``C_R`` (..., r, r).
  """

  left: jax.Array
  right: jax.Array
  left_core: jax.Array
  right_core: jax.Array
  left_inverse: jax.Array
  right_inverse: jax.Array


def _check_pair(name: str, left: jax.Array, right: jax.Array) -> None:
  """Raises ``ValueError`` unless the shapes are (..., m, r) and (..., n, r)."""
  if (
    left.ndim < 2
    or right.ndim < 2
    or left.shape[:-2] != right.shape[:-2]
    or left.shape[-1] != right.shape[-1]
  ):
    raise ValueError(
      f'Expected {name} of shapes (..., m, r) and (..., n, r), got'
      f' {name}.left.shape={left.shape}, {name}.right.shape={right.shape}.'
    )


def frame(factors: Factors) -> Frame:
  """Orthonormal frames of the two factors.

  Each is the polar factor of the column-normalised factor, a continuous
  function of the factors alone. Factors with orthogonal columns (what
  :func:`retract` returns) need no factorisation.

  Args:
    factors: (..., m, r) and (..., n, r).

  Returns:
    The frame; zero columns, and directions below ``r`` machine epsilons of
    the column-normalised factor, are left out of it.

  Raises:
    ValueError: If the shapes do not match or ``r > min(m, n)``.

  >>> import jax.numpy as jnp
  >>> f = frame(Factors(jnp.array([[3.0], [4.0]]), jnp.array([[0.0], [2.0]])))
  >>> print(f.left.ravel(), f.left_core.ravel(), f.right.ravel())
  [0.6 0.8] [5.] [0. 1.]
  """
  left, right = factors
  _check_pair('factors', left, right)
  rank = left.shape[-1]
  if rank < 1 or rank > min(left.shape[-2], right.shape[-2]):
    raise ValueError(
      'Expected 1 <= rank <= min(m, n), got'
      f' factors.left.shape={left.shape}, factors.right.shape={right.shape}.'
    )
  q_left, c_left, inverse_left = _linalg.orthonormal_frame(left)
  q_right, c_right, inverse_right = _linalg.orthonormal_frame(right)
  return Frame(q_left, q_right, c_left, c_right, inverse_left, inverse_right)


def _remove(q: jax.Array, x: jax.Array) -> jax.Array:
  """``(I - q q^T) x``."""
  return x - matmul(q, gram(q, x))


def tangent_from_gradients(frame: Frame, grads: Factors) -> Tangent:
  """Coordinates of the tangent projection of the gradient in Z.

  For factor gradients ``g_L = G right`` and ``g_R = G^T left`` of one m x n
  gradient G, the result stands for ``P_L G + G P_R - P_L G P_R`` (PRISM,
  Eq. 13): ``X_L = (I - P_L) g_L C_R^-1``, ``X_R = g_R C_L^-1``.

  Args:
    frame: Frame of the factors, axes (..., ., .).
    grads: Gradients with respect to ``left`` (..., m, r) and ``right``
      (..., n, r). They may carry more leading axes than the frame.

  Returns:
    Coordinates in the shapes of ``grads``.
  """
  return Tangent(
    _remove(frame.left, matmul(grads.left, frame.right_inverse)),
    matmul(grads.right, frame.left_inverse),
  )


def project(frame: Frame, tangent: Tangent) -> Tangent:
  """Orthogonal projection of arbitrary arrays on the coordinates at a frame.

  ``X_L <- (I - P_L) X_L Q_R^T Q_R`` and ``X_R <- X_R Q_L^T Q_L``: the right
  factors mask what a rank-deficient factor does not show. Applied to i.i.d.
  standard normal arrays it gives isotropic tangent noise (PRISM, Eq. 17-21).
  """
  return Tangent(
    _remove(frame.left, matmul(tangent.left, gram(frame.right, frame.right))),
    matmul(tangent.right, gram(frame.left, frame.left)),
  )


def lift(frame: Frame, tangent: Tangent) -> Factors:
  """Steps of the factors with ``dL right^T + left dR^T = T``.

  ``dL = X_L C_R^-T`` and ``dR = X_R C_L^-T``; the whole core of T is put on
  the right factor. See :func:`horizontal_lift` for the balanced choice.
  """
  return Factors(
    matmul(tangent.left, frame.right_inverse.mT),
    matmul(tangent.right, frame.left_inverse.mT),
  )


def tangent_from_steps(frame: Frame, steps: Factors) -> Tangent:
  """Coordinates of ``T = dL right^T + left dR^T``: undoes any lift.

  ``X_L = (I - P_L) dL C_R^T`` and ``X_R = dR C_L^T + Q_R C_R dL^T Q_L``.
  """
  return Tangent(
    _remove(frame.left, matmul(steps.left, frame.right_core.mT)),
    matmul(steps.right, frame.left_core.mT)
    + matmul(
      frame.right, matmul(frame.right_core, gram(steps.left, frame.left))
    ),
  )


def horizontal_lift(factors: Factors, steps: Factors) -> Factors:
  """The steps of least norm with the same tangent vector (PRISM, Prop. A.11).

  It is ``(dL + L W, dR - R W^T)`` with ``M W + W N = dR^T R - L^T dL``,
  ``M = L^T L``, ``N = R^T R``. Solved in orthonormal coordinates, where
  ``W' = C_L W C_R^T`` cancels from the tangent vector whatever its accuracy:
  with the core D of T, ``C_L C_L^T W' + W' C_R C_R^T = D C_R C_R^T``.

  Args:
    factors: (..., m, r) and (..., n, r).
    steps: Any lift of the tangent vector, same shapes.

  Returns:
    The horizontal lift, same shapes.
  """
  q = frame(factors)
  x_left, x_right = tangent_from_steps(q, steps)
  core = gram(x_right, q.right)
  w = _linalg.sylvester_of_grams(
    q.left_core.mT,
    q.right_core.mT,
    matmul(core, matmul(q.right_core, q.right_core.mT)),
  )
  return lift(
    q,
    Tangent(x_left + matmul(q.left, w), x_right - matmul(q.right, w.mT)),
  )


def norm(tangent: Tangent) -> jax.Array:
  """Intrinsic norm ``||T||_F``, shape (...): the norm of the coordinates."""
  return jnp.sqrt(
    jnp.sum(jnp.square(tangent.left), axis=(-2, -1))
    + jnp.sum(jnp.square(tangent.right), axis=(-2, -1))
  )


def embed(frame: Frame, tangent: Tangent) -> jax.Array:
  """The dense m x n matrix T, (..., m, n): for tests and small problems."""
  return matmul(tangent.left, frame.right.mT) + matmul(
    frame.left, tangent.right.mT
  )


def transport(old_frame: Frame, new_frame: Frame, tangent: Tangent) -> Tangent:
  """Projects a tangent vector at one point on the tangent space at another.

  With ``T = X_L Q_R^T + Q_L X_R^T`` at the old point, ``X_L' = (I - P_L') T
  Q_R'`` and ``X_R' = T^T Q_L'``, by products with r x r matrices only.
  """
  left = matmul(tangent.left, gram(old_frame.right, new_frame.right)) + matmul(
    old_frame.left, gram(tangent.right, new_frame.right)
  )
  right = matmul(old_frame.right, gram(tangent.left, new_frame.left)) + matmul(
    tangent.right, gram(old_frame.left, new_frame.left)
  )
  return Tangent(_remove(new_frame.left, left), right)


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
    ValueError: For another ``method``.
  """
  _validate.one_of('method', method, ('svd', 'second_order'))
  args = (*frame, *tangent)
  if method == 'svd':
    new = Factors(*_retract_svd(*args))
  else:
    new = Factors(*_retract_second_order(*args))
  old = Factors(
    matmul(frame.left, frame.left_core), matmul(frame.right, frame.right_core)
  )
  if align:
    overlap = gram(new.left, old.left) + gram(new.right, old.right)
    turn = _linalg.orthogonal_polar(overlap)
    new = Factors(matmul(new.left, turn), matmul(new.right, turn))
  moved = jnp.any(tangent.left != 0, axis=(-2, -1), keepdims=True) | jnp.any(
    tangent.right != 0, axis=(-2, -1), keepdims=True
  )
  return Factors(
    *(jnp.where(moved, x, y) for x, y in zip(new, old, strict=True))
  )


@_linalg.flat_batch
def _retract_svd(q_left, q_right, c_left, c_right, _, __, x_left, x_right):
  """Best rank-r approximation of Z + T, for (b, ., .) arrays."""
  rank = x_left.shape[-1]
  core = gram(x_right, q_right)  # D = Q_L^T T Q_R, since X_R = X_R' + Q_R D^T.
  y_left, r_left = _linalg.qr(_remove(q_left, x_left))
  y_right, r_right = _linalg.qr(_remove(q_right, x_right))
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
  eps = rank * jnp.finfo(s.dtype).eps
  lost = s <= eps * s[:, :1]
  u_side, v_side = jax.lax.cond(
    jnp.any(lost), _keep_one_side, lambda *a: a[:2], u, v, lost, q_left, q_right
  )
  # Lost columns get the scale of the largest, or of the old factors at Z = 0.
  old_size = jnp.maximum(
    *(
      jnp.max(_linalg.column_norms(c), -1, keepdims=True)
      for c in (c_left, c_right)
    )
  )
  root = jnp.where(s[:, :1] > 0, jnp.sqrt(s[:, :1]), old_size)
  root = jnp.where(lost, root, jnp.sqrt(s))[:, None, :]
  left = matmul(jnp.concatenate([q_left, y_left], -1), u_side) * root
  right = matmul(jnp.concatenate([q_right, y_right], -1), v_side) * root
  # Signs along the old factors: small steps change the arrays little.
  overlap = jnp.sum(left * matmul(q_left, c_left), -2, keepdims=True) + jnp.sum(
    right * matmul(q_right, c_right), -2, keepdims=True
  )
  sign = jnp.where(overlap < 0, -1, 1).astype(left.dtype)
  return left * sign, right * sign


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


@_linalg.flat_batch
def _retract_second_order(
  q_left, q_right, c_left, c_right, i_left, i_right, x_left, x_right
):
  """``Z_U S^-1 Z_V^T`` of Vandereycken (2013), with the SVD as a fallback."""
  inverse = matmul(i_right.mT, i_left)  # S^-1 for S = C_L C_R^T.
  norms = [jnp.linalg.norm(a, axis=(-2, -1)) for a in (x_left, x_right)]
  step = jnp.hypot(*norms)
  rank = (
    jnp.sum(jnp.square(q_left), (-2, -1)),
    jnp.sum(jnp.square(q_right), (-2, -1)),
  )
  full = jnp.minimum(*rank) > x_left.shape[-1] - 0.5
  safe = full & (jnp.linalg.norm(inverse, axis=(-2, -1)) * step <= 0.1)

  def expand(*_):
    core = gram(x_right, q_right)  # D
    across = matmul(inverse, core)  # S^-1 D
    back = matmul(core, inverse)  # D S^-1

    # Z_U = Q_L (S + D/2 - D S^-1 D / 8) + X_L (I - S^-1 D / 2), and the new
    # left factor is Z_U C_R^-T, so that left^T right keeps the old balance.
    def side(q, s, d, d_inverse_d, x, inverse_d, weight):
      eye = jnp.eye(d.shape[-1], dtype=d.dtype)
      z = matmul(q, s + d / 2 - d_inverse_d / 8)
      return matmul(z + matmul(x, eye - inverse_d / 2), weight)

    s = matmul(c_left, c_right.mT)
    cubic = matmul(core, across)
    left = side(
      q_left, s, core, cubic, _remove(q_left, x_left), across, i_right.mT
    )
    right = side(
      q_right,
      s.mT,
      core.mT,
      cubic.mT,
      _remove(q_right, x_right),
      back.mT,
      i_left.mT,
    )
    return left, right

  args = (
    q_left, q_right, c_left, c_right, i_left, i_right, x_left, x_right,
  )  # fmt: skip
  return jax.lax.cond(jnp.all(safe), expand, _retract_svd, *args)
