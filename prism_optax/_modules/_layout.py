"""Which axes of a pair of leaves are rank, stack, input and output.

As the user says, or as the library has them. NumPy arrays or JAX arrays.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple, TypeVar

import jax
import numpy as np

from prism_optax import _validate
from prism_optax._types import ArrayTree
from prism_optax.fixed_rank import Factors

Array = TypeVar('Array', jax.Array, np.ndarray)
Shape = tuple[int, ...]


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


# How libraries name and shape the two factors.


def _tensors(a: Shape, b: Shape) -> list[Layout]:
  """a ``(*stack, *in, r)``, b ``(*stack, r, *out)``; or a stack in the middle.

  The middle: a (in, layers, r), b (r, layers, out), from scans over axis 1.
  """
  readings = []
  for count in range(min(len(a), len(b)) - 1):
    if a[:count] == b[:count] and a[-1] == b[count]:
      stack = tuple(range(count))
      readings.append(Layout(-1, count, stack, stack))
  if len(a) >= 3 and len(b) >= 3 and a[1] == b[1] and a[-1] == b[0]:
    readings.append(Layout(-1, 0, (1,), (1,)))
  return readings


def _flax(a: Shape, b: Shape) -> list[Layout]:
  """a ``(*stack, in, r)``, b ``(*stack, r, out)``, as `vmap` and `scan` make.

  Only if these do not fit, any other reading.
  """
  if len(a) != len(b) or a[:-2] != b[:-2] or a[-1] != b[-2]:
    return _tensors(a, b)
  stack = tuple(range(len(a) - 2))
  return [Layout(-1, -2, stack, stack)]


def _kernel_like(a: Shape, b: Shape) -> list[Layout]:
  """a ``(*in, r)``, b ``(r, *out)``, never stacked."""
  return [Layout(-1, 0, (), ())] if a[-1] == b[0] else []


def _torch(a: Shape, b: Shape) -> list[Layout]:
  """a (r, in, ...), b (out, r, ...): rows are outputs."""
  return [Layout(0, 1, (), ())] if a[0] == b[1] else []


class Convention(NamedTuple):
  """One way to name the leaves of a pair, and what their shapes may mean.

  Attributes:
    library: Library name.
    a: Pattern of the name of the input-side leaf. Group `module` is the name of
      the module, group `side` the letter that its partner has another one for.
    readings: From the two shapes (at least two axes each) to the layouts that
      fit them: of several none is chosen.
  """

  library: str
  a: re.Pattern[str]
  readings: Callable[[Shape, Shape], list[Layout]]


def _pattern(tail: str) -> re.Pattern[str]:
  return re.compile(rf'(?:(?P<module>.*)[/.])?{tail}')


CONVENTIONS = (
  # Also MaxText's, whose whole path is one key with dots.
  Convention('flax', _pattern('lora_(?P<side>a)'), _flax),
  Convention('gemma', _pattern('lora[/.](?P<side>a)'), _tensors),
  Convention(
    'keras', _pattern('lora_(?:kernel|embeddings)_(?P<side>a)'), _kernel_like
  ),
  Convention(
    'PEFT',
    _pattern(r'lora_(?:embedding_)?(?P<side>A)(?:[/.][^/.]+)??(?:[/.]weight)?'),
    _torch,
  ),
  Convention(
    'qwix', re.compile('(?P<module>.+)_lora_(?P<side>a)'), _tensors
  ),
)  # fmt: skip


def find_named(names: Collection[str]) -> list[tuple[Pair, Convention]]:
  """The pairs among ``names``, in their order, without their layouts."""
  found = []
  for name in names:
    for convention in CONVENTIONS:
      match = convention.a.fullmatch(name)
      if not match:
        continue
      start, end = match.span('side')
      other = {'a': 'b', 'A': 'B'}[match['side']]
      partner = name[:start] + other + name[end:]
      if partner in names:
        pair = Pair(name, partner, name=match['module'] or name)
        found.append((pair, convention))
      break
  return found


# Moving the axes.


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
  def features(self) -> tuple[int, ...]:
    """Sizes of the feature axes, in their order."""
    return self.shape[: self.rank] + self.shape[self.rank + 1 :]

  @property
  def _order(self) -> list[int]:
    """All axes, that of the rank last."""
    return sorted(range(len(self.shape)), key=lambda axis: axis == self.rank)

  def to_matrices(self, stacked: Array) -> Array:
    """``(*lead, k, *shape) -> (*lead, k, features, rank)``."""
    moved = transposed(stacked, self._order)
    lead = moved.shape[: moved.ndim - len(self.shape)]
    # No -1: with a batch of size zero it would mean anything.
    return moved.reshape(*lead, math.prod(self.features), moved.shape[-1])

  def from_matrices(self, matrices: Array) -> Array:
    """The inverse of :meth:`to_matrices`; the rank may be another one."""
    *lead, _, rank = matrices.shape
    leaf = matrices.reshape(*lead, *self.features, rank)
    return transposed(leaf, inverse(self._order))


class LeafAxes(NamedTuple):
  """The axes of one leaf, all non-negative, and its shape.

  Attributes:
    shape: Sizes of all axes, in the order of the leaf.
    stack: Axes over independent modules.
    rank: The axis that holds the rank. All others are flattened into the input
      or output dimension.
  """

  shape: tuple[int, ...]
  stack: tuple[int, ...]
  rank: int

  @classmethod
  def create(
    cls, name: str, shape: Shape, rank: int, stack: Sequence[int] | None
  ) -> 'LeafAxes':
    """Normalises and checks the axes of the leaf ``name``.

    ``stack`` is None for all axes but the last two.
    """
    ndim = len(shape)
    stack = range(ndim - 2) if stack is None else stack
    axes = [*stack, rank]
    if any(not -ndim <= axis < ndim for axis in axes):
      raise ValueError(
        f'Axes {axes} are out of range for {name} of shape {tuple(shape)}.'
      )
    axes = [axis % ndim for axis in axes]
    if len(set(axes)) != len(axes) or len(axes) == ndim:
      raise ValueError(
        f'Expected distinct stack and rank axes and at least one more axis for'
        f' {name} of shape {tuple(shape)}, got {stack=} and {rank=}.'
      )
    return cls(tuple(shape), tuple(axes[:-1]), axes[-1])

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
    return math.prod(self.b_axes.matrix.features)

  @property
  def n(self) -> int:
    return math.prod(self.a_axes.matrix.features)

  def is_near(self, name: str) -> bool:
    """Whether a leaf stands where libraries put the weight of the module."""
    parents = [self.name, f'{self.name}/base_module']
    parents.append(self.name.removesuffix('/lora'))
    if self.name == 'lora' or self.name.startswith('lora_'):
      parents.append('')  # The tree is a single pair.
    return name == self.name or name.rpartition('/')[0] in parents

  def read(
    self, leaves: Sequence[ArrayTree], convert: Callable[..., ArrayTree]
  ) -> Factors:
    """(k, m, r) and (k, n, r) of the converted leaves, without the scale."""
    left, right = (
      axes.matrix.to_matrices(axes.to_stack(convert(leaves[i])))
      for i, axes in self.sides
    )
    return Factors(left, right)

  def write(
    self, leaves: list[ArrayTree], factors: Sequence[ArrayTree]
  ) -> None:
    """Puts factors of any rank into ``leaves``, in the types these have."""
    for (i, axes), matrices in zip(self.sides, factors, strict=True):
      leaf = axes.from_stack(axes.matrix.from_matrices(matrices))
      leaves[i] = leaf.astype(leaves[i].dtype)
