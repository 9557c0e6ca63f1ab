"""Finding the pairs of LoRA factors in a tree of trainable parameters.

Names and shapes are read while tracing, in ``init`` and in ``update`` alike:
an optax state holds arrays only.
"""

import dataclasses
import fnmatch
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from prism_optax._modules import _conventions
from prism_optax._modules._layout import Layout, LeafAxes, Module, Pair

LayoutLike = Layout | Mapping[str, Layout] | Sequence[Pair] | None
Shapes = Mapping[str, tuple[int, ...]]

# What looks like a factor but follows none of the rules below must not pass
# for an ordinary parameter: it would be trained outside of the geometry.
_LIKE_A_FACTOR = re.compile(
  r'(^|.*[_/.])lora(_kernel|_embeddings?)?_[ab]([/.][^/.]+)?([/.]weight)?$'
  r'|(^|.*[/.])lora[/.][ab]$',
  re.IGNORECASE,
)
_WHAT_TO_WRITE = (
  "say which leaves belong together: layout=[lora.Pair('path/of/a',"
  " 'path/of/b', lora.Layout(a_rank_axis=..., b_rank_axis=...,"
  ' a_stack_axes=(), b_stack_axes=()))]'
)


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


def named_leaves(tree: Any) -> tuple[list[str], list[Any]]:
  """Names and leaves of a tree, in the same order."""
  flat, _ = jax.tree_util.tree_flatten_with_path(tree)
  return [path_name(path) for path, _ in flat], [leaf for _, leaf in flat]


def _trainable(params: optax.Params) -> tuple[list[str], list[Any]]:
  """Names and leaves of a tree of trainable parameters.

  Raises:
    ValueError: If there is no leaf, or one is not an array of real floats.
  """
  names, leaves = named_leaves(params)
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


def find_modules(
  params: optax.Params, layout: LayoutLike = None
) -> list[Module]:
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
  names, leaves = _trainable(params)
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


def other_leaves(modules: Sequence[Module], count: int) -> list[int]:
  """Positions of those of ``count`` leaves that belong to no module."""
  taken = {i for x in modules for i in (x.a, x.b)}
  return [i for i in range(count) if i not in taken]


def _shown(names: Sequence[str], shapes: Shapes, most: int = 8) -> str:
  text = ', '.join(f'{name} {shapes[name]}' for name in names[:most])
  return text + (f' and {len(names) - most} more' if len(names) > most else '')


def _given_pairs(layout: LayoutLike, shapes: Shapes) -> list[Pair]:
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


def _named_pairs(layout: LayoutLike, shapes: Shapes) -> list[Pair]:
  """Leaves whose names follow a convention, with the layout of their shapes."""
  named = _conventions.find(list(shapes))
  used: set[str] = set()
  pairs = []
  for found in named:
    chosen = layout if isinstance(layout, Layout) else None
    if isinstance(layout, Mapping):
      patterns = [p for p in layout if fnmatch.fnmatch(found.module, p)]
      used.update(patterns)
      chosen = layout[patterns[0]] if patterns else None
    chosen = _read(found, chosen or Layout(), shapes)
    pairs.append(Pair(found.a, found.b, chosen, found.module))
  if isinstance(layout, Mapping) and set(layout) - used:
    raise ValueError(
      f'layout patterns {sorted(set(layout) - used)} match no pair; the pairs'
      f' are {[found.module for found in named]}.'
    )
  return pairs


def _described(a: str, b: str, shapes: Shapes) -> str:
  """The leaves of a pair with their shapes, which must be matrices at least."""
  described = f'{a} {shapes[a]} and {b} {shapes[b]}'
  if min(len(shapes[a]), len(shapes[b])) < 2:
    raise ValueError(f'Expected at least two axes each, got {described}.')
  return described


def _read(found: _conventions.Named, layout: Layout, shapes: Shapes) -> Layout:
  """``layout``, with the axes that the convention and the shapes decide."""
  if layout.a_rank_axis is not None or layout.a_stack_axes is not None:
    return layout
  described = _described(found.a, found.b, shapes)
  readings = found.convention.readings(shapes[found.a], shapes[found.b])
  if not readings:
    raise ValueError(
      f'The pair does not fit together: {described}, read as'
      f' {found.convention.library} names them; {_WHAT_TO_WRITE}.'
    )
  if len(readings) > 1:
    listed = '; '.join(
      f'a_rank_axis={x.a_rank_axis}, b_rank_axis={x.b_rank_axis},'
      f' a_stack_axes={x.a_stack_axes}, b_stack_axes={x.b_stack_axes}'
      for x in readings
    )
    raise ValueError(
      f'The shapes of {described} can be read in several ways: {listed}. Say'
      f' which: layout={{{found.module!r}: lora.Layout(...)}} with one of them.'
    )
  return dataclasses.replace(readings[0], scale=layout.scale)


def pairs_by_name(names: Sequence[str], params: Sequence[Any]) -> list[Pair]:
  """The ``layout`` for a plain list of arrays whose names stand beside it.

  For instance Keras: ``[v.path for v in model.trainable_variables]`` beside
  ``[v.value for v in model.trainable_variables]``.

  Args:
    names: Path of each array, '/' between keys.
    params: The arrays, in the same order.

  Returns:
    Pairs with their layouts; paths are positions in the list.

  Raises:
    ValueError: If the lengths differ, or a pair cannot be read.

  Example:
    >>> import jax.numpy as jnp
    >>> from prism_optax import lora
    >>> params = [jnp.ones((6, 2)), jnp.zeros((2, 5))]
    >>> names = ['dense/lora_kernel_a', 'dense/lora_kernel_b']
    >>> layout = lora.pairs_by_name(names, params)
    >>> print(lora.describe_pairs(params, layout=layout))
    module  right (n, r)  left (m, r)  stack  scale
    dense   6 x 2         5 x 2        ()     1
    other trainable leaves: none
  """
  if len(names) != len(params):
    raise ValueError(
      f'Expected a name for each array, got {len(names)} names and'
      f' {len(params)} arrays.'
    )
  if len(set(names)) != len(names):
    raise ValueError(f'Expected distinct names, got {list(names)}.')
  shapes = {name: np.shape(x) for name, x in zip(names, params, strict=True)}
  index = {name: str(i) for i, name in enumerate(names)}
  return [
    pair._replace(a=index[pair.a], b=index[pair.b])
    for pair in _named_pairs(None, shapes)
  ]


def _axes(
  path: str,
  shapes: Shapes,
  rank: int | None,
  usual_rank: int,
  stack: Sequence[int] | None,
) -> LeafAxes:
  """Axes as given, or those of ``(*stack, in, r)`` and ``(*stack, r, out)``."""
  shape = shapes[path]
  return LeafAxes.create(
    path,
    shape,
    usual_rank if rank is None else rank,
    tuple(range(len(shape) - 2) if stack is None else stack),
  )


def _resolve(pair: Pair, shapes: Shapes, index: Mapping[str, int]) -> Module:
  described = _described(pair.a, pair.b, shapes)
  how = pair.layout or Layout()
  a_axes = _axes(pair.a, shapes, how.a_rank_axis, -1, how.a_stack_axes)
  b_axes = _axes(pair.b, shapes, how.b_rank_axis, -2, how.b_stack_axes)
  module = Module(
    pair.name or pair.a.rpartition('/')[0] or pair.a,
    index[pair.b],
    index[pair.a],
    b_axes,
    a_axes,
    float(how.scale),
  )
  b_rank, b_stack = b_axes.shape[b_axes.rank], b_axes.sizes(b_axes.stack)
  if (module.rank, module.stack) != (b_rank, b_stack):
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


def describe_pairs(params: optax.Params, *, layout: LayoutLike = None) -> str:
  """A table of the LoRA modules that the transforms see in ``params``.

  Names choose the convention (flax, gemma, keras, PEFT, qwix), shapes choose
  among its readings, and only if exactly one of them fits.

  ===============================  ============================================
  no pair                          ValueError with the names found
  factor without a partner         ValueError: it would be trained unseen
  name like a factor's, no rule    ValueError, likewise
  shapes that can be read twice    ValueError that lists the readings
  rank above min(in, out)          ValueError
  one layer, or layers == r        the leading axes are the stack: no doubt
  ``optax.MaskedNode`` and None    are no leaves
  leaf that is no float            ValueError: frozen leaves do not belong here
  ===============================  ============================================

  Args:
    params: Tree of trainable arrays, or of shapes.
    layout: ``None`` finds the pairs by their names, with scale 1. A
      :class:`Layout` holds for all of them; a mapping from patterns of module
      names (``fnmatch``) to layouts for those that match; a list of
      :class:`Pair` says everything.

  Returns:
    Some lines of text: a row for each module, then the other leaves.

  Raises:
    ValueError: As in the table, or if shapes do not fit the layout.

  Example:
    >>> import jax.numpy as jnp
    >>> from prism_optax import lora
    >>> print(lora.describe_pairs({'dense': {
    ...   'lora_a': jnp.ones((6, 2)), 'lora_b': jnp.zeros((2, 5))}}))
    module  right (n, r)  left (m, r)  stack  scale
    dense   6 x 2         5 x 2        ()     1
    other trainable leaves: none
  """
  modules = find_modules(params, layout)
  names, _ = named_leaves(params)
  others = [names[i] for i in other_leaves(modules, len(names))]
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
  lines.append(f'other trainable leaves: {", ".join(others) or "none"}')
  return '\n'.join(lines)
