"""Between a parameter tree and stacked arrays that the geometry works on.

Modules of the same shapes are stacked along one axis, whatever their number, so
a program's size and compile time hardly grow with the number of modules.
"""

import collections
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from prism_optax import fixed_rank
from prism_optax.fixed_rank import Factors, Frame, Tangent
from prism_optax.lora import _pairs
from prism_optax.lora._blocks import Blocks, ModuleArrays
from prism_optax.lora._layout import (
  from_matrices,
  to_matrices,
  widened,
)


class Adapters:
  """The LoRA modules of one tree, with what is static about them.

  XLA fuses what computes a stack into each slice of it. So what goes into
  :meth:`tree` should end in a product: an elementwise operation on a stack that
  was just made would take compile time quadratic in the number of modules.

  Made while tracing from the shapes and names of ``params``; it holds no
  array.

  Args:
    params: Tree of trainable arrays.
    layout: See :func:`prism_optax.lora.describe_pairs`.

  Raises:
    ValueError: If pairs cannot be found, or a rank is above min(m, n).

  Example:
    >>> import jax.numpy as jnp
    >>> from prism_optax import lora
    >>> params = {'lora_a': jnp.ones((3, 1)), 'lora_b': jnp.ones((1, 2))}
    >>> adapters = lora.Adapters(params, lora.Layout(scale=4.0))
    >>> pair = adapters.factors(params).pairs[0]
    >>> pair.left.tolist(), pair.right.shape  # k = 1; sqrt(scale) on each.
    ([[[2.0], [2.0]]], (1, 3, 1))
  """

  def __init__(self, params: Any, layout: _pairs.LayoutLike = None):
    self.modules = _pairs.find_modules(params, layout)
    self.names, leaves = _pairs.named_leaves(params)
    self._treedef: Any = jax.tree.structure(params)
    self._shapes = [np.shape(leaf) for leaf in leaves]
    # Geometry, sums and noise need float32 at least, whatever the model's type.
    self._dtypes = [
      jnp.promote_types(leaf.dtype, jnp.float32) for leaf in leaves
    ]
    groups = collections.defaultdict(list)
    for module in self.modules:
      dtype = jnp.promote_types(self._dtypes[module.a], self._dtypes[module.b])
      groups[module.a_axes.unit, module.b_axes.unit, dtype].append(module)
    # Modules that stack as they are, so that one transposition serves them all.
    self._groups = list(groups.items())
    taken = {i for module in self.modules for i in (module.a, module.b)}
    self._taken = taken
    self._others = [i for i in range(len(leaves)) if i not in taken]

  # Trees of arrays -> blocks.

  def _leaves(self, tree: Any, lead: int, what: str) -> list[jax.Array]:
    """The leaves of a tree like ``params`` with ``lead`` more leading axes."""
    if jax.tree.structure(tree) != self._treedef:
      raise ValueError(
        f'Expected {what} to have the structure of params, got'
        f' {jax.tree.structure(tree)} for {self._treedef}.'
      )
    leaves = jax.tree.leaves(tree)
    for name, leaf, shape in zip(self.names, leaves, self._shapes, strict=True):
      if np.shape(leaf)[lead:] != shape or np.ndim(leaf) != lead + len(shape):
        axes = 'one leading batch axis and then ' if lead else ''
        raise ValueError(
          f'Expected {what} at {name!r} to have {axes}the shape of the'
          f' parameter, {shape}, got {np.shape(leaf)}.'
        )
    if lead:
      sizes = {np.shape(leaf)[:lead] for leaf in leaves}
      if len(sizes) > 1:
        raise ValueError(
          f'Expected the same leading batch axis in all of {what}, got sizes'
          f' {sorted(size[0] for size in sizes)}.'
        )
    return leaves

  def _split(
    self, leaves: Sequence[jax.Array], kind: Any, power: float
  ) -> Blocks:
    """Stacks the pairs, multiplied by ``scale ** power``."""

    def stacked(side: str, unit, group, dtype):
      parts = []
      for x in group:
        leaf = jnp.asarray(leaves[getattr(x, side)], dtype)
        part = getattr(x, f'{side}_axes').to_stack(leaf)
        parts.append(part if x.scale == 1 else part * float(x.scale**power))
      # The stack axis comes before those of the unit.
      return to_matrices(unit, jnp.concatenate(parts, -1 - len(unit[0])))

    pairs = tuple(
      kind(stacked('b', b, group, dtype), stacked('a', a, group, dtype))
      for (a, b, dtype), group in self._groups
    )
    others = tuple(
      jnp.asarray(leaves[i], self._dtypes[i]) for i in self._others
    )
    return Blocks(pairs, others)

  def factors(self, params: Any) -> Blocks:
    """The scaled factors: ``Z`` of a module is its change of the weight.

    The scale is shared out as its square root on either factor.

    Args:
      params: A tree like the one this was made from.

    Returns:
      Pairs of ``Factors``, float32 at least.
    """
    leaves = self._leaves(params, 0, 'params')
    return self._split(leaves, Factors, 0.5)

  def gradients(self, grads: Any, lead: int = 0, what='grads') -> Blocks:
    """Gradients with respect to :meth:`factors`, with leading batch axes.

    Args:
      grads: Gradients with respect to the leaves.
      lead: Number of their leading batch axes, 0 or 1.
      what: Name in error messages.

    Returns:
      Pairs of ``Factors``, divided by the square root of the scale.
    """
    return self._split(self._leaves(grads, lead, what), Factors, -0.5)

  def coordinates(self, tree: Any, what: str = 'updates') -> Blocks:
    """Tangent coordinates from a tree in the shapes of ``params``.

    Args:
      tree: Coordinates, as transformations pass them on.
      what: Name in error messages.

    Returns:
      Pairs of ``Tangent``, float32 at least.
    """
    return self._split(self._leaves(tree, 0, what), Tangent, 0.0)

  def in_place(
    self, tree: Any, lead: int = 0, what: str = 'grads'
  ) -> tuple[list[list[ModuleArrays]], list[jax.Array]]:
    """The pairs module by module, each as it lies in its leaves.

    To read large arrays once: stacking would copy them. Not scaled.

    Args:
      tree: Like ``params``, with leading batch axes.
      lead: Their number, 0 or 1.
      what: Name in error messages.

    Returns:
      For each group its modules, and the other leaves.
    """
    leaves = self._leaves(tree, lead, what)

    groups = []
    for (a, b, dtype), group in self._groups:
      modules, start = [], 0
      for x in group:
        end = start + int(np.prod(x.stack))
        left = x.b_axes.to_stack(jnp.asarray(leaves[x.b], dtype))
        right = x.a_axes.to_stack(jnp.asarray(leaves[x.a], dtype))
        place = slice(start, end)
        modules.append(ModuleArrays(place, x.scale, left, right, b, a))
        start = end
      groups.append(modules)
    others = [jnp.asarray(leaves[i], self._dtypes[i]) for i in self._others]
    return groups, others

  # Blocks -> trees.

  def tree(
    self, blocks: Blocks, power: float = 0.0, rank_multiple: int = 1
  ) -> Any:
    """A tree in the shapes of ``params``; pairs times ``scale ** power``.

    Args:
      blocks: Pairs and other leaves.
      power: 0 for coordinates, -0.5 for what :meth:`factors` gave.
      rank_multiple: The factors have so many times the columns.

    Returns:
      The tree, in the types of the blocks.
    """
    leaves: list[Any] = [None] * len(self._shapes)
    for ((a, b, _), group), pair in zip(
      self._groups, blocks.pairs, strict=True
    ):
      right = from_matrices(widened(a, rank_multiple), pair.right)
      left = from_matrices(widened(b, rank_multiple), pair.left)
      start = 0
      for x in group:
        end = start + int(np.prod(x.stack))
        factor = float(x.scale**power)
        for i, axes, stacked in (
          (x.a, x.a_axes, right),
          (x.b, x.b_axes, left),
        ):
          part = axes.widened(rank_multiple).from_stack(stacked[start:end])
          leaves[i] = part if factor == 1 else part * factor
        start = end
    for i, leaf in zip(self._others, blocks.others, strict=True):
      leaves[i] = leaf
    return jax.tree.unflatten(self._treedef, leaves)

  def steps(self, new: Sequence[Factors], params: Any, others: Any) -> Any:
    """A tree of ``new - params`` for the factors, of ``others`` beside them.

    Args:
      new: Factors of each group, as :meth:`factors` gives them.
      params: The tree to subtract.
      others: Updates of the other leaves.

    Returns:
      Updates for ``optax.apply_updates``.
    """
    tree = self.tree(Blocks(tuple(new), tuple(others)), -0.5)
    leaves, old = jax.tree.leaves(tree), jax.tree.leaves(params)
    return jax.tree.unflatten(
      self._treedef,
      [y - old[i] if i in self._taken else y for i, y in enumerate(leaves)],
    )

  def by_module(self, stacked: Sequence[jax.Array]) -> dict[str, jax.Array]:
    """From one array for each group to arrays by the names of modules.

    Args:
      stacked: Arrays (k, ...), one for each group.

    Returns:
      A dict of arrays ``(*stack, ...)``.
    """
    out = {}
    for (_, group), array in zip(self._groups, stacked, strict=True):
      start = 0
      for x in group:
        end = start + int(np.prod(x.stack))
        out[x.name] = array[start:end].reshape(*x.stack, *array.shape[1:])
        start = end
    return out

  # Geometry over all modules.

  def frames(self, params: Any) -> tuple[Frame, ...]:
    """One stacked frame for each group of modules.

    Args:
      params: A tree like the one this was made from.

    Returns:
      Frames of the scaled factors.
    """
    return tuple(fixed_rank.frame(pair) for pair in self.factors(params).pairs)

  def check_observable(self, params: Any) -> None:
    """Refuses modules whose factors are both zero, where values are known.

    Their gradients are zero whatever the data, so they would never move.

    Args:
      params: A tree like the one this was made from.

    Raises:
      ValueError: Naming the modules.
    """
    leaves = jax.tree.leaves(params)

    def known_to_be_zero(leaf: Any) -> bool:
      if isinstance(leaf, jax.core.Tracer | jax.ShapeDtypeStruct):
        return False
      if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        return False
      return not np.any(np.asarray(leaf))

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
