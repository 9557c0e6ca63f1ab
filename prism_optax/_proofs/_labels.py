"""Which entry of an array is of which example, and what its values are.

The index along an axis is written in digits, the major one first, as in
``(o * B + i) * k + t``. Each digit has a size and a weight, and the example of
an entry is ``start`` plus the sum of its digits times their weights. So a label
says in which order the examples of a batch lie along which axes; it survives
reshapes, transposes, and cutting the batch and joining it again.

Of arrays that depend on no example the values matter: ``x[jnp.arange(B), y]``
picks row i for example i because of the values of ``jnp.arange(B)``, and an
array that a function closes over may be data.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from jax.extend import core


class Digit(NamedTuple):
  """One digit of an index; a weight of 0 says nothing of the example."""

  size: int
  weight: int


# Of one axis, major first. None at all where the axis says nothing.
Digits: TypeAlias = tuple[Digit, ...]


@dataclasses.dataclass(frozen=True)
class Batched:
  """Every entry depends on one example, and this says on which.

  Attributes:
    axes: The digits of each axis.
    start: The example where all digits are 0.
    rounds: In the body of a scan over examples, ``(depth, digits)``: the number
      of the round has these digits, and they count like digits of an axis.
  """

  axes: tuple[Digits, ...]
  start: int = 0
  rounds: tuple[tuple[int, Digits], ...] = ()

  @property
  def is_of_one(self) -> bool:
    """Whether all entries are of the same example."""
    return not any(self.axes)

  def with_axes(self, axes: Iterable[Digits]) -> 'Batched':
    return dataclasses.replace(self, axes=tuple(axes))

  def lifted(self, ndim: int) -> 'Batched':
    """With so many axes, the new ones last."""
    return self.with_axes((*self.axes, *((),) * (ndim - len(self.axes))))

  def with_axis(self, axis: int, digits: Digits, start: int) -> 'Batched':
    """With other rows along an axis."""
    axes = (*self.axes[:axis], digits, *self.axes[axis + 1 :])
    return Batched(axes, start, self.rounds)

  def placed(
    self,
    ndim: int,
    moves: Mapping[int, int | None],
    what: str = '',
    instead: str = '',
  ) -> 'Batched':
    """With ``ndim`` axes, the old ones at other places.

    Args:
      ndim: How many axes.
      moves: From the axes of the batch to their places; None refuses.
      what: Why it refuses, see :func:`need`.
      instead: What to write instead.
    """
    axes: list[Digits] = [()] * ndim
    for a, digits in enumerate(self.axes):
      to = moves[a] if digits else None
      need(not digits or to is not None, what, instead)
      if to is not None:
        axes[to] = digits
    return self.with_axes(axes)


@dataclasses.dataclass(frozen=True)
class Mixed:
  """Some entry may depend on several examples.

  Attributes:
    offence: The equation, why, and what to write instead.
  """

  offence: str


Label: TypeAlias = Batched | Mixed | None  # None depends on no example.


class RefusedError(Exception):
  """An equation for which independence does not hold or is not known."""


VMAP = 'give the loss of one example and let jax.vmap make the batch'


def need(fits: bool, what: str, instead: str = VMAP) -> None:
  """Refuses an equation that does not fit.

  Args:
    fits: Whether it fits.
    what: A verb and the rest of a sentence: what the primitive does.
    instead: What to write instead.
  """
  if not fits:
    raise RefusedError(f'{what}. Instead: {instead}')


def whole(size: int, ndim: int) -> Batched:
  """The label of an array (B, ...) with one example in each row."""
  return Batched(((Digit(size, 1),),)).lifted(ndim)


def _merged(digits: Iterable[Digit]) -> list[Digit]:
  """The same digits, as few as possible."""
  out: list[Digit] = []
  for digit in digits:
    last = out[-1] if out else None
    if digit.size == 1:
      continue
    if last is not None and last.weight == digit.weight * digit.size:
      out[-1] = Digit(last.size * digit.size, digit.weight)
    else:
      out.append(digit)
  return out


def simplified(digits: Iterable[Digit]) -> Digits:
  """The one way to write the digits of an axis."""
  out = _merged(digits)
  return tuple(out) if any(x.weight for x in out) else ()


def digits_of(digits: Digits, size: int) -> Digits:
  """The digits of an axis of a known size, those without weight as well."""
  return digits or (Digit(size, 0),)


def regrouped(digits: Iterable[Digit], sizes: Sequence[int]) -> list[Digits]:
  """Distributes digits to axes of other sizes, as a reshape does.

  Raises:
    RefusedError: If an axis would end inside of a digit.
  """
  rest = _merged(digits)[::-1]
  out = []
  for size in sizes:
    own: list[Digit] = []
    while size > 1:
      digit = rest.pop()
      if size % digit.size == 0:
        size //= digit.size
        own.append(digit)
        continue
      need(
        digit.size % size == 0,
        'cuts the batch axis at a place that is no border of examples',
        'keep the batch axis in front: x.reshape(batch, -1)',
      )
      minor = digit.size // size
      own.append(Digit(size, digit.weight * minor))
      rest.append(Digit(minor, digit.weight))
      size = 1
    out.append(simplified(own))
  return out


def common(*labels: Label) -> Batched | None:
  """The one label of all operands that have a batch.

  Raises:
    RefusedError: If they have different ones.
  """
  found = [x for x in labels if isinstance(x, Batched)]
  for other in found[1:]:
    if other == found[0]:
      continue
    need(
      other.rounds == found[0].rounds,
      'combines the example of one round of a loop with others',
    )
    need(
      other.axes != found[0].axes,
      'combines different rows of the batch',
      'combine entries of the same example only; no roll, no shift, no first'
      ' row for all',
    )
    raise RefusedError(
      'combines every example with others: the batch lies along another axis'
      ' of one operand than of the other. Instead: put the batch axis at the'
      ' same place in both; scores of examples against each other (in-batch'
      ' negatives) have no gradient per example'
    )
  return found[0] if found else None


def join(one: Label, other: Label) -> Label:
  """The label of a value that is one of two, as after a branch."""
  for x in (one, other):
    if isinstance(x, Mixed):
      return x
  if one is None or other is None or one == other:
    return other if one is None else one
  return Mixed(
    'branches or rounds of a loop leave the batch along different axes.'
    f' Instead: {VMAP}'
  )


def check_shape(label: Label, shape: Sequence[int]) -> None:
  """Refuses a label that does not fit the array: then a rule is wrong."""
  if not isinstance(label, Batched):
    return
  need(len(label.axes) == len(shape), 'has another rank than expected')
  for digits, size in zip(label.axes, shape, strict=True):
    fits = not digits or math.prod(x.size for x in digits) == size
    need(fits, 'has a batch axis of an unexpected size')


class Position(NamedTuple):
  """Integers that are equal to their index along an axis."""

  axis: int


class Columns(NamedTuple):
  """Some columns of the last axis are positions: ``(column, axis)`` each."""

  pairs: tuple[tuple[int, int], ...]


class Never(NamedTuple):
  """False everywhere."""


class Closed(NamedTuple):
  """Of an array that was closed over and has B rows.

  Attributes:
    layout: Where these rows are, as if each were of one example.
    name: Type and shape of the array.
  """

  layout: Batched
  name: str


Fact: TypeAlias = Position | Columns | Never | Closed | None

_WIDE = ('int32', 'int64', 'uint32', 'uint64')


class Equation:
  """What a rule looks at.

  Attributes:
    name: Of the primitive.
    params: Of the primitive.
    size: B, the number of examples.
    ins: Shapes of the operands.
    outs: Shapes of the results.
    types: Types of operands and results.
    facts: What is known of the values of the operands.
  """

  def __init__(
    self, eqn: core.JaxprEqn, size: int, facts: Sequence[Fact]
  ) -> None:
    self.name, self.params, self.size = eqn.primitive.name, eqn.params, size
    self.ins = [shape_of(x) for x in eqn.invars]
    self.outs = [shape_of(x) for x in eqn.outvars]
    self.types = [
      getattr(x.aval, 'dtype', None) for x in (*eqn.invars, *eqn.outvars)
    ]
    self.facts = facts
    self._invars = eqn.invars

  def is_zero(self, operand: int) -> bool:
    """Whether an operand is written into the program as a 0."""
    x = self._invars[operand]
    return isinstance(x, core.Literal) and bool(np.all(x.val == 0))


def shape_of(variable: core.Var | core.Literal) -> tuple[int, ...]:
  return tuple(getattr(variable.aval, 'shape', ()))


def columns(fact: Fact, shape: Sequence[int]) -> dict[int, int]:
  """From columns of an array of indices to the axes that they count."""
  last = len(shape) - 1
  if isinstance(fact, Position) and shape[-1:] == (1,) and fact.axis < last:
    return {0: fact.axis}
  return dict(fact.pairs) if isinstance(fact, Columns) else {}


def fact_of(e: Equation) -> Fact:
  """What is known of the result, from what is known of the operands."""
  first, shape = next(iter(e.facts), None), e.outs[0]
  wide = str(e.types[-1]) in _WIDE
  if e.name == 'iota':
    return Position(e.params['dimension']) if wide else None
  if e.name == 'select_n' and isinstance(first, Never):
    return e.facts[1]
  if e.name == 'concatenate' and e.params['dimension'] == len(shape) - 1:
    pairs, start = [], 0
    for fact, operand in zip(e.facts, e.ins, strict=True):
      counted = columns(fact, operand)
      pairs += [(start + column, axis) for column, axis in counted.items()]
      start += operand[-1]
    return Columns(tuple(pairs)) if pairs else None
  if not isinstance(first, Position):
    return None
  if e.name == 'lt' and e.is_zero(1):
    return Never()
  if e.name == 'convert_element_type' and wide:
    return first
  if e.name == 'broadcast_in_dim':
    axis = e.params['broadcast_dimensions'][first.axis]
    return Position(axis) if shape[axis] == e.ins[0][first.axis] else None
  if e.name == 'reshape':
    return _reshaped(first, e.ins[0], shape)
  return None


def _reshaped(
  fact: Position, before: Sequence[int], after: Sequence[int]
) -> Fact:
  count = Digit(before[fact.axis], 1)
  digits = [
    count if a == fact.axis else Digit(size, 0) for a, size in enumerate(before)
  ]
  try:
    axes = regrouped(digits, after)
  except RefusedError:
    return None
  return Position(axes.index((count,))) if (count,) in axes else None
