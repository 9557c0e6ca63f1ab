"""Tangent vectors that are not multiplied out.

Whatever a step does to a tangent vector behind its noise, each side of its
coordinates stays a sum of tall arrays times r x r matrices. So a step keeps the
r x r matrices, asks for r x r products, and touches tall arrays where it must:
to add noise, to average, to retract.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from prism_optax._linalg import gram, matmul
from prism_optax._types import Scalar
from prism_optax.fixed_rank._points import Factors, Frame
from prism_optax.fixed_rank._tangents import Tangent, check_fits


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TallSum:
  """``X = sum_i tall_i @ small_i + basis @ shift``, one side of a tangent.

  Attributes:
    terms: Pairs of arrays (..., m, r) and (..., r, r).
    basis: The basis Q of the frame on this side, (..., m, r).
    mask: ``Q^T Q`` (..., r, r).
    shift: (..., r, r); None for zero, on which no product is spent.
    along: ``Q^T X`` (..., r, r), carried along: it never costs a product with
      a tall array.
  """

  terms: tuple[tuple[jax.Array, jax.Array], ...]
  basis: jax.Array
  mask: jax.Array
  shift: jax.Array | None
  along: jax.Array

  def matrices(self) -> tuple[Any, ...]:
    """The r x r matrices, in which the sum is linear."""
    return tuple(small for _, small in self.terms), self.shift, self.along

  def with_matrices(self, matrices: tuple[Any, ...]) -> 'TallSum':
    """The same sum with other matrices."""
    small, shift, along = matrices
    terms = tuple(
      (tall, new) for (tall, _), new in zip(self.terms, small, strict=True)
    )
    return dataclasses.replace(self, terms=terms, shift=shift, along=along)

  def __mul__(self, factor: Scalar) -> 'TallSum':
    return self.with_matrices(
      jax.tree.map(lambda x: factor * x, self.matrices())
    )

  __rmul__ = __mul__

  def __matmul__(self, matrix: jax.Array) -> 'TallSum':
    return self.with_matrices(
      jax.tree.map(lambda x: matmul(x, matrix), self.matrices())
    )

  def __add__(self, other: 'TallSum') -> 'TallSum':
    """Both sides must have the same basis."""
    summed = self if other.shift is None else self.shifted(other.shift)
    return dataclasses.replace(
      self,
      terms=self.terms + other.terms,
      shift=summed.shift,
      along=self.along + other.along,
    )

  def shifted(self, shift: jax.Array) -> 'TallSum':
    """``X + basis @ shift``."""
    return dataclasses.replace(
      self,
      shift=shift if self.shift is None else self.shift + shift,
      along=self.along + matmul(self.mask, shift),
    )

  def outside(self) -> 'TallSum':
    """``(I - Q Q^T) X``."""
    return self.shifted(-self.along)

  def squares(self) -> jax.Array:
    """``X^T X`` (..., r, r), a difference: exact to rounding of its terms."""
    products = (
      gram(small, matmul(gram(tall, other_tall), other_small))
      for tall, small in self.terms
      for other_tall, other_small in self.terms
    )
    total = functools.reduce(jnp.add, products)
    if self.shift is None:
      return total
    # (Y + Q S)^T (Y + Q S), where Q^T Y is what X has along Q less Q^T Q S.
    of_shift = matmul(self.mask, self.shift)
    mixed = gram(self.along - of_shift, self.shift)
    return total + mixed + mixed.mT + gram(self.shift, of_shift)

  def multiply_out(self) -> jax.Array:
    """X, (..., m, r)."""
    terms = self.terms
    if self.shift is not None:
      terms = (*terms, (self.basis, self.shift))
    return functools.reduce(jnp.add, (matmul(*term) for term in terms))


class TangentSum(NamedTuple):
  """Orthonormal coordinates of a tangent vector, not multiplied out.

  ``prism_optax.chain`` hands them on behind the noise;
  :func:`prism_optax.fixed_rank.multiply_out` makes arrays of them.

  Attributes:
    left: ``X_L``, a sum of arrays (..., m, r) times (..., r, r) matrices.
    right: ``X_R``, a sum of arrays (..., n, r) times (..., r, r) matrices.
  """

  left: TallSum
  right: TallSum

  def matrices(self) -> tuple[Any, ...]:
    """The r x r matrices of both sides, in which the vector is linear."""
    return self.left.matrices(), self.right.matrices()

  def with_matrices(self, matrices: tuple[Any, ...]) -> 'TangentSum':
    """The same arrays with other matrices."""
    left, right = matrices
    return TangentSum(
      self.left.with_matrices(left), self.right.with_matrices(right)
    )


def sum_at(
  frame: Frame,
  left: tuple[tuple[jax.Array, jax.Array], ...],
  right: tuple[tuple[jax.Array, jax.Array], ...],
  along: tuple[jax.Array, jax.Array],
) -> TangentSum:
  """A tangent sum without shifts from its terms and ``Q^T X`` of both sides."""
  return TangentSum(
    TallSum(left, frame.left, frame.left_mask, None, along[0]),
    TallSum(right, frame.right, frame.right_mask, None, along[1]),
  )


def as_sum(frame: Frame, tangent: Tangent | TangentSum) -> TangentSum:
  """The coordinates as a sum: a sum as it is, arrays as its only terms."""
  if isinstance(tangent, TangentSum):
    return tangent
  check_fits(frame, 'tangent', tangent)
  mask = frame.left_mask
  eye = jnp.broadcast_to(jnp.eye(mask.shape[-1], dtype=mask.dtype), mask.shape)
  along = gram(frame.left, tangent.left), gram(frame.right, tangent.right)
  return sum_at(frame, ((tangent.left, eye),), ((tangent.right, eye),), along)


def projected(frame: Frame, tangent: Tangent) -> TangentSum:
  """:func:`prism_optax.fixed_rank.project`, not multiplied out.

  ``X_L <- (I - P_L) X_L Q_R^T Q_R`` and ``X_R <- X_R Q_L^T Q_L`` (PRISM,
  arXiv:2606.00944, Eq. 13): what a rank-deficient factor does not show is
  masked on the other side.
  """
  left, right = as_sum(frame, tangent)
  left, right = left @ frame.right_mask, right @ frame.left_mask
  return TangentSum(left.outside(), right)


def multiply_out(tangent: Tangent | TangentSum) -> Tangent:
  """The coordinates as arrays; arrays pass as they are.

  Args:
    tangent: Coordinates of either kind, as the stacked form of a
      transformation gets them.

  Returns:
    Coordinates (..., m, r) and (..., n, r).

  Example:
    >>> import jax.numpy as jnp
    >>> from prism_optax import fixed_rank
    >>> x = fixed_rank.Tangent(jnp.zeros((3, 1)), jnp.ones((2, 1)))
    >>> fixed_rank.multiply_out(x) is x
    True
  """
  if isinstance(tangent, Tangent):
    return tangent
  return Tangent(tangent.left.multiply_out(), tangent.right.multiply_out())


def carried(
  bases: Factors, frame: Frame, tangent: Tangent
) -> tuple[TangentSum, tuple[jax.Array, jax.Array]]:
  """:func:`transport` not multiplied out, and the overlaps of the bases.

  Args:
    bases: The bases ``Q_L`` and ``Q_R`` that ``tangent`` is written in.
    frame: Frame at the other point, with bases ``Q'``.
    tangent: Coordinates (..., m, r) and (..., n, r).

  Returns:
    The sum in the new frame, and ``Q_L^T Q_L'``, ``Q_R^T Q_R'`` (..., r, r).
  """
  check_fits(frame, 'tangent', tangent)
  turn_left = gram(bases.left, frame.left)
  turn_right = gram(bases.right, frame.right)
  inside_left = gram(tangent.left, frame.left)
  inside_right = gram(tangent.right, frame.right)
  # Q_L'^T T Q_R'
  core = gram(inside_left, turn_right) + gram(turn_left, inside_right)
  left, right = sum_at(
    frame,
    # T Q_R', of which the part along Q_L' is the core.
    ((tangent.left, turn_right), (bases.left, inside_right)),
    # T^T Q_L'
    ((tangent.right, turn_left), (bases.right, inside_left)),
    (core, core.mT),
  )
  return TangentSum(left.outside(), right), (turn_left, turn_right)


def transport(old_frame: Frame, new_frame: Frame, tangent: Tangent) -> Tangent:
  """Projects a tangent vector at one point on the tangent space at another.

  With ``T = X_L Q_R^T + Q_L X_R^T`` at the old point, ``X_L' = (I - P_L') T
  Q_R'`` and ``X_R' = T^T Q_L'``, by products with r x r matrices only: the
  projection of PRISM (arXiv:2606.00944, Eq. 13) of T at the new point. That it
  carries moments from step to step is ours.

  Args:
    old_frame: Frame that ``tangent`` is written in; only its bases are read.
    new_frame: Frame at the other point.
    tangent: Coordinates (..., m, r) and (..., n, r).

  Returns:
    Coordinates in the new frame, same shapes, of no larger norm.

  Raises:
    ValueError: If m, n or r are not the frames'.

  Example:
    >>> import jax.numpy as jnp
    >>> from prism_optax import fixed_rank
    >>> old = fixed_rank.frame(
    ...   fixed_rank.Factors(jnp.eye(3, 1), jnp.eye(2, 1)))
    >>> new = fixed_rank.frame(
    ...   fixed_rank.Factors(jnp.eye(3, 1), jnp.eye(2, 1, -1)))
    >>> x = fixed_rank.Tangent(jnp.zeros((3, 1)), jnp.array([[3.0], [4.0]]))
    >>> fixed_rank.transport(old, new, x).right.ravel().tolist()
    [3.0, 4.0]
  """
  bases = Factors(old_frame.left, old_frame.right)
  return multiply_out(carried(bases, new_frame, tangent)[0])
