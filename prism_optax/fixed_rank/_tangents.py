"""Tangent vectors in orthonormal coordinates, multiplied out or not.

Whatever a step does to a tangent vector after its noise, each side of its
coordinates stays a sum of tall arrays times r x r matrices. So a step keeps the
r x r matrices, asks for r x r products, and touches tall arrays where it must:
to add noise, to average, to retract.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from prism_optax._linalg._products import gram, matmul
from prism_optax._types import ArrayTree, Scalar
from prism_optax.fixed_rank._points import Factors, Frame


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
  bases = jax.tree.leaves(tuple(frame[:2]))  # Or several in a `Tall`.
  for x, q in zip(jax.tree.leaves(tuple(pair)), bases, strict=True):
    if jnp.shape(x)[-2:] != q.shape[-2:]:
      raise ValueError(
        f'Expected {name} of shapes (..., {q.shape[-2]}, {q.shape[-1]}) for'
        f' frames of shapes {frame[0].shape} and {frame[1].shape}, got'
        f' {name}.left.shape={jnp.shape(pair[0])},'
        f' {name}.right.shape={jnp.shape(pair[1])}.'
      )


def remove(q: jax.Array, x: jax.Array) -> jax.Array:
  """``(I - q q^T) x``."""
  return x + matmul(q, -gram(q, x))


def tangent_from_gradients(frame: Frame, grads: Factors) -> Tangent:
  """Coordinates of the tangent projection of the gradient in Z.

  For factor gradients ``g_L = G right`` and ``g_R = G^T left`` of one m x n
  gradient G, the result stands for ``P_L G + G P_R - P_L G P_R`` (PRISM,
  arXiv:2606.00944, Eq. 13): ``X_L = (I - P_L) g_L C_R^-1``,
  ``X_R = g_R C_L^-1``.

  Args:
    frame: Frame of the factors, axes (..., ., .).
    grads: Gradients with respect to ``left`` (..., m, r) and ``right``
      (..., n, r). They may carry more leading axes than the frame.

  Returns:
    Coordinates in the shapes of ``grads``. Coordinates that a factor of
    lower rank hides are zero.

  Raises:
    ValueError: If m, n or r are not the frame's.

  Example:
    >>> import jax.numpy as jnp
    >>> from prism_optax import fixed_rank
    >>> z = fixed_rank.Factors(jnp.array([[2.0], [0.0]]), jnp.array([[4.0]]))
    >>> g = jnp.array([[1.0], [3.0]])
    >>> grads = fixed_rank.Factors(g @ z.right, g.T @ z.left)
    >>> x = fixed_rank.tangent_from_gradients(fixed_rank.frame(z), grads)
    >>> x.left.ravel().tolist(), x.right.ravel().tolist()
    ([0.0, 3.0], [1.0])
  """
  check_fits(frame, 'grads', grads)
  return whitened(frame, grads, matmul)


def whitened(
  frame: Frame, grads: Factors, times: Callable[..., jax.Array]
) -> Tangent:
  """:func:`tangent_from_gradients` with a product for the inverse cores."""
  return Tangent(
    remove(frame.left, times(grads.left, frame.right_inverse)),
    times(grads.right, frame.left_inverse),
  )


def times_diagonal(x: jax.Array, matrix: jax.Array) -> jax.Array:
  """``x @ matrix`` for a matrix of which only the diagonal counts."""
  return x * jnp.diagonal(matrix, axis1=-2, axis2=-1)[..., None, :]


def has_diagonal_inverses(frame: Frame) -> jax.Array:
  """Whether the inverse cores are diagonal but for rounding, (): for all of it.

  So they are where the columns of the factors are orthogonal, as
  :func:`prism_optax.fixed_rank.retraction` leaves them: nine machine epsilons
  of a column's length were seen at rank 64.
  """

  def rounding(inverse: jax.Array) -> jax.Array:
    sizes = jnp.abs(inverse)
    diagonal = jnp.diagonal(sizes, axis1=-2, axis2=-1)[..., :, None]
    eye = jnp.eye(sizes.shape[-1], dtype=sizes.dtype)
    limit = 16 * jnp.finfo(sizes.dtype).eps * diagonal
    fine: jax.Array = jnp.all(sizes - eye * diagonal <= limit)
    return fine

  return rounding(frame.left_inverse) & rounding(frame.right_inverse)


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

  def map(self, fn: Callable[[jax.Array], jax.Array]) -> 'TallSum':
    """The sum with ``fn`` of its matrices, in which it is linear."""
    terms = tuple((tall, fn(small)) for tall, small in self.terms)
    shift = None if self.shift is None else fn(self.shift)
    return TallSum(terms, self.basis, self.mask, shift, fn(self.along))

  def __mul__(self, factor: Scalar) -> 'TallSum':
    return self.map(lambda x: factor * x)

  __rmul__ = __mul__

  def __matmul__(self, matrix: jax.Array) -> 'TallSum':
    return self.map(lambda x: matmul(x, matrix))

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
    return functools.reduce(operator.add, (matmul(*term) for term in terms))


class TangentSum(NamedTuple):
  """Orthonormal coordinates of a tangent vector, not multiplied out.

  ``prism_optax.chain`` hands them on after the noise;
  :func:`prism_optax.fixed_rank.multiply_out` makes arrays of them.

  Attributes:
    left: ``X_L``, a sum of arrays (..., m, r) times (..., r, r) matrices.
    right: ``X_R``, a sum of arrays (..., n, r) times (..., r, r) matrices.
  """

  left: TallSum
  right: TallSum


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


def scaled(tree: ArrayTree, factor: jax.Array) -> ArrayTree:
  """All coordinates of a tree, sums or arrays, times a number."""

  def times(x):  # A side of a sum, or an array.
    return x * factor.astype(jax.tree.leaves(x)[0].dtype)

  return jax.tree.map(times, tree, is_leaf=lambda x: isinstance(x, TallSum))


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


def transport_sum(
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
