"""What is known of the values of arrays that depend on no example.

``x[jnp.arange(B), y]`` picks row i for example i because of the values of
``jnp.arange(B)``. And an array that a function closes over may be data.
"""

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from jax.extend import core

from prism_optax._proofs._labels import (
  Batched,
  Digit,
  RefusedError,
  regrouped,
)


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
    return e.facts[1] if e.ins[1] == shape else None
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
