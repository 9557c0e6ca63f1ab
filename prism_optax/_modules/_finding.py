"""Finding the pairs of LoRA factors in a tree of trainable parameters.

Names and shapes are read while tracing, in ``init`` and in ``update`` alike:
an optax state holds arrays only.
"""

import dataclasses
import fnmatch
import math
import re
import warnings
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax

from prism_optax._modules._layout import (
  Convention,
  Layout,
  LeafAxes,
  Module,
  Pair,
  Shape,
  find_named,
)
from prism_optax._types import Array, ArrayTree

LayoutLike = Layout | Mapping[str, Layout] | Sequence[Pair] | None
Shapes = Mapping[str, Shape]

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


def named_leaves(tree: ArrayTree) -> tuple[list[str], list[ArrayTree]]:
  """Names ('layers/0/lora_a') and leaves of a tree, in the same order."""
  # A flax Variable is a node with one child, `.value`, which is left out.
  ends = [(jax.tree_util.GetAttrKey(key),) for key in ('value', 'raw_value')]
  names, leaves = [], []
  for path, leaf in jax.tree.leaves_with_path(tree):
    keys = path[:-1] if path[-1:] in ends else path
    names.append(jax.tree_util.keystr(keys, simple=True, separator='/'))
    leaves.append(leaf)
  return names, leaves


def _trainable(params: optax.Params) -> dict[str, Shape]:
  """Shapes of trainable parameters by their names, in the order of the leaves.

  Raises:
    ValueError: If there is no leaf, one is not an array of real floats, or two
      have one name.
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
  if len(set(names)) != len(names):
    raise ValueError(f'Expected distinct names of leaves, got {names}.')
  return dict(zip(names, map(np.shape, leaves), strict=True))


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
  shapes = _trainable(params)
  layout = layout or Layout()
  if isinstance(layout, Layout | Mapping):
    pairs = _named_pairs(layout, shapes)
  else:
    pairs = _given_pairs(layout, shapes)
  taken = [leaf for pair in pairs for leaf in (pair.a, pair.b)]
  if len(set(taken)) != len(taken):
    raise ValueError(f'Expected each leaf in one pair only, got {pairs}.')
  stray = [n for n in shapes if n not in taken and _LIKE_A_FACTOR.match(n)]
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
      f' {_shown(list(shapes), shapes)}. For other names {_WHAT_TO_WRITE}.'
    )
  modules = [_resolve(pair, shapes) for pair in pairs]
  return sorted(modules, key=lambda module: min(module.a, module.b))


def other_leaves(modules: Sequence[Module], count: int) -> list[int]:
  """Positions of those of ``count`` leaves that belong to no module."""
  taken = {i for x in modules for i in (x.a, x.b)}
  return [i for i in range(count) if i not in taken]


def _shown(names: Sequence[str], shapes: Shapes) -> str:
  first, rest = names[:8], names[8:]
  text = ', '.join(f'{name} {shapes[name]}' for name in first)
  return text + (f' and {len(rest)} more' if rest else '')


def _given_pairs(pairs: Sequence[Pair], shapes: Shapes) -> list[Pair]:
  for pair in pairs:
    if not isinstance(pair, Pair):
      raise ValueError(f'Expected layout to hold lora.Pair, got {pair!r}.')
    for path in (pair.a, pair.b):
      if path not in shapes:
        raise ValueError(
          f'No leaf at {path!r} for {pair}; params has'
          f' {_shown(list(shapes), shapes)}.'
        )
  return list(pairs)


def _named_pairs(
  layout: Layout | Mapping[str, Layout], shapes: Shapes
) -> list[Pair]:
  """Leaves whose names follow a convention, with the layout of their shapes."""
  layouts = layout if isinstance(layout, Mapping) else {'*': layout}
  used: set[str] = set()
  pairs = []
  for pair, convention in find_named(shapes):
    patterns = [p for p in layouts if fnmatch.fnmatch(pair.name or '', p)]
    used.update(patterns)
    chosen = layouts[patterns[0]] if patterns else Layout()
    if chosen.a_rank_axis is None and chosen.a_stack_axes is None:
      reading = _only_reading(pair, convention, shapes)
      chosen = dataclasses.replace(reading, scale=chosen.scale)
    pairs.append(pair._replace(layout=chosen))
  if pairs and set(layouts) - used:
    raise ValueError(
      f'layout patterns {sorted(set(layouts) - used)} match no pair; the pairs'
      f' are {[pair.name for pair in pairs]}.'
    )
  return pairs


def _described(pair: Pair, shapes: Shapes) -> str:
  """The leaves of a pair with their shapes, which must be matrices at least."""
  a, b = shapes[pair.a], shapes[pair.b]
  described = f'{pair.a} {a} and {pair.b} {b}'
  if min(len(a), len(b)) < 2:
    raise ValueError(f'Expected at least two axes each, got {described}.')
  return described


def _only_reading(pair: Pair, convention: Convention, shapes: Shapes) -> Layout:
  """The axes that the convention and the shapes decide."""
  described = _described(pair, shapes)
  readings = convention.readings(shapes[pair.a], shapes[pair.b])
  if not readings:
    raise ValueError(
      f'The pair does not fit together: {described}, read as'
      f' {convention.library} names them; {_WHAT_TO_WRITE}.'
    )
  if len(readings) > 1:
    raise ValueError(
      f'The shapes of {described} can be read in several ways: {readings}. Say'
      f' which: layout={{{pair.name!r}: lora.Layout(...)}} with one of them.'
    )
  return readings[0]


def pairs_by_name(names: Sequence[str], params: Sequence[Array]) -> list[Pair]:
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
    for pair in _named_pairs(Layout(), shapes)
  ]


def _resolve(pair: Pair, shapes: Shapes) -> Module:
  """The module, whose axes are the usual ones where they are not given."""
  described = _described(pair, shapes)
  how = pair.layout or Layout()
  a_axes, b_axes = (
    LeafAxes.create(path, shapes[path], usual if rank is None else rank, stack)
    for path, usual, rank, stack in (
      (pair.a, -1, how.a_rank_axis, how.a_stack_axes),
      (pair.b, -2, how.b_rank_axis, how.b_stack_axes),
    )
  )
  a, b = map(list(shapes).index, (pair.a, pair.b))
  name = pair.name or pair.a.rpartition('/')[0] or pair.a
  module = Module(name, b, a, b_axes, a_axes, float(how.scale))
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


def _mostly_no_adapters(
  modules: Sequence[Module], names: Sequence[str], sizes: Sequence[int]
) -> str | None:
  """A sentence if weights, too, are about to be trained; None if not.

  The weight that an adapter changes is meant to be frozen. A head may well be
  larger than all adapters: beside it nothing is said before nine tenths.
  """
  others = other_leaves(modules, len(names))
  weights = {
    names[i]
    for i in others
    for x in modules
    if sizes[i] == math.prod(x.stack) * x.n * x.m and x.is_near(names[i])
  }
  share = sum(sizes[i] for i in others) / sum(sizes)
  if not weights and share < 0.9:
    return None
  shown = sorted(weights) or [names[i] for i in others]
  what = ', the weights that adapters change' if weights else ''
  more = '' if len(shown) < 4 else f' and {len(shown) - 3} more'
  return (
    f'{share:.0%} of the entries of params are no factors of adapters:'
    f' {", ".join(shown[:3])}{more}{what}. They would be clipped, noised and'
    ' trained as well. If that is not wanted, give the adapters alone, such as'
    ' nnx.state(model, nnx.LoRAParam).'
  )


def warn_if_mostly_no_adapters(
  params: optax.Params, layout: LayoutLike = None
) -> None:
  """Warns if the filter of trainable parameters has let weights through.

  It reads names and shapes. A tree in which no pairs are found passes, since
  any model may be trained by an optimizer of optax.

  Args:
    params: Tree of trainable arrays, or of shapes.
    layout: See :func:`describe_pairs`.
  """
  try:
    modules = find_modules(params, layout)
  except ValueError:
    return
  names, leaves = named_leaves(params)
  sizes = [math.prod(np.shape(leaf)) for leaf in leaves]
  found = _mostly_no_adapters(modules, names, sizes)
  if found is not None:
    # To whoever called `make_private`, which is called by a wrapper.
    warnings.warn(found, stacklevel=4)


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
  weights that adapters change     a last line that warns, because the filter
                                   of trainable parameters let them through
  nine tenths are no factors       likewise
  ===============================  ============================================

  Args:
    params: Tree of trainable arrays, or of shapes.
    layout: ``None`` finds the pairs by their names, with scale 1. A
      :class:`Layout` holds for all of them; a mapping from patterns of module
      names (``fnmatch``) to layouts for those that match; a list of
      :class:`Pair` says everything.

  Returns:
    Lines of text with a row for each module, the other leaves and the warning.

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
  names, leaves = named_leaves(params)
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
  sizes = [math.prod(np.shape(leaf)) for leaf in leaves]
  found = _mostly_no_adapters(modules, names, sizes)
  if found is not None:
    lines.append(f'warning: {found}')
  return '\n'.join(lines)
