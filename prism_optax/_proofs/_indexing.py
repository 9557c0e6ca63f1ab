"""Rules for what cuts, joins, and looks up: slices, gathers, scatters."""

from collections.abc import Sequence

from prism_optax._proofs import _labels
from prism_optax._proofs._labels import (
  Batched,
  Digit,
  Equation,
  Label,
  common,
  need,
  simplified,
)
from prism_optax._proofs._rules import Result, Rule, lifted, need_other_axes

_LOOK_UP = 'jnp.take_along_axis(x, index, 1), or jax.vmap over the examples'


def _cut(
  label: Batched, axis: int, first: int, size: int, step: int = 1
) -> Batched:
  """Some of the rows of an axis, which may say nothing of the batch."""
  digits = label.axes[axis]
  if not digits:
    return label
  need(
    len(digits) == 1,
    'cuts the batch axis where tokens and examples share it',
    'reshape to (batch, tokens, ...) first',
  )
  weight = digits[0].weight
  rows = simplified([Digit(size, weight * step)])
  return label.with_axis(axis, rows, label.start + first * weight)


def _slice(e: Equation, label: Batched) -> Result:
  p, shape = e.params, e.outs[0]
  for a, first in enumerate(p['start_indices']):
    if shape[a] != e.ins[0][a]:
      step = 1 if p['strides'] is None else p['strides'][a]
      label = _cut(label, a, first, shape[a], step)
  return label


def _split(e: Equation, label: Batched) -> Result:
  axis, sizes = e.params['axis'], e.params['sizes']
  starts = [sum(sizes[:k]) for k in range(len(sizes))]
  return [_cut(label, axis, *x) for x in zip(starts, sizes, strict=True)]


def _unstack(e: Equation, label: Batched) -> Result:
  axis, count = e.params['axis'], e.ins[0][e.params['axis']]
  rows = [_cut(label, axis, k, 1) for k in range(count)]
  return [x.with_axes((*x.axes[:axis], *x.axes[axis + 1 :])) for x in rows]


def _joined(axis: int, sizes: Sequence[int], labels: Sequence[Label]) -> Label:
  """Parts of a batch one after the other along an axis, as they were cut."""
  parts = [x for x in labels if isinstance(x, Batched)]
  if len(set(parts)) == 1 and not parts[0].axes[axis]:
    return parts[0]
  shift = 'joins rows of the batch that do not follow each other'
  instead = 'keep the order of the examples; a shift along the batch mixes them'
  need(len(parts) == len(labels), shift, instead)
  weights = {x.weight for part in parts for x in part.axes[axis]}
  weights = weights or {parts[1].start - parts[0].start}
  need(len(weights) == 1, shift, instead)
  (weight,) = weights
  start = parts[0].start
  for size, part in zip(sizes, parts, strict=True):
    rows = simplified([Digit(size, weight)])
    follows = part == parts[0].with_axis(axis, rows, start)
    need(weight > 0 and follows, shift, instead)
    start += size * weight
  rows = simplified([Digit(sum(sizes), weight)])
  return parts[0].with_axis(axis, rows, parts[0].start)


def _concatenate(e: Equation, *labels: Label) -> Result:
  axis = e.params['dimension']
  return _joined(axis, [x[axis] for x in e.ins], labels)


def _stack(e: Equation, *labels: Label) -> Result:
  axis = e.params['axis']
  thick = [
    x.with_axes((*x.axes[:axis], (), *x.axes[axis:]))
    if isinstance(x, Batched)
    else x
    for x in labels
  ]
  return _joined(axis, [1] * len(thick), thick)


def _pad(e: Equation, *labels: Label) -> Result:
  """Constants around the rows of a batch stand at the places of others.

  So it undoes a cut, which is what the gradient of a cut does.
  """
  operand, value = labels
  value = lifted(value, len(e.outs[0]))
  if not isinstance(operand, Batched):
    return value
  axes, start = list(operand.axes), operand.start
  for a, (low, high, between) in enumerate(e.params['padding_config']):
    if (low, high, between) == (0, 0, 0):
      continue
    row_of_batch = (
      operand.is_of_one and not operand.rounds and value is None and not between
      and e.ins[0][a] == 1 and e.outs[0][a] == e.size and low == start
    )  # fmt: skip
    if not operand.axes[a] and not row_of_batch:
      continue
    digits = operand.axes[a] or (Digit(1, 1),)
    weight, left = divmod(digits[0].weight, between + 1)
    need(
      value is None and len(digits) == 1 and not left and min(low, high) >= 0,
      'pads the batch axis',
      'leave the batch as it is; padding counts as examples',
    )
    axes[a] = simplified([Digit(e.outs[0][a], weight)])
    start -= low * weight
    if row_of_batch:
      break
  found = Batched(tuple(axes), start, operand.rounds)
  return common(found, value)


def _at_a_place(operands: int) -> Rule:
  """Cuts, or writes an operand into another, at places that are computed."""

  def rule(e: Equation, *labels: Label) -> Result:
    need(
      not any(labels[operands:]), 'goes to a place that depends on the example'
    )
    label = common(*labels[:operands])
    part = e.outs[0] if operands == 1 else e.ins[1]
    need_other_axes(
      label,
      [a for a, size in enumerate(e.ins[0]) if part[a] != size],
      'cuts or writes the batch axis at a computed place',
      'use jax.vmap or jax.lax.map over the examples',
    )
    return label

  return rule


def _gather(e: Equation, operand: Label, indices: Label) -> Result:
  d, shape = e.params['dimension_numbers'], e.ins[0]
  rank = len(e.outs[0])
  of_indices = [i for i in range(rank) if i not in d.offset_dims]
  gone = (*d.collapsed_slice_dims, *d.operand_batching_dims)
  window = [i for i in range(len(shape)) if i not in gone]
  moves: dict[int, int | None] = dict(enumerate(of_indices))
  moves[len(e.ins[1]) - 1] = None
  out: list[Label] = []
  if isinstance(indices, Batched):
    what = 'takes an example for a coordinate'
    out.append(indices.placed(rank, moves, what, _LOOK_UP))
  if isinstance(operand, Batched):
    moves = {}
    for a in range(len(shape)):
      own = _own_row(e, a, d.start_index_map)
      moves[a] = None if own is None else of_indices[own]
    for a, to in zip(
      d.operand_batching_dims, d.start_indices_batching_dims, strict=True
    ):
      moves[a] = of_indices[to]
    for a, to in zip(window, d.offset_dims, strict=True):
      moves[a] = to if e.params['slice_sizes'][a] == shape[a] else None
    what = 'picks examples by a computed index'
    out.append(operand.placed(rank, moves, what, _LOOK_UP))
  return common(*out)


def _own_row(e: Equation, axis: int, index_map: Sequence[int]) -> int | None:
  """The axis of the indices along which one column is 0, 1, 2, ..."""
  columns = _labels.columns(e.facts[1], e.ins[1])
  column = tuple(index_map).index(axis) if axis in index_map else None
  found = columns.get(column) if column is not None else None
  if found is None or e.ins[1][found] != e.ins[0][axis]:
    return None
  return found


def _scatter(
  e: Equation, operand: Label, indices: Label, updates: Label
) -> Result:
  d, shape = e.params['dimension_numbers'], e.ins[0]
  gone = (*d.inserted_window_dims, *d.operand_batching_dims)
  window = [i for i in range(len(shape)) if i not in gone]
  of_indices = [
    i for i in range(len(e.ins[2])) if i not in d.update_window_dims
  ]
  # The axis of the operand that an axis of the indices goes along with.
  partner = dict(
    zip(d.scatter_indices_batching_dims, d.operand_batching_dims, strict=True)
  )
  for a in d.inserted_window_dims:
    own = _own_row(e, a, d.scatter_dims_to_operand_dims)
    if own is not None:
      partner[own] = a

  moves = {q: partner.get(q) for q in range(len(e.ins[1]))}
  what = 'writes of several examples to one place'
  out: list[Label] = [operand]
  if isinstance(indices, Batched):
    out.append(indices.placed(len(shape), moves, what, _LOOK_UP))
  if isinstance(updates, Batched):
    moves = {u: partner.get(q) for q, u in enumerate(of_indices)}
    for a, u in zip(window, d.update_window_dims, strict=True):
      moves[u] = a if e.ins[2][u] == shape[a] else None
    out.append(updates.placed(len(shape), moves, what, _LOOK_UP))
  return common(*out)


INDEXING: dict[str, Rule] = {
  'slice': _slice,
  'split': _split,
  'unstack': _unstack,
  'concatenate': _concatenate,
  'stack': _stack,
  'pad': _pad,
  'dynamic_slice': _at_a_place(1),
  'dynamic_update_slice': _at_a_place(2),
  'gather': _gather,
  **dict.fromkeys(
    (
      'scatter', 'scatter-add', 'scatter-sub', 'scatter-mul', 'scatter-min',
      'scatter-max',
    ),
    _scatter,
  ),
}  # fmt: skip
