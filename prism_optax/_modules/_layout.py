"""Which axes of a pair of leaves are rank, stack, input and output.

What is here works on NumPy arrays and on JAX arrays: it only moves axes.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np

from prism_optax import _validate
from prism_optax.fixed_rank import Factors

Array = TypeVar('Array', jax.Array, np.ndarray)


@dataclasses.dataclass(frozen=True)
class Layout:
  """How a pair of leaves stands for ``Z = scale * left @ right.mT``.

  ``a`` is the leaf on the input side (our ``right``), ``b`` the one on the
  output side (our ``left``). Axes that are neither rank nor stack axes are
  flattened, in order, into the input dimension n of ``a`` and the output
  dimension m of ``b``. Fields that are None follow from the names and shapes.

  Attributes:
    a_rank_axis: Axis of ``a`` that holds the rank.
    b_rank_axis: Axis of ``b`` that holds the rank.
    a_stack_axes: Axes of ``a`` over independent modules (scanned layers).
    b_stack_axes: The axes of ``b`` that belong to them, in the same order.
    scale: The factor between ``left @ right.mT`` and the change of the
      weight: alpha / r. It is not in the tree, so it is 1 unless given. Clip,
      noise and learning rate act on the scaled matrix and mean the same
      whatever the scale.

  Raises:
    ValueError: If ``scale`` is not a positive number, or only one of a pair of
      fields is given.
  """

  a_rank_axis: int | None = None
  b_rank_axis: int | None = None
  a_stack_axes: Sequence[int] | None = None
  b_stack_axes: Sequence[int] | None = None
  scale: float = 1.0

  def __post_init__(self) -> None:
    _validate.positive('scale', self.scale)
    for field in ('rank_axis', 'stack_axes'):
      values = [getattr(self, f'{side}_{field}') for side in 'ab']
      if (values[0] is None) != (values[1] is None):
        raise ValueError(
          f'Expected both or neither of a_{field} and b_{field}, got'
          f' a_{field}={values[0]!r}, b_{field}={values[1]!r}.'
        )


class Pair(NamedTuple):
  """Two leaves, named by their paths ('/' between keys), that form one module.

  Attributes:
    a: Path of the input-side factor, for example ``'dense/lora_a'``.
    b: Path of the output-side factor.
    layout: Axes and scale; None for ``(*stack, in, r)`` and
      ``(*stack, r, out)``.
    name: Name of the module; None for the path of its leaves.
  """

  a: str
  b: str
  layout: Layout | None = None
  name: str | None = None


def transposed(x: Array, order: Sequence[int]) -> Array:
  """The last axes of an array in another order; the axes before them stay."""
  lead = x.ndim - len(order)
  return x.transpose(*range(lead), *(lead + i for i in order))


def inverse(order: Sequence[int]) -> list[int]:
  """The order that undoes :func:`transposed`."""
  return sorted(range(len(order)), key=order.__getitem__)


class MatrixAxes(NamedTuple):
  """How one matrix lies in a leaf whose stack axes have been moved away.

  Leaves with equal matrix axes are stacked as they are, so that one
  transposition serves all of them.

  Attributes:
    shape: Sizes of the feature axes and of the rank axis, in their order.
    rank: Position of the rank axis in ``shape``.
  """

  shape: tuple[int, ...]
  rank: int

  @property
  def _features(self) -> list[int]:
    return [i for i in range(len(self.shape)) if i != self.rank]

  def to_matrices(self, stacked: Array) -> Array:
    """``(*lead, k, *shape) -> (*lead, k, features, rank)``."""
    moved = transposed(stacked, (*self._features, self.rank))
    # No -1: with a batch of size zero it would mean anything.
    features = math.prod(self.shape[i] for i in self._features)
    lead = moved.shape[: moved.ndim - len(self.shape)]
    return moved.reshape(*lead, features, moved.shape[-1])

  def from_matrices(self, matrices: Array) -> Array:
    """The inverse of :meth:`to_matrices`; the rank may be another one."""
    features = (self.shape[i] for i in self._features)
    *lead, _, rank = matrices.shape
    leaf = matrices.reshape(*lead, *features, rank)
    return transposed(leaf, inverse((*self._features, self.rank)))


class LeafAxes(NamedTuple):
  """The axes of one leaf, all non-negative, and its shape.

  Attributes:
    stack: Axes over independent modules.
    features: Axes that are flattened into the input or output dimension.
    rank: The axis that holds the rank.
    shape: Sizes of all axes, in the order of the leaf.
  """

  stack: tuple[int, ...]
  features: tuple[int, ...]
  rank: int
  shape: tuple[int, ...]

  @classmethod
  def create(
    cls, name: str, shape: Sequence[int], rank: int, stack: Sequence[int]
  ) -> 'LeafAxes':
    """Normalises and checks the axes of the leaf ``name``."""
    ndim = len(shape)
    axes = [*stack, rank]
    if any(not -ndim <= axis < ndim for axis in axes):
      raise ValueError(
        f'Axes {axes} are out of range for {name} of shape {tuple(shape)}.'
      )
    axes = [axis % ndim for axis in axes]
    features = tuple(i for i in range(ndim) if i not in axes)
    if len(set(axes)) != len(axes) or not features:
      raise ValueError(
        f'Expected distinct stack and rank axes and at least one more axis for'
        f' {name} of shape {tuple(shape)}, got {stack=} and {rank=}.'
      )
    return cls(tuple(axes[:-1]), features, axes[-1], tuple(shape))

  def sizes(self, axes: Sequence[int]) -> tuple[int, ...]:
    """Sizes of some of the axes."""
    return tuple(self.shape[axis] for axis in axes)

  @property
  def _rest(self) -> tuple[int, ...]:
    """The axes of one module, in the order of the leaf."""
    return tuple(i for i in range(len(self.shape)) if i not in self.stack)

  @property
  def matrix(self) -> MatrixAxes:
    """How one module of the leaf lies in it."""
    return MatrixAxes(self.sizes(self._rest), self._rest.index(self.rank))

  def to_stack(self, leaf: Array) -> Array:
    """``(*lead, *shape) -> (*lead, stack, *matrix)``: mostly a reshape."""
    moved = transposed(leaf, (*self.stack, *self._rest))
    lead = leaf.shape[: leaf.ndim - len(self.shape)]
    count = math.prod(self.sizes(self.stack))
    return moved.reshape(*lead, count, *self.sizes(self._rest))

  def from_stack(self, stacked: Array) -> Array:
    """The inverse of :meth:`to_stack`; the rank may be another one."""
    split = stacked.ndim - len(self._rest)
    lead, matrix = stacked.shape[: split - 1], stacked.shape[split:]
    leaf = stacked.reshape(*lead, *self.sizes(self.stack), *matrix)
    return transposed(leaf, inverse((*self.stack, *self._rest)))

  def to_matrices(self, leaf: Array) -> Array:
    """``(*lead, *shape) -> (*lead, stack, features, rank)``."""
    return self.matrix.to_matrices(self.to_stack(leaf))

  def from_matrices(self, matrices: Array) -> Array:
    """The inverse of :meth:`to_matrices`; the rank may be another one."""
    return self.from_stack(self.matrix.from_matrices(matrices))


class Module(NamedTuple):
  """One LoRA pair in a flattened tree, or several that are stacked.

  Attributes:
    name: Name of the module.
    b: Position of the output-side leaf, which holds ``left``.
    a: Position of the input-side leaf, which holds ``right``.
    b_axes: Axes of the output-side leaf.
    a_axes: Axes of the input-side leaf.
    scale: The factor between ``left @ right.mT`` and the change of the weight.
  """

  name: str
  b: int
  a: int
  b_axes: LeafAxes
  a_axes: LeafAxes
  scale: float

  @property
  def sides(self) -> tuple[tuple[int, LeafAxes], tuple[int, LeafAxes]]:
    """Position and axes of the leaves of ``left`` and of ``right``."""
    return (self.b, self.b_axes), (self.a, self.a_axes)

  @property
  def rank(self) -> int:
    return self.a_axes.shape[self.a_axes.rank]

  @property
  def stack(self) -> tuple[int, ...]:
    return self.a_axes.sizes(self.a_axes.stack)

  @property
  def m(self) -> int:
    return math.prod(self.b_axes.sizes(self.b_axes.features))

  @property
  def n(self) -> int:
    return math.prod(self.a_axes.sizes(self.a_axes.features))

  def read(
    self, leaves: Sequence[Any], convert: Callable[[Any], Any]
  ) -> Factors:
    """(k, m, r) and (k, n, r) of the converted leaves, without the scale."""
    return Factors(
      *(axes.to_matrices(convert(leaves[i])) for i, axes in self.sides)
    )

  def write(self, leaves: list[Any], factors: tuple[Any, Any]) -> None:
    """Puts factors of any rank into ``leaves``, in the types these have."""
    for (i, axes), matrices in zip(self.sides, factors, strict=True):
      leaves[i] = axes.from_matrices(matrices).astype(leaves[i].dtype)
