"""Where an update happens, and what its transformations hand to each other."""

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax

from prism_optax import fixed_rank
from prism_optax._modules import LayoutLike, ModuleTree, Stacks
from prism_optax._types import ArrayTree, Scalar
from prism_optax.fixed_rank import Frame


class ClippedSum(Stacks):
  """What a clip hands on: its sum, and how to take it on a lattice.

  Attributes:
    on_lattice: ``on_lattice(stddev)``, the same sum as ``LatticeSum`` on the
      lattice of noise of that stddev. The noise behind the clip takes this one
      and leaves the floats; a sum that nobody reads is not computed.
  """

  on_lattice: Callable[[Scalar], Stacks] | None = None


class StepContext:
  """The parameters of one update and what follows from them.

  Attributes:
    params: Tree of trainable arrays.
    layout: As given: see :func:`prism_optax.lora.describe_pairs`.
    tree: The modules that were found, a ``ModuleTree``.
    frames: One stacked ``fixed_rank.Frame`` for each group of modules of the
      same shapes.
  """

  def __init__(self, params: ArrayTree, layout: LayoutLike):
    self.params = params
    self.layout = layout
    self.tree = ModuleTree(params, layout)

  @functools.cached_property
  def frames(self) -> tuple[Frame, ...]:
    return self.tree.frames(self.params)

  def is_at(self, params: ArrayTree, layout: LayoutLike) -> bool:
    """Whether these are the very arrays and the layout of this context."""
    mine: tuple[Any, Any] = jax.tree.flatten(self.params)
    theirs: tuple[Any, Any] = jax.tree.flatten(params)
    return (
      mine[1] == theirs[1]
      and all(x is y for x, y in zip(mine[0], theirs[0], strict=True))
      and self.layout == layout
    )

  def to_tree(self, stacks: Stacks) -> Any:
    """The coordinates as a tree in the shapes of the parameters.

    Args:
      stacks: Tangent coordinates of either kind, and other leaves.

    Returns:
      The tree, of arrays in the types of the stacks.
    """
    return self.tree.tree(stacks.map_pairs(fixed_rank.multiply_out))


class _Trail:
  """From a tree that a transformation returned to the stacks it was made of.

  ``optax.chain`` passes trees on. Where the next transformation is one of ours
  and gets the very arrays that the last one returned, it goes on with the
  stacks, and while tracing what made the tree is dead code. Arrays do not
  change, so their identity is all that is looked at, and a wrong match is
  impossible. Entries go with their arrays.
  """

  def __init__(self) -> None:
    self._entries: dict[
      int, tuple[list[weakref.ref[Any]], Stacks, StepContext]
    ] = {}

  def leave(self, tree: ArrayTree, stacks: Stacks, step: StepContext) -> None:
    leaves = jax.tree.leaves(tree)
    key = id(leaves[0])
    references = [
      weakref.ref(leaves[0], lambda _: self._entries.pop(key, None)),
      *map(weakref.ref, leaves[1:]),
    ]
    self._entries[key] = references, stacks, step

  def follow(
    self, tree: ArrayTree, params: ArrayTree, layout: LayoutLike
  ) -> tuple[Stacks, StepContext] | None:
    leaves: Sequence[Any] = jax.tree.leaves(tree)
    entry = self._entries.get(id(leaves[0])) if leaves else None
    if entry is None:
      return None
    references, stacks, step = entry
    same = len(references) == len(leaves) and all(
      reference() is x for reference, x in zip(references, leaves, strict=True)
    )
    return (stacks, step) if same and step.is_at(params, layout) else None


trail = _Trail()
