"""Rules for what cuts, joins, and looks up: slices, gathers, scatters."""

from collections.abc import Sequence

from prism_optax._proofs import _facts
from prism_optax._proofs._labels import (
  Batched,
  Digit,
  Digits,
  Label,
  common,
  need,
  simplified,
)
from prism_optax._proofs._rules import (
  Equation,
  Result,
  Rule,
  lifted,
  need_other_axes,
)

_LOOK_UP = 'jnp.take_along_axis(x, index, 1), or jax.vmap over the examples'


def _cut(
  label: Batched, axis: int, first: int, size: int, step: int = 1
) -> Batched:
  """Some of the rows of an axis."""
  digits = label.axes[axis]
  need(
    len(digits) == 1,
    'cuts the batch axis where tokens and examples share it',
    'reshape to (batch, tokens, ...) first',
  )
  weight = digits[0].weight
  axes: list[Digits] = list(label.axes)
  axes[axis] = simplified([Digit(size, weight * step)])
  return Batched(tuple(axes), label.start + first * weight, label.rounds)


def _slice(e: Equation, label: Batched) -> Result:
  p, shape = e.params, e.outs[0]
  for a, first in enumerate(p['start_indices']):
    if label.axes[a] and shape[a] != e.ins[0][a]:
      step = 1 if p['strides'] is None else p['strides'][a]
      label = _cut(label, a, first, shape[a], step)
  return label


def _split(e: Equation, label: Batched) -> Result:
  axis, sizes = e.params['axis'], [int(x) for x in e.params['sizes']]
  if not label.axes[axis]:
    return label
  starts = [sum(sizes[:k]) for k in range(len(sizes))]
  return [_cut(label, axis, *x) for x in zip(starts, sizes, strict=True)]


def _unstack(e: Equation, label: Batched) -> Result:
  axis, count = e.params['axis'], e.ins[0][e.params['axis']]
  rows = [
    _cut(label, axis, k, 1) if label.axes[axis] else label for k in range(count)
  ]
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
  (weight,) = weights if len(weights) == 1 else {0}
  start = parts[0].start
  for size, part in zip(sizes, parts, strict=True):
    other = (*part.axes[:axis], *part.axes[axis + 1 :]), part.rounds
    need(
      weight > 0
      and other
      == ((*parts[0].axes[:axis], *parts[0].axes[axis + 1 :]), parts[0].rounds)
      and part.axes[axis] == simplified([Digit(size, weight)])
      and part.start == start,
      shift,
      instead,
    )
    start += size * weight
  axes: list[Digits] = list(parts[0].axes)
  axes[axis] = simplified([Digit(sum(sizes), weight)])
  return Batched(tuple(axes), parts[0].start, parts[0].rounds)


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
      operand.is_of_one and not operand.rounds and value is None
      and e.ins[0][a] == 1 and e.outs[0][a] == e.size and low == start
    )  # fmt: skip
    if not operand.axes[a] and not row_of_batch:
      continue
    digits = operand.axes[a] or (Digit(1, 1 + between),)
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


def _dynamic_slice(e: Equation, label: Label, *indices: Label) -> Result:
  need(not any(indices), 'cuts at a place that depends on the example')
  need_other_axes(
    label,
    [a for a, size in enumerate(e.ins[0]) if e.outs[0][a] != size],
    'cuts out of the batch axis at a computed place',
    'use jax.vmap or jax.lax.map over the examples',
  )
  return label


def _dynamic_update_slice(
  e: Equation, operand: Label, update: Label, *indices: Label
) -> Result:
  need(not any(indices), 'writes to a place that depends on the example')
  label = common(operand, update)
  need_other_axes(
    label,
    [a for a, size in enumerate(e.ins[0]) if e.ins[1][a] != size],
    'writes into the batch axis at a computed place',
    'use jax.vmap or jax.lax.map over the examples',
  )
  return label


def _gather(e: Equation, operand: Label, indices: Label) -> Result:
  d, sizes = e.params['dimension_numbers'], e.params['slice_sizes']
  of_indices = [i for i in range(len(e.outs[0])) if i not in d.offset_dims]
  gone = (*d.collapsed_slice_dims, *d.operand_batching_dims)
  window = [i for i in range(len(e.ins[0])) if i not in gone]

  def placed(label: Batched, moves: dict[int, int]) -> Batched:
    axes: list[Digits] = [()] * len(e.outs[0])
    for a, digits in enumerate(label.axes):
      if digits:
        axes[moves[a]] = digits
    return label.with_axes(axes)

  out: list[Label] = []
  if isinstance(indices, Batched):
    last = len(e.ins[1]) - 1
    need_other_axes(
      indices, [last], 'takes an example for a coordinate', _LOOK_UP
    )
    out.append(placed(indices, dict(enumerate(of_indices))))
  if isinstance(operand, Batched):
    moves = {}
    for a, digits in enumerate(operand.axes):
      if not digits:
        continue
      if a in d.operand_batching_dims:
        k = d.operand_batching_dims.index(a)
        moves[a] = of_indices[d.start_indices_batching_dims[k]]
      elif a in window:
        whole = sizes[a] == e.ins[0][a]
        need(whole, 'picks out of the batch axis', _LOOK_UP)
        moves[a] = d.offset_dims[window.index(a)]
      else:
        own = _own_row(e, a, d.start_index_map)
        need(own is not None, 'picks examples by a computed index', _LOOK_UP)
        assert own is not None
        moves[a] = of_indices[own]
    out.append(placed(operand, moves))
  return common(*out)


def _own_row(e: Equation, axis: int, index_map: Sequence[int]) -> int | None:
  """The axis of the indices along which one column is 0, 1, 2, ..."""
  columns = _facts.columns(e.facts[1], e.ins[1])
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

  def placed(label: Batched, moves: dict[int, int | None]) -> Batched:
    axes: list[Digits] = [()] * len(shape)
    for a, digits in enumerate(label.axes):
      if digits:
        to = moves[a]
        need(
          to is not None, 'writes of several examples to one place', _LOOK_UP
        )
        assert to is not None
        axes[to] = digits
    return label.with_axes(axes)

  out: list[Label] = [operand]
  if isinstance(indices, Batched):
    moves = {q: partner.get(q) for q in range(len(e.ins[1]))}
    out.append(placed(indices, moves))
  if isinstance(updates, Batched):
    moves = {u: partner.get(q) for q, u in enumerate(of_indices)}
    for k, u in enumerate(d.update_window_dims):
      whole = e.ins[2][u] == shape[window[k]]
      moves[u] = window[k] if whole else None
    out.append(placed(updates, moves))
  return common(*out)


INDEXING: dict[str, Rule] = {
  'slice': _slice,
  'split': _split,
  'unstack': _unstack,
  'concatenate': _concatenate,
  'stack': _stack,
  'pad': _pad,
  'dynamic_slice': _dynamic_slice,
  'dynamic_update_slice': _dynamic_update_slice,
  'gather': _gather,
  **dict.fromkeys(
    (
      'scatter', 'scatter-add', 'scatter-sub', 'scatter-mul', 'scatter-min',
      'scatter-max',
    ),
    _scatter,
  ),
}  # fmt: skip
