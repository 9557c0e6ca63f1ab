"""Finding the pairs of LoRA factors in a tree of trainable parameters.

Names and shapes are read while tracing, in ``init`` and in ``update`` alike:
an optax state holds arrays only.
"""

import fnmatch
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from prism_optax.lora._layout import Layout, LeafAxes, Pair

LayoutLike = Layout | Mapping[str, Layout] | Sequence[Pair] | None

# What looks like a factor but follows none of the rules below must not pass
# for an ordinary parameter: it would be trained outside of the geometry.
_LIKE_A_FACTOR = re.compile(
  r'(^|.*[_/.])lora(_kernel|_embedding)?_[ab](\.weight)?$|(^|.*[/.])lora[/.][ab]$',
  re.IGNORECASE,
)
_WHAT_TO_WRITE = (
  "say which leaves belong together: layout=[lora.Pair('path/of/a',"
  " 'path/of/b', lora.Layout(a_rank_axis=..., b_rank_axis=...,"
  ' a_stack_axes=(), b_stack_axes=()))]'
)


class Module(NamedTuple):
  """One pair, resolved: which leaves, which axes, which scale.

  ``a`` and ``b`` are positions in the flattened tree; ``a`` is ``right``.
  """

  name: str
  a: int
  b: int
  a_axes: LeafAxes
  b_axes: LeafAxes
  scale: float

  @property
  def rank(self) -> int:
    return self.a_axes.shape[self.a_axes.rank]

  @property
  def stack(self) -> tuple[int, ...]:
    return self.a_axes.sizes(self.a_axes.stack)

  @property
  def n(self) -> int:
    return math.prod(self.a_axes.sizes(self.a_axes.features))

  @property
  def m(self) -> int:
    return math.prod(self.b_axes.sizes(self.b_axes.features))


def path_name(path: Sequence[Any]) -> str:
  """'layers/0/lora_a': keys joined by '/', without a final Variable value."""
  keys = [
    str(getattr(k, 'key', getattr(k, 'name', getattr(k, 'idx', k))))
    for k in path
  ]
  if keys and isinstance(path[-1], jax.tree_util.GetAttrKey):
    # A flax Variable is a node with one child, `.value`.
    keys = keys[:-1] if keys[-1] in ('value', 'raw_value') else keys
  return '/'.join(keys)


def named_leaves(params: Any) -> tuple[list[str], list[Any]]:
  """Names and leaves of a tree of trainable parameters.

  Raises:
    ValueError: If there is no leaf, or one is not an array of real floats.
  """
  flat, _ = jax.tree_util.tree_flatten_with_path(params)
  names = [path_name(path) for path, _ in flat]
  leaves = [leaf for _, leaf in flat]
  if not leaves:
    raise ValueError(f'Expected params with at least one array, got {params}.')
  for name, leaf in zip(names, leaves, strict=True):
    dtype = getattr(leaf, 'dtype', None)
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
      raise ValueError(
        'Expected params to hold floating-point arrays only (the trainable'
        f' ones), got {name!r} of {f"dtype {dtype}" if dtype else type(leaf)}.'
      )
  return names, leaves


def find_modules(params: Any, layout: LayoutLike = None) -> list[Module]:
  """The LoRA modules of a tree, in the order of its leaves.

  Args:
    params: Tree of trainable arrays.
    layout: None to find the pairs by name; a :class:`Layout` for all of them;
      a mapping from patterns of module names (``fnmatch``) to layouts; or a
      list of :class:`Pair`.

  Raises:
    ValueError: If no pair is found, a factor has no partner, a leaf looks like
      a factor but fits no rule, or shapes do not fit the layout.
  """
  names, leaves = named_leaves(params)
  shapes = dict(zip(names, (np.shape(leaf) for leaf in leaves), strict=True))
  if len(shapes) != len(names):
    raise ValueError(f'Expected distinct names of leaves, got {names}.')
  pairs = _given_pairs(layout, shapes) or _named_pairs(layout, shapes)
  taken = [leaf for pair in pairs for leaf in (pair.a, pair.b)]
  if len(set(taken)) != len(taken):
    raise ValueError(f'Expected each leaf in one pair only, got {pairs}.')
  stray = [n for n in names if n not in taken and _LIKE_A_FACTOR.match(n)]
  if stray:
    raise ValueError(
      'These leaves are named like LoRA factors but belong to no pair:'
      f' {_shown(stray, shapes)}. Either the partner is not in `params`, or the'
      f' naming is not known here; then {_WHAT_TO_WRITE}.'
    )
  if not pairs:
    raise ValueError(
      'No LoRA pair found in params: expected leaves named lora_a (*stack, in,'
      f' r) and lora_b (*stack, r, out) side by side, got'
      f' {_shown(names, shapes)}. For other names {_WHAT_TO_WRITE}.'
    )
  index = {name: i for i, name in enumerate(names)}
  modules = [_resolve(pair, shapes, index) for pair in pairs]
  return sorted(modules, key=lambda module: min(module.a, module.b))


def _shown(names: Sequence[str], shapes: Mapping[str, Any], most=8) -> str:
  text = ', '.join(f'{name} {shapes[name]}' for name in names[:most])
  return text + (f' and {len(names) - most} more' if len(names) > most else '')


def _given_pairs(layout: LayoutLike, shapes: Mapping[str, Any]) -> list[Pair]:
  if layout is None or isinstance(layout, Layout | Mapping):
    return []
  for pair in layout:
    if not isinstance(pair, Pair):
      raise ValueError(f'Expected layout to hold lora.Pair, got {pair!r}.')
    for path in (pair.a, pair.b):
      if path not in shapes:
        raise ValueError(
          f'No leaf at {path!r} for {pair}; params has'
          f' {_shown(list(shapes), shapes)}.'
        )
  return list(layout)


def _named_pairs(layout: LayoutLike, shapes: Mapping[str, Any]) -> list[Pair]:
  """Leaves ``lora_a`` and ``lora_b`` under one parent."""
  pairs = []
  used = set()
  for name in shapes:
    parent, _, last = name.rpartition('/')
    partner = f'{parent}/lora_b' if parent else 'lora_b'
    if last != 'lora_a' or partner not in shapes:
      continue
    chosen = layout if isinstance(layout, Layout) else None
    if isinstance(layout, Mapping):
      patterns = [p for p in layout if fnmatch.fnmatch(parent, p)]
      used.update(patterns)
      chosen = layout[patterns[0]] if patterns else None
    pairs.append(Pair(name, partner, chosen))
  if isinstance(layout, Mapping) and set(layout) - used:
    raise ValueError(
      f'layout patterns {sorted(set(layout) - used)} match no pair; the pairs'
      f' are {[pair.a.rpartition("/")[0] for pair in pairs]}.'
    )
  return pairs


def _resolve(
  pair: Pair, shapes: Mapping[str, Any], index: Mapping[str, int]
) -> Module:
  layout = pair.layout or Layout()
  a_shape, b_shape = shapes[pair.a], shapes[pair.b]
  described = f'{pair.a} {a_shape} and {pair.b} {b_shape}'
  if min(len(a_shape), len(b_shape)) < 2:
    raise ValueError(f'Expected at least two axes each, got {described}.')
  a_rank = -1 if layout.a_rank_axis is None else layout.a_rank_axis
  if layout.a_stack_axes is None:  # a (*stack, in, r), b (*stack, r, out).
    stacks = [tuple(range(len(s) - 2)) for s in (a_shape, b_shape)]
  else:
    stacks = [tuple(layout.a_stack_axes), tuple(layout.b_stack_axes or ())]
  b_rank = -2 if layout.b_rank_axis is None else layout.b_rank_axis
  a_axes = LeafAxes.create(pair.a, a_shape, a_rank, stacks[0])
  b_axes = LeafAxes.create(pair.b, b_shape, b_rank, stacks[1])
  name = pair.a.rpartition('/')[0] or pair.a
  module = Module(
    name, index[pair.a], index[pair.b], a_axes, b_axes, float(layout.scale)
  )
  if a_shape[a_axes.rank] != b_shape[
    b_axes.rank
  ] or module.stack != b_axes.sizes(b_axes.stack):
    raise ValueError(
      f'The pair does not fit together: {described}. Expected (*stack, in, r)'
      f' and (*stack, r, out) with equal stack and r; otherwise'
      f' {_WHAT_TO_WRITE}.'
    )
  if not 1 <= module.rank <= min(module.m, module.n):
    raise ValueError(
      f'Expected 1 <= rank <= min(in, out), got rank={module.rank},'
      f' in={module.n}, out={module.m} for {described}.'
    )
  return module


def describe_pairs(params: Any, *, layout: LayoutLike = None) -> str:
  """A table of the LoRA modules that the transforms see in ``params``.

  >>> import jax.numpy as jnp
  >>> print(describe_pairs({'dense': {
  ...   'lora_a': jnp.ones((6, 2)), 'lora_b': jnp.zeros((2, 5))}}))
  module  right (n, r)  left (m, r)  stack  scale
  dense   6 x 2         5 x 2        ()     1
  other trainable leaves: none
  """
  modules = find_modules(params, layout)
  names, _ = named_leaves(params)
  rows = [('module', 'right (n, r)', 'left (m, r)', 'stack', 'scale')]
  rows += [
    (x.name, f'{x.n} x {x.rank}', f'{x.m} x {x.rank}', f'{x.stack}',
     f'{x.scale:g}') for x in modules
  ]  # fmt: skip
  widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
  lines = [
    '  '.join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip()
    for row in rows
  ]
  taken = {i for module in modules for i in (module.a, module.b)}
  others = [name for i, name in enumerate(names) if i not in taken]
  lines.append(f'other trainable leaves: {", ".join(others) or "none"}')
  return '\n'.join(lines)
