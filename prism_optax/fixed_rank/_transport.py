"""Tangent vectors carried from one point to another."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from prism_optax._linalg import gram, matmul
from prism_optax.fixed_rank._points import Factors, Frame
from prism_optax.fixed_rank._tangents import Tangent, check_fits


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
  """Joins a tangent vector and the bases of its frame.

  Args:
    frame: Frame of the factors, or its two bases as ``Factors``.
    tangent: Coordinates (..., m, r) and (..., n, r).

  Returns:
    ``[X_L, Q_L]`` and ``[X_R, Q_R]``, for :func:`carry`.

  Raises:
    ValueError: If m, n or r are not the frame's.

  Example:
    >>> import jax.numpy as jnp
    >>> from prism_optax import fixed_rank
    >>> bases = fixed_rank.Factors(jnp.eye(3, 1), jnp.eye(2, 1))
    >>> x = fixed_rank.Tangent(jnp.zeros((3, 1)), jnp.ones((2, 1)))
    >>> fixed_rank.anchor(bases, x).right.tolist()
    [[1.0, 1.0], [1.0, 0.0]]
  """
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
  Q_R'`` and ``X_R' = T^T Q_L'``, by products with r x r matrices only: the
  projection of PRISM (arXiv:2606.00944, Eq. 13) of T at the new point. That it
  carries moments from step to step is ours.

  Args:
    anchored: From :func:`anchor` at the old point.
    frame: Frame at the new point, or its two bases as ``Factors``.

  Returns:
    The tangent vector, of no larger norm, and the overlaps ``Q_L^T Q_L'`` and
    ``Q_R^T Q_R'`` of the old bases with the new ones, (..., r, r).

  Example:
    >>> import jax.numpy as jnp
    >>> from prism_optax import fixed_rank
    >>> bases = fixed_rank.Factors(jnp.eye(3, 1), jnp.eye(2, 1))
    >>> x = fixed_rank.Tangent(jnp.zeros((3, 1)), jnp.ones((2, 1)))
    >>> new, overlaps = fixed_rank.carry(
    ...   fixed_rank.anchor(bases, x), fixed_rank.Factors(bases[0], -bases[1]))
    >>> new.right.ravel().tolist(), overlaps[1].tolist()  # T itself stays.
    ([1.0, 1.0], [[-1.0]])
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

  See :func:`carry`: the projection of PRISM's Eq. 13 (arXiv:2606.00944). Of the
  frames only the two bases are read.

  Args:
    old_frame: Frame, or bases, that ``tangent`` is written in.
    new_frame: Frame, or bases, at the other point.
    tangent: Coordinates (..., m, r) and (..., n, r).

  Returns:
    Coordinates in the new frame, same shapes, of no larger norm.

  Raises:
    ValueError: If m, n or r are not the frames'.

  Example:
    >>> import jax.numpy as jnp
    >>> from prism_optax import fixed_rank
    >>> old = fixed_rank.Factors(jnp.eye(3, 1), jnp.eye(2, 1))
    >>> new = fixed_rank.Factors(jnp.eye(3, 1), jnp.eye(2, 1, -1))
    >>> x = fixed_rank.Tangent(jnp.zeros((3, 1)), jnp.array([[3.0], [4.0]]))
    >>> fixed_rank.transport(old, new, x).right.ravel().tolist()
    [3.0, 4.0]
  """
  check_fits(new_frame, 'tangent', tangent)
  return carry(anchor(old_frame, tangent), new_frame)[0]
