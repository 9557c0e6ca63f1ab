"""Which axes of a pair of leaves are rank, stack, input and output."""

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from prism_optax import _validate


@dataclasses.dataclass(frozen=True)
class Layout:
  """How a pair of leaves stands for ``Z = scale * left @ right.mT``.

  ``a`` is the leaf on the input side (our ``right``), ``b`` the one on the
  output side (our ``left``). What is neither rank nor stack axis is flattened,
  in order, into the input dimension n of ``a`` and the output dimension m of
  ``b``. Fields that are None follow from the names and shapes.

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

  def __post_init__(self):
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
    layout: Their axes; None for ``a`` of ``(*stack, in, r)`` and ``b`` of
      ``(*stack, r, out)``.
    name: Of the module; None for that of the paths.
  """

  a: str
  b: str
  layout: Layout | None = None
  name: str | None = None


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

  def widened(self, multiple: int) -> 'MatrixAxes':
    """The axes of a matrix of ``multiple`` times the rank."""
    before, after = self.shape[: self.rank], self.shape[self.rank + 1 :]
    width = self.shape[self.rank] * multiple
    return self._replace(shape=(*before, width, *after))

  def to_matrices(self, stacked: jax.Array) -> jax.Array:
    """``(*lead, k, *shape) -> (*lead, k, features, rank)``."""
    shape, rank = self
    moved = jnp.moveaxis(stacked, rank - len(shape), -1)
    lead = moved.shape[: moved.ndim - len(shape)]
    # No -1: with a batch of size zero it would mean anything.
    return moved.reshape(*lead, math.prod(shape) // shape[rank], shape[rank])

  def from_matrices(self, matrices: jax.Array) -> jax.Array:
    """The inverse of :meth:`to_matrices`."""
    shape, rank = self
    features = [size for i, size in enumerate(shape) if i != rank]
    leaf = matrices.reshape(*matrices.shape[:-2], *features, shape[rank])
    return jnp.moveaxis(leaf, -1, rank - len(shape))


class LeafAxes(NamedTuple):
  """The axes of one leaf, all non-negative, and its shape."""

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

  @property
  def order(self) -> tuple[int, ...]:
    return (*self.stack, *self.features, self.rank)

  def sizes(self, axes: Sequence[int]) -> tuple[int, ...]:
    return tuple(self.shape[axis] for axis in axes)

  @property
  def _rest(self) -> tuple[int, ...]:
    """The axes of one module, in the order of the leaf."""
    return tuple(i for i in range(len(self.shape)) if i not in self.stack)

  @property
  def matrix(self) -> MatrixAxes:
    """How one module of the leaf lies in it."""
    return MatrixAxes(self.sizes(self._rest), self._rest.index(self.rank))

  def widened(self, multiple: int) -> 'LeafAxes':
    """The axes of a leaf of ``multiple`` times the rank."""
    shape = list(self.shape)
    shape[self.rank] *= multiple
    return self._replace(shape=tuple(shape))

  def to_stack(self, leaf: jax.Array) -> jax.Array:
    """``(*lead, *shape) -> (*lead, stack, *matrix)``: mostly a reshape."""
    lead = leaf.ndim - len(self.shape)
    order = (*self.stack, *self._rest)
    leaf = jnp.transpose(leaf, (*range(lead), *(lead + i for i in order)))
    return leaf.reshape(
      *leaf.shape[:lead],
      math.prod(self.sizes(self.stack)),
      *self.sizes(self._rest),
    )

  def from_stack(self, stacked: jax.Array) -> jax.Array:
    """The inverse of :meth:`to_stack`."""
    lead = stacked.ndim - 1 - len(self._rest)
    order = (*self.stack, *self._rest)
    leaf = stacked.reshape(*stacked.shape[:lead], *self.sizes(order))
    inverse = sorted(range(len(order)), key=order.__getitem__)
    return jnp.transpose(leaf, (*range(lead), *(lead + i for i in inverse)))
