"""Between a tree of parameters and stacked arrays that the geometry works on.

Modules of the same shapes are stacked along one axis, whatever their number, so
a program's size and compile time hardly grow with the number of modules.
"""

import collections
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from prism_optax import fixed_rank
from prism_optax._linalg._products import at_least_float32, matmul
from prism_optax._modules._finding import (
  LayoutLike,
  find_modules,
  named_leaves,
  other_leaves,
)
from prism_optax._modules._layout import MatrixAxes, Module
from prism_optax._types import Array, ArrayTree
from prism_optax.fixed_rank import Factors, Tangent, _tangents
from prism_optax.fixed_rank._points import Frame, frame_of, map_ranks


class Stacks(NamedTuple):
  """A tree, taken apart: pairs by shape, and the other leaves as they are.

  Attributes:
    pairs: For each distinct shape and type of module a pair of arrays
      ``(*lead, k, m, r)``, ``(*lead, k, n, r)``: ``fixed_rank.Tangent``,
      ``TangentSum`` or ``fixed_rank.Factors``.
    others: The leaves that belong to no pair, ``(*lead, *shape)``.
  """

  pairs: tuple[ArrayTree, ...]
  others: tuple[jax.Array, ...]

  def map_pairs(
    self, fn: Callable[..., ArrayTree], *with_: Sequence[ArrayTree]
  ) -> 'Stacks':
    """``fn(pair, ...)`` of each stack of pairs; other leaves as they are."""
    return self._replace(pairs=map_pairs(fn, self.pairs, *with_))


def map_pairs(
  fn: Callable[..., ArrayTree], *stacks: Sequence[ArrayTree]
) -> tuple[ArrayTree, ...]:
  """``fn`` of one entry of each of ``stacks``, for each group of modules."""
  return tuple(fn(*args) for args in zip(*stacks, strict=True))


def map_factors(
  fn: Callable[[Module, Factors], Sequence[Array]],
  params: optax.Params,
  layout: LayoutLike = None,
  convert: Callable[[Array], Array] = at_least_float32,
) -> optax.Params:
  """The tree with new factors of each module; other leaves as they are.

  Args:
    fn: From a module and its factors (k, m, r) and (k, n, r), without the
      scale, to new factors of any rank.
    params: Tree of trainable arrays.
    layout: See :func:`prism_optax.lora.describe_pairs`.
    convert: Turns a leaf into the array, NumPy's or JAX's, that ``fn`` gets.

  Returns:
    A tree like ``params``, in its types.
  """
  leaves, treedef = jax.tree.flatten(params)
  for module in find_modules(params, layout):
    module.write(leaves, fn(module, module.read(leaves, convert)))
  return jax.tree.unflatten(treedef, leaves)


class _Group(NamedTuple):
  """Modules whose matrices are stacked as they lie in their leaves.

  Attributes:
    axes: How one matrix lies in the leaves of ``left`` and of ``right``.
    dtype: Type of the stacks.
    modules: The modules, in their order in the stacks.
  """

  axes: tuple[MatrixAxes, MatrixAxes]
  dtype: jnp.dtype
  modules: list[Module]

  def places(self) -> list[tuple[Module, slice]]:
    """Each module and the slice of the stack that it fills."""
    ends = np.cumsum([0, *(math.prod(x.stack) for x in self.modules)])
    slices = (slice(*pair) for pair in itertools.pairwise(ends))
    return list(zip(self.modules, slices, strict=True))


class ModuleTree:
  """The LoRA modules of a tree of parameters: names, shapes, axes and scales.

  It holds no array and is made anew in every trace.

  XLA fuses what computes a stack into each slice of it. So what goes into
  :meth:`tree` should end in a product: an elementwise operation on a stack that
  was just made would take compile time quadratic in the number of modules.

  Args:
    params: Tree of trainable arrays.
    layout: See :func:`prism_optax.lora.describe_pairs`.

  Attributes:
    modules: The modules, in the order of their names.
    names: Of the leaves.
    treedef: The structure of ``params``.

  Raises:
    ValueError: If pairs cannot be found, or a rank is above min(m, n).
  """

  def __init__(self, params: optax.Params, layout: LayoutLike = None) -> None:
    self.modules = find_modules(params, layout)
    self.names, leaves = named_leaves(params)
    self.treedef: jax.tree_util.PyTreeDef = jax.tree.structure(params)
    self._shapes = [np.shape(leaf) for leaf in leaves]
    # Geometry, sums and noise need float32 at least, whatever the model's type.
    self._dtypes = [
      jnp.promote_types(leaf.dtype, jnp.float32) for leaf in leaves
    ]
    groups = collections.defaultdict(list)
    for x in self.modules:
      dtype = jnp.promote_types(self._dtypes[x.a], self._dtypes[x.b])
      groups[(x.b_axes.matrix, x.a_axes.matrix), dtype].append(x)
    self._groups = [_Group(*key, group) for key, group in groups.items()]
    self._others = other_leaves(self.modules, len(leaves))

  # From trees of arrays to stacks.

  def _leaves(self, tree: ArrayTree, lead: int, what: str) -> list[jax.Array]:
    """The leaves of a tree like ``params`` with ``lead`` more leading axes."""
    if jax.tree.structure(tree) != self.treedef:
      raise ValueError(
        f'Expected {what} to have the structure of params, got'
        f' {jax.tree.structure(tree)} for {self.treedef}.'
      )
    leaves = jax.tree.leaves(tree)
    for name, leaf, shape in zip(self.names, leaves, self._shapes, strict=True):
      if np.shape(leaf)[lead:] != shape or np.ndim(leaf) != lead + len(shape):
        axes = 'one leading batch axis and then ' if lead else ''
        raise ValueError(
          f'Expected {what} at {name!r} to have {axes}the shape of the'
          f' parameter, {shape}, got {np.shape(leaf)}.'
        )
    sizes = {np.shape(leaf)[:lead] for leaf in leaves}
    if len(sizes) > 1:
      raise ValueError(
        f'Expected the same leading batch axis in all of {what}, got sizes'
        f' {sorted(size[0] for size in sizes)}.'
      )
    return leaves

  def _stacked(
    self,
    leaves: Sequence[jax.Array],
    kind: Callable[[jax.Array, jax.Array], ArrayTree],
    power: float,
  ) -> Stacks:
    """Stacks the pairs, multiplied by ``scale ** power``."""

    def stacked(group: _Group, side: int) -> jax.Array:
      axes, parts = group.axes[side], []
      for x in group.modules:
        i, leaf_axes = x.sides[side]
        part = leaf_axes.to_stack(jnp.asarray(leaves[i], group.dtype))
        parts.append(part if x.scale == 1 else part * float(x.scale**power))
      # The stack axis comes before those of the matrix.
      return axes.to_matrices(jnp.concatenate(parts, -1 - len(axes.shape)))

    pairs = tuple(kind(stacked(x, 0), stacked(x, 1)) for x in self._groups)
    return Stacks(pairs, self._rest(leaves))

  def _rest(self, leaves: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
    return tuple(jnp.asarray(leaves[i], self._dtypes[i]) for i in self._others)

  def factors(self, params: optax.Params) -> Stacks:
    """``Factors`` such that ``left @ right.mT`` is the change of the weight.

    The LoRA scale is shared out as its square root on either factor. All
    stacks are float32 at least, here and below.
    """
    return self._stacked(self._leaves(params, 0, 'params'), Factors, 0.5)

  def gradients(
    self, grads: ArrayTree, lead: int = 0, what: str = 'grads'
  ) -> Stacks:
    """Gradients with respect to :meth:`factors`, as ``Factors``.

    These are the gradients of the leaves divided by the root of the scale.
    ``lead`` (0 or 1) leading batch axes stay; ``what`` is the name of the
    gradients in error messages.
    """
    return self._stacked(self._leaves(grads, lead, what), Factors, -0.5)

  def coordinates(self, tree: ArrayTree, what: str = 'updates') -> Stacks:
    """``Tangent`` coordinates from a tree of coordinates."""
    return self._stacked(self._leaves(tree, 0, what), Tangent, 0.0)

  # From stacks to trees.

  def tree(self, stacks: Stacks, power: float = 0.0) -> ArrayTree:
    """A tree in the shapes of ``params``, in the types of the stacks.

    Args:
      stacks: Pairs of arrays, of any rank, and other leaves.
      power: Pairs are multiplied by ``scale ** power``: 0 for coordinates,
        -0.5 for factors.

    Returns:
      The tree.
    """
    leaves: list[ArrayTree] = [None] * len(self._shapes)
    for group, pair in zip(self._groups, stacks.pairs, strict=True):
      sides = [
        axes.from_matrices(x) for axes, x in zip(group.axes, pair, strict=True)
      ]
      # By `split`, whose derivative is a concatenation; that of slices is a sum
      # of arrays as large as the stack.
      ends = [place.stop for _, place in group.places()][:-1]
      parts = zip(*(jnp.split(x, ends) for x in sides), strict=True)
      for x, pair in zip(group.modules, parts, strict=True):
        factor = float(x.scale**power)
        for (i, axes), part in zip(x.sides, pair, strict=True):
          leaf = axes.from_stack(part)
          leaves[i] = leaf if factor == 1 else leaf * factor
    for i, leaf in zip(self._others, stacks.others, strict=True):
      leaves[i] = leaf
    return jax.tree.unflatten(self.treedef, leaves)

  def steps(self, new: Stacks, params: optax.Params) -> optax.Updates:
    """Updates that lead from ``params`` to new factors; other leaves pass."""
    leaves, old = jax.tree.leaves(self.tree(new, -0.5)), jax.tree.leaves(params)
    return jax.tree.unflatten(
      self.treedef,
      [y if i in self._others else y - old[i] for i, y in enumerate(leaves)],
    )

  def by_module(self, stacked: Sequence[jax.Array]) -> dict[str, jax.Array]:
    """From arrays (k, ...) of each group to ``(*stack, ...)`` by module."""
    return {
      x.name: array[place].reshape(*x.stack, *array.shape[1:])
      for group, array in zip(self._groups, stacked, strict=True)
      for x, place in group.places()
    }

  def rows(self, values: Sequence[str]) -> list[np.ndarray]:
    """From one value a leaf to one a module along axis 0 of each stack.

    Arrays (k,) for ``left`` and for ``right`` of each group, which must have
    the same values, and () for each other leaf: in the order of leaves.
    """
    if any(values[x.a] != values[x.b] for x in self.modules):
      raise ValueError('Expected one label for both factors of each module.')
    stacks = [
      np.concatenate([[values[x.a]] * math.prod(x.stack) for x in g.modules])
      for g in self._groups
    ]
    pairs = [rows for rows in stacks for _ in range(2)]
    return pairs + [np.asarray(values[i]) for i in self._others]

  # Geometry over all modules.

  def frames(self, params: optax.Params) -> tuple[Frame, ...]:
    """One stacked frame of the scaled factors for each group of modules."""
    return map_ranks(frame_of, self.factors(params).pairs)

  def check_observable(self, params: optax.Params) -> None:
    """Refuses modules whose factors are both zero, where values are known.

    Their gradients are zero whatever the data, so they would never move.

    Raises:
      ValueError: Naming the modules.
    """
    leaves = jax.tree.leaves(params)

    def known_to_be_zero(leaf: object) -> bool:
      if isinstance(leaf, jax.core.Tracer | jax.ShapeDtypeStruct):
        return False
      here = getattr(leaf, 'is_fully_addressable', True)
      return here and not np.any(np.asarray(leaf))

    dead = [
      x.name
      for x in self.modules
      if known_to_be_zero(leaves[x.a]) and known_to_be_zero(leaves[x.b])
    ]
    if dead:
      raise ValueError(
        f'Both factors are zero in params of {dead}: no gradient reaches them.'
        ' Initialise one factor of each pair at random.'
      )


class StepContext:
  """The parameters of one update and what follows from them.

  Attributes:
    params: Tree of trainable arrays.
    layout: As given: see :func:`prism_optax.lora.describe_pairs`.
    tree: The modules that were found, a ``ModuleTree``.
    frames: One stacked frame for each group of modules of the
      same shapes.
  """

  def __init__(self, params: ArrayTree, layout: LayoutLike):
    self.params = params
    self.layout = layout
    self.tree = ModuleTree(params, layout)

  @functools.cached_property
  def frames(self) -> tuple[Frame, ...]:
    return self.tree.frames(self.params)

  def coordinates_of_gradients(self) -> Callable[[ArrayTree], Stacks]:
    """The map from the gradients of one example to its tangent coordinates.

    From a tree like the parameters to ``Tangent`` of stacks. Half of its
    products are with the inverses of cores. Where these are diagonal, in the
    gauge that a retraction leaves, a CPU multiplies columns.
    """
    frames = self.frames  # Computed here, not once for each example.
    diagonal = functools.reduce(
      jnp.logical_and, map(_tangents.has_diagonal_inverses, frames)
    )

    def by(times: Callable[..., jax.Array]) -> Callable[..., ArrayTree]:
      def whitened(frame: Frame, gradients: Factors) -> Tangent:
        return _tangents.whitened(frame, gradients, times)

      return functools.partial(map_pairs, whitened, frames)

    usual, by_columns = by(matmul), by(_tangents.times_diagonal)

    def coordinates(grads: ArrayTree) -> Stacks:
      gradients = self.tree.gradients(grads)
      pairs = gradients.pairs
      if isinstance(diagonal, jax.core.Tracer):
        pairs = jax.lax.platform_dependent(
          pairs,
          cpu=lambda x: jax.lax.cond(diagonal, by_columns, usual, x),
          default=usual,
        )
      else:
        pairs = (by_columns if diagonal else usual)(pairs)
      return gradients._replace(pairs=pairs)

    return coordinates

  def is_at(self, params: ArrayTree, layout: LayoutLike) -> bool:
    """Whether these are the very arrays and the layout of this context."""
    mine, theirs = jax.tree.leaves(self.params), jax.tree.leaves(params)
    return (
      jax.tree.structure(params) == self.tree.treedef
      and all(x is y for x, y in zip(mine, theirs, strict=True))
      and self.layout == layout
    )

  def to_tree(self, stacks: Stacks) -> ArrayTree:
    """The coordinates as a tree in the shapes of the parameters.

    Args:
      stacks: Tangent coordinates of either kind, and other leaves.

    Returns:
      The tree, of arrays in the types of the stacks.
    """
    return self.tree.tree(stacks.map_pairs(fixed_rank.multiply_out))
