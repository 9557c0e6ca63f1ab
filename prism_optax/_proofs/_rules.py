"""What each primitive does to the batch: one rule for each kind of them.

A rule gets an equation and the labels of its operands, of which at least one is
``Batched`` and none ``Mixed``. It returns the label of the result, or a list of
them, or refuses. A primitive without a rule is refused by who calls.
"""

from collections.abc import Callable, Iterable
from typing import TypeAlias

import jax
import jax.numpy as jnp

from prism_optax._proofs._labels import (
  Batched,
  Digit,
  Digits,
  Equation,
  Label,
  common,
  digits_of,
  need,
  regrouped,
  simplified,
)

Result: TypeAlias = Label | list[Label]
Rule: TypeAlias = Callable[..., Result]


def need_other_axes(
  label: Label, axes: Iterable[int | None], what: str, instead: str
) -> None:
  """Refuses a primitive that works along the batch."""
  assert isinstance(label, Batched)  # Of one operand, at least.
  need(not any(a is None or label.axes[a] for a in axes), what, instead)


def lifted(label: Label, ndim: int) -> Label:
  return label.lifted(ndim) if isinstance(label, Batched) else label


def _elementwise(e: Equation, *labels: Label) -> Result:
  """Entry by entry; numbers, and axes of size 1, go with every entry."""
  shape = e.outs[0]
  for operand in e.ins:
    fits = not operand or (
      len(operand) == len(shape)
      and all(x in (1, y) for x, y in zip(operand, shape, strict=True))
    )
    need(fits, 'is not entry by entry here')
  return common(*(lifted(x, len(shape)) for x in labels))


def _unchanged(e: Equation, *labels: Label) -> Result:
  return list(labels)


_REDUCE = 'average or add over the other axes of each example, and never divide'
_REDUCE += ' by a count of the batch; or give the loss of one example'


def _reduce(e: Equation, *labels: Label) -> Result:
  label, p = common(*labels), e.params
  axes = p['axes'] if 'axes' in p else p['dimensions']
  need_other_axes(label, axes, 'reduces over the batch axis', _REDUCE)
  assert label is not None
  return label.with_axes(x for a, x in enumerate(label.axes) if a not in axes)


def _along(name: str, default: int | None = None) -> Rule:
  """Works along the axes that a parameter names, and keeps the layout."""

  def rule(e: Equation, *labels: Label) -> Result:
    label, axes = common(*labels), e.params.get(name, default)
    axes = axes if isinstance(axes, tuple) else (axes,)
    what = 'works along the batch axis, so that an entry depends on others'
    need_other_axes(label, axes, what, 'use another axis, or jax.vmap')
    return label

  return rule


def _window(e: Equation, *labels: Label) -> Result:
  label, p = common(*labels), e.params
  assert label is not None
  names = (
    'window_dimensions', 'window_strides', 'window_dilation', 'base_dilation'
  )  # fmt: skip
  moved = [
    a
    for a in range(len(label.axes))
    if {p[n][a] for n in names if p.get(n) is not None} != {1}
    or tuple(p['padding'][a]) != (0, 0)
  ]
  what = 'slides a window along the batch axis'
  need_other_axes(label, moved, what, 'let the window be 1 along the batch')
  return label


def _transpose(e: Equation, label: Batched) -> Result:
  return label.with_axes(label.axes[a] for a in e.params['permutation'])


def _broadcast(e: Equation, label: Batched, *_: Label) -> Result:
  # An axis of size 1 has no digits.
  moves = dict(enumerate(e.params['broadcast_dimensions']))
  return label.placed(len(e.outs[0]), moves)


def _tile(e: Equation, label: Batched) -> Result:
  return label.with_axes(
    simplified((Digit(times, 0), *digits_of(digits, size)))
    for times, digits, size in zip(
      e.params['reps'], label.axes, e.ins[0], strict=True
    )
  )


def _reshape(e: Equation, label: Batched, *_: Label) -> Result:
  order = e.params.get('dimensions') or range(len(e.ins[0]))
  flat = [x for a in order for x in digits_of(label.axes[a], e.ins[0][a])]
  return label.with_axes(regrouped(flat, e.outs[0]))


def _dot(e: Equation, *labels: Label) -> Result:
  contracted, batched = e.params['dimension_numbers']
  free = [
    [a for a in range(len(e.ins[k])) if a not in (*contracted[k], *batched[k])]
    for k in (0, 1)
  ]
  out: list[Label] = []
  for k, label in enumerate(labels):
    if isinstance(label, Batched):
      need_other_axes(
        label,
        contracted[k],
        'sums over the batch axis',
        "keep it: 'bd,bd->b', and no product that leaves 'b' out of its result",
      )
      front = [label.axes[a] for a in batched[k]]
      own = [label.axes[a] for a in free[k]]
      other: list[Digits] = [()] * len(free[1 - k])
      last = other + own if k else own + other
      out.append(label.with_axes(front + last))
  return common(*out)


def _convolution(e: Equation, lhs: Label, rhs: Label) -> Result:
  """Groups of channels, or of the batch, are major parts of an axis."""
  p = e.params
  lhs_spec, rhs_spec, out_spec = p['dimension_numbers']
  channels = e.outs[0][out_spec[1]]
  out: list[Label] = []
  what, instead = 'mixes examples as channels or places', 'let batch be axis 0'

  def placed(label: Batched, rows: Digits, features: Digits) -> Batched:
    axes: list[Digits] = [()] * len(e.outs[0])
    axes[out_spec[0]], axes[out_spec[1]] = rows, features
    return label.with_axes(axes)

  def halves(label: Batched, axis: int, groups: int) -> list[Digits]:
    """The digits of the number of the group, and of the place in it."""
    size = e.ins[0][axis]
    digits = digits_of(label.axes[axis], size)
    return regrouped(digits, (groups, size // groups))

  def of_groups(digits: Digits, groups: int) -> Digits:
    within = Digit(channels // groups, 0)
    return simplified((*digits_of(digits, groups), within))

  if isinstance(lhs, Batched):
    need_other_axes(lhs, lhs_spec[2:], 'slides along the batch axis', instead)
    groups = p['feature_group_count']
    features, rest = halves(lhs, lhs_spec[1], groups)
    need(not rest, what, instead)
    parts = p['batch_group_count']
    part, rows = halves(lhs, lhs_spec[0], parts)
    need(not (part and features), what, instead)
    if part:
      features = of_groups(part, parts)
    elif features:
      features = of_groups(features, groups)
    out.append(placed(lhs, rows, features))
  if isinstance(rhs, Batched):
    need_other_axes(rhs, rhs_spec[1:], what, instead)
    out.append(placed(rhs, (), rhs.axes[rhs_spec[0]]))
  return common(*out)


def _apart(count: int, e: Equation, *labels: Label) -> Result:
  """Works on the axes after some leading ones, for each of these alone."""
  fronts = {x[:count] for x in (*e.ins, *e.outs)}
  need(len(fronts) == 1, 'has operands with different leading axes')
  found: list[Label] = []
  for label in labels:
    if isinstance(label, Batched):
      need(
        not any(label.axes[count:]),
        'works along the batch axis',
        'let the batch be the first axis',
      )
      found.append(label.with_axes(label.axes[:count]))
  return [lifted(common(*found), len(shape)) for shape in e.outs]


def _without_last(axes: Callable[[Equation], int]) -> Rule:
  """Works on so many of the last axes of its largest operand."""

  def rule(e: Equation, *labels: Label) -> Result:
    return _apart(max(map(len, e.ins)) - axes(e), e, *labels)

  return rule


def _bitcast(e: Equation, *labels: Label) -> Result:
  return _apart(min(len(e.ins[0]), len(e.outs[0])), e, *labels)


def _per_key(e: Equation, *labels: Label) -> Result:
  """Generators: only Threefry draws for each key from that key alone."""
  threefry = jax.eval_shape(
    lambda: jax.random.key(0, impl='threefry2x32')
  ).dtype
  keys = [
    x
    for x in e.types
    if x is not None and jnp.issubdtype(x, jax.dtypes.prng_key)
  ]
  need(
    all(x == threefry for x in keys),
    'draws for all keys of a batch at once, from a generator that is not'
    ' threefry2x32',
    "make the keys of examples with jax.random.key(..., impl='threefry2x32')",
  )
  if e.name == 'random_fold_in':
    return _elementwise(e, *labels)
  return _apart(min(len(x) for x in (*e.ins, *e.outs)), e, *labels)


_RULES: dict[str, Rule] = {
  """abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e
  bessel_i1e cbrt ceil clamp clz complex conj convert_element_type copy copy_p
  cos cosh digamma div eq eq_to erf erf_inv erfc exp exp2 expm1 floor ge gt
  igamma igamma_grad_a igammac imag integer_pow is_finite layout_constraint le
  le_to lgamma log log1p logistic lt lt_to max mesh_cast min mul mulhi name ne
  neg nextafter not or polygamma population_count pow pvary real
  reduce_precision regularized_incomplete_beta rem reshard round rsqrt
  select_n shift_left shift_right_arithmetic shift_right_logical
  sharding_constraint sign sin sinh sqrt square stop_gradient sub tan tanh
  threefry2x32 xor zeros_like zeta""": _elementwise,
  'optimization_barrier device_put': _unchanged,
  """reduce_sum reduce_prod reduce_max reduce_min reduce_and reduce_or
  reduce_xor argmax argmin reduce squeeze""": _reduce,
  'cumsum cumprod cummax cummin cumlogsumexp': _along('axis'),
  'top_k': _along('axis', -1),
  'sort': _along('dimension'),
  'rev': _along('dimensions'),
  """reduce_window reduce_window_sum reduce_window_max reduce_window_min
  select_and_scatter_add select_and_gather_add""": _window,
  'transpose': _transpose,
  'broadcast_in_dim': _broadcast,
  'tile': _tile,
  'reshape': _reshape,
  'dot_general': _dot,
  'conv_general_dilated': _convolution,
  """random_bits random_split random_seed random_wrap random_unwrap
  random_clone random_fold_in random_gamma""": _per_key,
  'bitcast_convert_type': _bitcast,
  """cholesky cholesky_update lu qr geqrf geqp3 householder_product ormqr
  triangular_solve tridiagonal_solve eigh svd symmetric_product""":
    _without_last(lambda e: 2),
  'lu_pivots_to_permutation': _without_last(lambda e: 1),
  'fft': _without_last(lambda e: len(e.params['fft_lengths'])),
}  # fmt: skip

RULES = {name: rule for names, rule in _RULES.items() for name in names.split()}
