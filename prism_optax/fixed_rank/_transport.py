"""Tangent vectors carried from one point to another."""

from typing import NamedTuple

import jax

from prism_optax._linalg import gram, matmul
from prism_optax.fixed_rank._combinations import RankMatrices
from prism_optax.fixed_rank._points import Factors, Frame
from prism_optax.fixed_rank._tangents import Tangent, check_fits


class Carried(NamedTuple):
  """A tangent vector of another point, projected here and not multiplied out.

  ``X_L' = X_L @ weights + Q_L @ old - Q_L' @ core``, and the same on the right
  without the core.

  Attributes:
    weights: Of the columns of the coordinates there.
    old: Of the bases there.
    core: ``Q_L'^T T Q_R'``, (..., r, r).
    overlaps: ``Q_L^T Q_L'`` and ``Q_R^T Q_R'`` of the old bases with the new.
  """

  weights: RankMatrices
  old: RankMatrices
  core: jax.Array
  overlaps: RankMatrices


def carry(
  old_frame: Frame | Factors, new_frame: Frame | Factors, tangent: Tangent
) -> Carried:
  """:func:`prism_optax.fixed_rank.transport`, not multiplied out.

  With ``T = X_L Q_R^T + Q_L X_R^T`` at the old point, ``X_L' = (I - P_L') T
  Q_R'`` and ``X_R' = T^T Q_L'``, by products with r x r matrices only: the
  projection of PRISM (arXiv:2606.00944, Eq. 13) of T at the new point. That it
  carries moments from step to step is ours.

  Args:
    old_frame: Frame, or bases, that ``tangent`` is written in.
    new_frame: Frame, or bases, at the other point.
    tangent: Coordinates (..., m, r) and (..., n, r).

  Returns:
    Coefficients (..., r, r).

  Raises:
    ValueError: If m, n or r are not the frames'.

  Example:
    >>> import jax.numpy as jnp
    >>> from prism_optax import fixed_rank
    >>> bases = fixed_rank.Factors(jnp.eye(3, 1), jnp.eye(2, 1))
    >>> x = fixed_rank.Tangent(jnp.zeros((3, 1)), jnp.ones((2, 1)))
    >>> here = fixed_rank.Factors(bases[0], -bases[1])
    >>> fixed_rank.carry(bases, here, x).overlaps.right.tolist()
    [[-1.0]]
  """
  check_fits(new_frame, 'tangent', tangent)
  inside = RankMatrices(
    gram(tangent.left, new_frame[0]), gram(tangent.right, new_frame[1])
  )
  overlaps = RankMatrices(
    gram(old_frame[0], new_frame[0]), gram(old_frame[1], new_frame[1])
  )
  core = gram(inside.left, overlaps.right) + gram(overlaps.left, inside.right)
  return Carried(
    RankMatrices(overlaps.right, overlaps.left),
    RankMatrices(inside.right, inside.left),
    core,
    overlaps,
  )


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
  weights, old, core, _ = carry(old_frame, new_frame, tangent)
  return Tangent(
    matmul(tangent.left, weights.left)
    + matmul(old_frame[0], old.left)
    - matmul(new_frame[0], core),
    matmul(tangent.right, weights.right) + matmul(old_frame[1], old.right),
  )
