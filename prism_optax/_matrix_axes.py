"""Which axes of a leaf form a matrix, and which only stack matrices.

The specification is optax's: ``optax.contrib.MuonDimensionNumbers`` lists the
reduction axes and the output axes of a weight; all other axes are batch axes
(scanned layers, heads that are treated apart). ``None`` marks a leaf that is
no matrix: a bias, a norm's scale, an embedding one wants to treat as a table.
"""

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import optax

from prism_optax._types import ArrayTree

DimensionNumbers: TypeAlias = optax.contrib.MuonDimensionNumbers
# None, a tree of DimensionNumbers and None, or a callable that makes one.
DimensionNumbersLike = Any
PLAIN = DimensionNumbers(reduction_axis=0, output_axis=1)


def _is_spec(x: Any) -> bool:
  return x is None or isinstance(x, optax.contrib.MuonDimensionNumbers)


def resolve(
  weight_dimension_numbers: DimensionNumbersLike, tree: ArrayTree
) -> list[DimensionNumbers | None]:
  """Dimension numbers of every leaf, in the order of ``jax.tree.leaves``.

  Args:
    weight_dimension_numbers: ``None`` for the rule "a leaf of two axes is a
      matrix, any other leaf is none"; or a tree of ``MuonDimensionNumbers``
      and ``None``, a prefix of ``tree``; or a callable that makes such a tree
      of ``tree``.
    tree: Arrays or shapes, without any per-example axis.

  Returns:
    A list with a ``MuonDimensionNumbers`` or ``None`` for every leaf.

  Raises:
    ValueError: If the specification is no prefix of ``tree``, or names axes
      that a leaf does not have.
  """
  leaves = jax.tree.leaves(tree)
  if weight_dimension_numbers is None:
    return [PLAIN if len(x.shape) == 2 else None for x in leaves]
  spec = weight_dimension_numbers
  if callable(spec) and not _is_spec(spec):
    spec = spec(tree)
  specs = broadcast('weight_dimension_numbers', spec, tree, is_leaf=_is_spec)
  for x, one in zip(leaves, specs, strict=True):
    if one is not None:
      matrix_axes(x.shape, one)  # Raises if it does not fit.
  return specs


def broadcast(
  name: str, prefix: Any, tree: ArrayTree, is_leaf: Callable | None = None
) -> list[Any]:
  """The values of the prefix tree ``prefix``, one for each leaf of ``tree``."""
  out: list[Any] = []

  def extend(value, subtree):
    out.extend([value] * len(jax.tree.leaves(subtree)))

  try:
    jax.tree.map(extend, prefix, tree, is_leaf=is_leaf)
  except (ValueError, TypeError, KeyError) as error:
    raise ValueError(
      f'Expected {name} to be a prefix of the tree of parameters, got'
      f' {name}={prefix!r} for {jax.tree.structure(tree)}.'
    ) from error
  return out


def matrix_axes(
  shape: tuple[int, ...], dimension_numbers: DimensionNumbers
) -> tuple[tuple[int, ...], tuple[int, ...]]:
  """Reduction and output axes as non-negative ints.

  Raises:
    ValueError: If an axis is out of range or used twice, or there is none.
  """

  def normalized(axes):
    axes = (axes,) if isinstance(axes, int) else tuple(axes)
    return tuple(a + len(shape) if a < 0 else a for a in axes)

  reduction = normalized(dimension_numbers.reduction_axis)
  output = normalized(dimension_numbers.output_axis)
  both = reduction + output
  if (
    not reduction
    or not output
    or len(set(both)) != len(both)
    or not all(0 <= a < len(shape) for a in both)
  ):
    raise ValueError(
      'Expected reduction and output axes to be different axes of the leaf,'
      f' got {dimension_numbers} for shape {tuple(shape)}.'
    )
  return reduction, output


def batch_axes(
  shape: tuple[int, ...], dimension_numbers: DimensionNumbers
) -> tuple[int, ...]:
  """The axes that only stack matrices, in ascending order."""
  reduction, output = matrix_axes(shape, dimension_numbers)
  return tuple(a for a in range(len(shape)) if a not in reduction + output)


def sides(
  shape: tuple[int, ...], dimension_numbers: DimensionNumbers
) -> tuple[int, int]:
  """Numbers of rows and columns: products of reduction and output axes."""
  rows, columns = matrix_axes(shape, dimension_numbers)
  return math.prod(shape[a] for a in rows), math.prod(shape[a] for a in columns)


def to_matrices(
  x: jax.Array, dimension_numbers: DimensionNumbers
) -> tuple[jax.Array, Callable[[jax.Array], jax.Array]]:
  """Moves a leaf to shape ``(*batch, reduction, output)``.

  Returns:
    The matrices, and the function that brings an array of their shape back to
    the shape of ``x``.
  """
  reduction, output = matrix_axes(x.shape, dimension_numbers)
  order = batch_axes(x.shape, dimension_numbers) + reduction + output
  moved = x.transpose(order)
  batch = moved.shape[: x.ndim - len(reduction) - len(output)]
  inverse = sorted(range(x.ndim), key=order.__getitem__)

  def restore(y):
    return y.reshape(moved.shape).transpose(inverse)

  return moved.reshape(batch + sides(x.shape, dimension_numbers)), restore
