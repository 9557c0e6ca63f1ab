"""Which axes of a leaf form a matrix, and which only stack matrices.

The specification is optax's: ``optax.contrib.MuonDimensionNumbers`` lists the
reduction axes and the output axes of a weight; all other axes are batch axes
(scanned layers, heads that are treated apart). ``None`` marks a leaf that is
no matrix: a bias, a norm's scale, an embedding that is treated as a table.
"""

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple, TypeAlias

import jax
import optax

from prism_optax._types import ArrayTree

DimensionNumbers: TypeAlias = optax.contrib.MuonDimensionNumbers
# None, a tree of DimensionNumbers and None, or a callable that makes one of a
# tree of arrays or shapes.
DimensionNumbersLike: TypeAlias = ArrayTree


class MatrixStack(NamedTuple):
  """How matrices lie in a leaf; all axes are non-negative.

  Attributes:
    shape: Shape of the leaf.
    batch: Axes that only stack matrices, in ascending order.
    reduction: Axes that together are the rows.
    output: Axes that together are the columns.
  """

  shape: tuple[int, ...]
  batch: tuple[int, ...]
  reduction: tuple[int, ...]
  output: tuple[int, ...]

  @classmethod
  def create(
    cls, shape: tuple[int, ...], dimension_numbers: DimensionNumbers
  ) -> 'MatrixStack':
    """Normalises and checks the axes of a leaf of this shape.

    Raises:
      ValueError: If an axis is out of range or used twice, or if there are no
        reduction axes or no output axes.
    """

    def normalized(axes: int | Iterable[int]) -> tuple[int, ...]:
      axes = (axes,) if isinstance(axes, int) else axes
      return tuple(a + len(shape) if a < 0 else a for a in axes)

    reduction = normalized(dimension_numbers.reduction_axis)
    output = normalized(dimension_numbers.output_axis)
    both = {*reduction, *output}
    different = len(both) == len(reduction) + len(output)
    exist = both <= set(range(len(shape)))
    if not (reduction and output and different and exist):
      raise ValueError(
        'Expected reduction and output axes to be different axes of the leaf,'
        f' got {dimension_numbers} for shape {tuple(shape)}.'
      )
    batch = tuple(a for a in range(len(shape)) if a not in both)
    return cls(tuple(shape), batch, reduction, output)

  def sizes(self, axes: Iterable[int]) -> tuple[int, ...]:
    return tuple(self.shape[a] for a in axes)

  @property
  def matrices(self) -> int:
    """Number of matrices in the leaf."""
    return math.prod(self.sizes(self.batch))

  @property
  def sides(self) -> tuple[int, int]:
    """Numbers of rows and columns of one matrix."""
    rows, columns = self.sizes(self.reduction), self.sizes(self.output)
    return math.prod(rows), math.prod(columns)

  def to_matrices(self, leaf: jax.Array) -> jax.Array:
    """From the shape of the leaf to ``(*batch, rows, columns)``."""
    moved = leaf.transpose(self.batch + self.reduction + self.output)
    return moved.reshape(*self.sizes(self.batch), *self.sides)

  def from_matrices(self, matrices: jax.Array) -> jax.Array:
    """The inverse of :meth:`to_matrices`."""
    order = self.batch + self.reduction + self.output
    inverse = sorted(range(len(order)), key=order.__getitem__)
    return matrices.reshape(self.sizes(order)).transpose(inverse)


def resolve(
  weight_dimension_numbers: DimensionNumbersLike, tree: ArrayTree
) -> list[MatrixStack | None]:
  """The matrices of every leaf, in the order of ``jax.tree.leaves``.

  Clip, noise and direction all ask here, so that they agree on the groups.

  Args:
    weight_dimension_numbers: A tree of ``MuonDimensionNumbers`` and ``None``,
      a prefix of ``tree``; or a callable that makes such a tree of ``tree``.
      ``None`` in a tree, or from the callable, is no matrix; given itself it is
      the default: the leaves of two axes are matrices, no others.
    tree: Arrays or shapes, without any per-example axis.

  Returns:
    A list with a :class:`MatrixStack` or ``None`` for every leaf.

  Raises:
    ValueError: If the specification is no prefix of ``tree``, or names axes
      that a leaf does not have.
  """

  def is_spec(x: object) -> bool:
    return x is None or isinstance(x, optax.contrib.MuonDimensionNumbers)

  spec = weight_dimension_numbers
  if spec is None:
    plain = DimensionNumbers(reduction_axis=0, output_axis=1)
    spec = jax.tree.map(lambda x: plain if len(x.shape) == 2 else None, tree)
  elif callable(spec):
    spec = spec(tree)
  specs = broadcast('weight_dimension_numbers', spec, tree, is_leaf=is_spec)
  return [
    None if one is None else MatrixStack.create(x.shape, one)
    for x, one in zip(jax.tree.leaves(tree), specs, strict=True)
  ]


def broadcast(
  name: str,
  prefix: ArrayTree,
  tree: ArrayTree,
  is_leaf: Callable[[object], bool] | None = None,
) -> list[ArrayTree]:
  """The values of the prefix tree ``prefix``, one for each leaf of ``tree``."""
  out: list[ArrayTree] = []

  def extend(value: ArrayTree, subtree: ArrayTree) -> None:
    out.extend([value] * len(jax.tree.leaves(subtree)))

  try:
    jax.tree.map(extend, prefix, tree, is_leaf=is_leaf)
  except (ValueError, TypeError, KeyError) as error:
    raise ValueError(
      f'Expected {name} to be a prefix of the tree of parameters, got'
      f' {name}={prefix!r} for {jax.tree.structure(tree)}.'
    ) from error
  return out


def with_leaves(tree: ArrayTree, leaves: Iterable[object]) -> ArrayTree:
  """A tree of the structure of ``tree`` with other leaves."""
  return jax.tree.unflatten(jax.tree.structure(tree), leaves)
