"""Tangent vectors in orthonormal coordinates."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from prism_optax import _linalg
from prism_optax._linalg import gram, matmul
from prism_optax.fixed_rank._points import Factors, Frame
from prism_optax.fixed_rank._points import frame as frame_of


class Tangent(NamedTuple):
  """Orthonormal coordinates of ``T = left Q_R^T + Q_L right^T``.

  Attributes:
    left: ``X_L`` (..., m, r), orthogonal to the columns of ``Q_L``.
    right: ``X_R`` (..., n, r).
  """

  left: jax.Array
  right: jax.Array


def check_fits(
  frame: Frame | Factors, name: str, pair: Factors | Tangent
) -> None:
  """Raises ``ValueError`` unless m, n and r of ``pair`` are the frame's.

  Broadcasting would turn some other shapes into a wrong answer.
  """
  for x, q in zip(pair, frame, strict=False):
    if jnp.shape(x)[-2:] != q.shape[-2:]:
      raise ValueError(
        f'Expected {name} of shapes (..., {q.shape[-2]}, {q.shape[-1]}) for'
        f' frames of shapes {frame[0].shape} and {frame[1].shape}, got'
        f' {name}.left.shape={jnp.shape(pair[0])},'
        f' {name}.right.shape={jnp.shape(pair[1])}.'
      )


def remove(q: jax.Array, x: jax.Array) -> jax.Array:
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
  check_fits(frame, 'grads', grads)
  return Tangent(
    remove(frame.left, matmul(grads.left, frame.right_inverse)),
    matmul(grads.right, frame.left_inverse),
  )


def project(frame: Frame, tangent: Tangent) -> Tangent:
  """Orthogonal projection of arbitrary arrays on the coordinates at a frame.

  ``X_L <- (I - P_L) X_L Q_R^T Q_R`` and ``X_R <- X_R Q_L^T Q_L``: the right
  factors mask what a rank-deficient factor does not show. Applied to i.i.d.
  standard normal arrays it gives isotropic tangent noise (PRISM, Eq. 17-21).
  """
  check_fits(frame, 'tangent', tangent)
  return Tangent(
    remove(frame.left, matmul(tangent.left, frame.right_mask)),
    matmul(tangent.right, frame.left_mask),
  )


def lift(
  frame: Frame, tangent: Tangent, *, horizontal: bool = False
) -> Factors:
  """Steps of the factors with ``dL right^T + left dR^T = T``.

  ``dL = X_L C_R^-T`` and ``dR = X_R C_L^-T`` put the whole core of T on the
  right factor. The horizontal lift is the one of least norm (PRISM,
  arXiv:2606.00944, Prop. A.11): it adds ``L W`` and ``-R W^T`` so that
  ``L^T dL = dR^T R``. The equation is solved for ``W' = C_L W C_R^T``, which
  cancels from the tangent vector whatever its accuracy: with the core D of T,
  ``C_L C_L^T W' + W' C_R C_R^T = D C_R C_R^T``.
  """
  check_fits(frame, 'tangent', tangent)
  left, right = tangent
  if horizontal:
    core = gram(right, frame.right)
    w = _linalg.sylvester_of_grams(
      frame.left_core.mT,
      frame.right_core.mT,
      matmul(core, matmul(frame.right_core, frame.right_core.mT)),
    )
    left = left + matmul(frame.left, w)
    right = right - matmul(frame.right, w.mT)
  return Factors(
    matmul(left, frame.right_inverse.mT), matmul(right, frame.left_inverse.mT)
  )


def tangent_from_steps(frame: Frame, steps: Factors) -> Tangent:
  """Coordinates of ``T = dL right^T + left dR^T``: undoes any lift.

  ``X_L = (I - P_L) dL C_R^T`` and ``X_R = dR C_L^T + Q_R C_R dL^T Q_L``.
  """
  check_fits(frame, 'steps', steps)
  return Tangent(
    remove(frame.left, matmul(steps.left, frame.right_core.mT)),
    matmul(steps.right, frame.left_core.mT)
    + matmul(
      frame.right, matmul(frame.right_core, gram(steps.left, frame.left))
    ),
  )


def horizontal_lift(factors: Factors, steps: Factors) -> Factors:
  """The steps of least norm with the same tangent vector (PRISM, Prop. A.11).

  ``(dL + L W, dR - R W^T)`` with ``M W + W N = dR^T R - L^T dL``, ``M = L^T L``
  and ``N = R^T R``. See :func:`lift`.

  Args:
    factors: (..., m, r) and (..., n, r).
    steps: Any lift of the tangent vector, same shapes.

  Returns:
    The horizontal lift, same shapes.
  """
  q = frame_of(factors)
  return lift(q, tangent_from_steps(q, steps), horizontal=True)


def norm(tangent: Tangent) -> jax.Array:
  """Intrinsic norm ``||T||_F``, shape (...): the norm of the coordinates."""
  return jnp.sqrt(
    jnp.sum(jnp.square(tangent.left), axis=(-2, -1))
    + jnp.sum(jnp.square(tangent.right), axis=(-2, -1))
  )


def embed(frame: Frame, tangent: Tangent) -> jax.Array:
  """The dense m x n matrix T, (..., m, n): for tests and small problems."""
  check_fits(frame, 'tangent', tangent)
  return matmul(tangent.left, frame.right.mT) + matmul(
    frame.left, tangent.right.mT
  )


class Anchored(NamedTuple):
  """A tangent vector side by side with the bases that it is written in.

  What is kept from one point to the next, in arrays that one product each
  reads through.

  Attributes:
    left: ``[X_L, Q_L]`` (..., m, 2r).
    right: ``[X_R, Q_R]`` (..., n, 2r).
  """

  left: jax.Array
  right: jax.Array


def anchor(frame: Frame | Factors, tangent: Tangent) -> Anchored:
  """Joins a tangent vector and the bases of its frame."""
  check_fits(frame, 'tangent', tangent)
  return Anchored(
    jnp.concatenate([tangent.left, frame[0]], -1),
    jnp.concatenate([tangent.right, frame[1]], -1),
  )


def carry(
  anchored: Anchored, frame: Frame | Factors
) -> tuple[Tangent, tuple[jax.Array, jax.Array]]:
  """Projects a tangent vector from another point on the tangent space here.

  With ``T = X_L Q_R^T + Q_L X_R^T`` at the old point, ``X_L' = (I - P_L') T
  Q_R'`` and ``X_R' = T^T Q_L'``, by products with r x r matrices only.

  Returns:
    The tangent vector, and the overlaps ``Q_L^T Q_L'`` and ``Q_R^T Q_R'`` of
    the old bases with the new ones, (..., r, r).
  """
  inside_left, turn_left = jnp.split(gram(anchored.left, frame[0]), 2, -2)
  inside_right, turn_right = jnp.split(gram(anchored.right, frame[1]), 2, -2)
  # Q_L'^T T Q_R': what is to be removed, without another tall product.
  core = gram(inside_left, turn_right) + gram(turn_left, inside_right)
  left = jnp.concatenate([turn_right, inside_right], -2)
  right = jnp.concatenate([turn_left, inside_left], -2)
  tangent = Tangent(
    matmul(anchored.left, left) - matmul(frame[0], core),
    matmul(anchored.right, right),
  )
  return tangent, (turn_left, turn_right)


def transport(
  old_frame: Frame | Factors, new_frame: Frame | Factors, tangent: Tangent
) -> Tangent:
  """Projects a tangent vector at one point on the tangent space at another.

  See :func:`carry`. Of the frames only the two bases are read.
  """
  check_fits(new_frame, 'tangent', tangent)
  return carry(anchor(old_frame, tangent), new_frame)[0]
