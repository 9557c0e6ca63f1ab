"""Tangent vectors that are not multiplied out.

Whatever a step does to a tangent vector behind its noise, its coordinates stay
linear combinations of the columns of two tall arrays: of what came in, and of
the frame. So a step keeps r x r coefficients, asks for r x r products, and
touches tall arrays where it must: to add noise, to average, to retract.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp

from prism_optax._linalg import gram, matmul
from prism_optax.fixed_rank._points import Frame
from prism_optax.fixed_rank._tangents import Tangent, check_fits


class RankMatrices(NamedTuple):
  """One r x r matrix for either side.

  Attributes:
    left: (..., r, r), for the columns of ``X_L`` or ``Q_L``.
    right: (..., r, r), for those of ``X_R`` or ``Q_R``.
  """

  left: Any
  right: Any


class Combination(NamedTuple):
  """The coordinates ``columns @ weights + Q @ shift``, on either side.

  None stands for zero, and no product is spent on it.

  Attributes:
    columns: Any arrays (..., m, r) and (..., n, r).
    inside: ``Q_L^T columns.left`` and ``Q_R^T columns.right``; or None.
    weights: Coefficients of the columns.
    shift: Coefficients of the columns of the frame; or None.
  """

  columns: Tangent
  inside: RankMatrices
  weights: RankMatrices
  shift: RankMatrices


class Products(NamedTuple):
  """Inner products of the coordinates ``X`` of a tangent vector.

  Attributes:
    along: ``Q_L^T X_L`` and ``Q_R^T X_R``.
    squares: ``X_L^T X_L`` and ``X_R^T X_R``.
  """

  along: RankMatrices
  squares: RankMatrices


def _inside(frame: Frame, x: Tangent) -> RankMatrices:
  return RankMatrices(gram(frame.left, x.left), gram(frame.right, x.right))


def combination(frame: Frame, tangent: Tangent | Combination) -> Combination:
  """A tangent vector as a combination, of its own columns if it was none.

  Args:
    frame: Frame of the factors.
    tangent: Coordinates (..., m, r) and (..., n, r), or a combination.

  Returns:
    The combination.

  Raises:
    ValueError: If m, n or r are not the frame's.

  Example:
    >>> import jax.numpy as jnp
    >>> from prism_optax import fixed_rank
    >>> q = fixed_rank.frame(fixed_rank.Factors(jnp.eye(3, 1), jnp.eye(2, 1)))
    >>> x = fixed_rank.Tangent(jnp.zeros((3, 1)), jnp.ones((2, 1)))
    >>> fixed_rank.combination(q, x).weights.left.tolist()
    [[1.0]]
  """
  if isinstance(tangent, Combination):
    return tangent
  check_fits(frame, 'tangent', tangent)
  rank = frame.left.shape[-1]
  eye = jnp.broadcast_to(
    jnp.eye(rank, dtype=frame.left.dtype), frame.left_mask.shape
  )
  return Combination(
    tangent,
    _inside(frame, tangent),
    RankMatrices(eye, eye),
    RankMatrices(None, None),
  )


def projection(frame: Frame, tangent: Tangent) -> Combination:
  """:func:`prism_optax.fixed_rank.project`, not multiplied out.

  Args:
    frame: Frame of the factors.
    tangent: Any arrays (..., m, r) and (..., n, r).

  Returns:
    The combination (PRISM, arXiv:2606.00944, Eq. 13).

  Raises:
    ValueError: If m, n or r are not the frame's.

  Example:
    >>> import jax.numpy as jnp
    >>> from prism_optax import fixed_rank
    >>> q = fixed_rank.frame(fixed_rank.Factors(jnp.eye(3, 1), jnp.eye(2, 1)))
    >>> x = fixed_rank.Tangent(jnp.ones((3, 1)), jnp.ones((2, 1)))
    >>> fixed_rank.projection(q, x).shift.left.tolist()
    [[-1.0]]
  """
  check_fits(frame, 'tangent', tangent)
  # What a rank-deficient factor does not show is masked on the other side.
  weights = RankMatrices(frame.right_mask, frame.left_mask)
  inside = _inside(frame, tangent)
  shift = RankMatrices(-matmul(inside.left, weights.left), None)
  return Combination(tangent, inside, weights, shift)


def multiply_out(frame: Frame, tangent: Tangent | Combination) -> Tangent:
  """The coordinates of a combination; a tangent vector as it is.

  Args:
    frame: Frame of the factors.
    tangent: Of shapes (..., m, r) and (..., n, r).

  Returns:
    The coordinates.

  Example:
    >>> import jax.numpy as jnp
    >>> from prism_optax import fixed_rank
    >>> q = fixed_rank.frame(fixed_rank.Factors(jnp.eye(3, 1), jnp.eye(2, 1)))
    >>> x = fixed_rank.Tangent(jnp.ones((3, 1)), jnp.ones((2, 1)))
    >>> y = fixed_rank.multiply_out(q, fixed_rank.projection(q, x))
    >>> y.left.ravel().tolist()
    [0.0, 1.0, 1.0]
  """
  if isinstance(tangent, Tangent):
    return tangent

  def one_side(q, columns, weights, shift):
    out = matmul(columns, weights)
    return out if shift is None else out + matmul(q, shift)

  columns, _, weights, shift = tangent
  return Tangent(
    one_side(frame.left, columns.left, weights.left, shift.left),
    one_side(frame.right, columns.right, weights.right, shift.right),
  )


def products(frame: Frame, tangent: Tangent | Combination) -> Products:
  """Inner products of coordinates with the frame and with themselves.

  Args:
    frame: Frame of the factors.
    tangent: Of shapes (..., m, r) and (..., n, r).

  Returns:
    Arrays (..., r, r). The squares of a combination are differences of those
    of its columns: exact to rounding of these.

  Example:
    >>> import jax.numpy as jnp
    >>> from prism_optax import fixed_rank
    >>> q = fixed_rank.frame(fixed_rank.Factors(jnp.eye(3, 1), jnp.eye(2, 1)))
    >>> x = fixed_rank.Tangent(jnp.ones((3, 1)), jnp.ones((2, 1)))
    >>> y = fixed_rank.products(q, fixed_rank.projection(q, x))
    >>> y.squares.left.item(), y.along.left.item(), y.along.right.item()
    (2.0, 0.0, 1.0)
  """

  def one_side(mask, columns, inside, weights, shift):
    squares = gram(weights, matmul(gram(columns, columns), weights))
    along = jnp.zeros_like(squares)
    if inside is not None:
      along = matmul(inside, weights)
    if shift is not None:  # (Y W + Q S)^T (Y W + Q S)
      mixed = gram(along, shift)
      along = along + matmul(mask, shift)
      squares = squares + mixed + gram(shift, along)
    return along, squares

  masks = (frame.left_mask, frame.right_mask)
  sides = [
    one_side(*side)
    for side in zip(masks, *combination(frame, tangent), strict=True)
  ]
  return Products(*(RankMatrices(*pair) for pair in zip(*sides, strict=True)))
