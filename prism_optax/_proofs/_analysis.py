"""Follows a batch through the equations of a program, loops and calls too."""

import collections
import functools
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from jax.extend import core

from prism_optax._proofs import _equations, _labels
from prism_optax._proofs._equations import CALLS, Program, line_of, parted
from prism_optax._proofs._indexing import INDEXING
from prism_optax._proofs._labels import (
  VMAP,
  Batched,
  Closed,
  Equation,
  Fact,
  Label,
  Mixed,
  RefusedError,
  check_shape,
  join,
  need,
  shape_of,
  whole,
)
from prism_optax._proofs._rules import RULES, lifted

# The primitives that JAX itself has defined. Rules go by name, and anybody can
# give a primitive of theirs the name ``add``: the object has to be JAX's own.
PRIMITIVES = frozenset(
  value
  for name, module in tuple(sys.modules.items())
  if name.startswith('jax._src.')
  for value in tuple(vars(module).values())
  if isinstance(value, core.Primitive)
)

# Their results depend on their operands alone, and there is no rule for how.
# All that is neither here nor in a rule might remember an earlier call
# (callbacks, memory), and bring a batch in although no operand has one.
FUNCTIONS = frozenset(
  (
    'iota', 'iota_2x32_shape', 'rng_bit_generator', 'rng_uniform', 'empty',
    'empty2', 'platform_index', 'eig', 'schur', 'hessenberg', 'tridiagonal',
    'approx_top_k', 'ragged_dot_general', 'select_and_scatter', 'scaled_dot',
    'to_edtype', 'from_edtype',
  )
)  # fmt: skip

_ALL_RULES = RULES | INDEXING
# What a rule raises at parameters of another version of JAX.
_NOT_UNDERSTOOD = LookupError, AttributeError, TypeError, ValueError


class Value(NamedTuple):
  """What is known of a variable."""

  label: Label = None
  fact: Fact = None


class Analysis:
  """Labels the variables of a program for a batch of ``size`` examples."""

  def __init__(self, size: int) -> None:
    self.size = size
    self.counts: collections.Counter[str] = collections.Counter()
    self.waits: dict[str, None] = {}  # Loops that end by what examples hold.
    self.derivatives: dict[str, None] = {}
    self.closed: dict[str, None] = {}
    self._known: dict[tuple[int, tuple[Value, ...]], list[Value]] = {}
    self._counted: set[int] = set()
    self._depth = 0
    self._where = 'an unknown line'

  def run(self, program: Program, values: Sequence[Value]) -> list[Value]:
    """The values of a jaxpr's results, from those of its arguments."""
    jaxpr = _equations.opened(program)
    key = id(jaxpr), tuple(values)
    if key in self._known:
      return self._known[key]
    if id(jaxpr) not in self._counted:
      self._counted.add(id(jaxpr))
      self.counts.update(x.primitive.name for x in jaxpr.eqns)
    out = _equations.run(jaxpr, values, self._closed, self._equation)
    if not any(isinstance(x.label, Mixed) for x in out):  # It names a line.
      self._known[key] = out
    return out

  def _closed(self, aval: object) -> Value:
    shape = tuple(getattr(aval, 'shape', ()))
    if shape[:1] != (self.size,):
      return Value()
    name = str(aval)
    self.closed[name] = None
    return Value(None, Closed(whole(self.size, len(shape)), name))

  def _equation(self, eqn: core.JaxprEqn, values: list[Value]) -> list[Value]:
    # What a library traced once has no line of its own, but its caller's.
    outside, why = self._where, ''
    self._where = line_of(eqn) or outside
    try:
      found = self._results(eqn, values)
      for value, variable in zip(found, eqn.outvars, strict=True):
        check_shape(value.label, shape_of(variable))
    except RefusedError as refused:
      why = str(refused)
    except _NOT_UNDERSTOOD as error:  # Not known, hence not proved.
      why = f'is not understood ({error!r}). Instead: {VMAP}'
    if why:
      offence = Mixed(f'{eqn.primitive.name} at {self._where} {why}')
      found = [Value(offence)] * len(eqn.outvars)
    self._where = outside
    return found

  def _results(self, eqn: core.JaxprEqn, values: list[Value]) -> list[Value]:
    name = eqn.primitive.name
    need(
      eqn.primitive in PRIMITIVES,
      'is an unknown primitive',
      'write it with operations of jax.numpy and jax.lax',
    )
    if name in CALLS:
      if name in ('custom_jvp_call', 'custom_vjp_call'):
        called = f'{eqn.params.get("name", name)} ({self._where})'
        self.derivatives[called] = None
      return self.run(eqn.params[CALLS[name]], values)
    ends = (*eqn.invars, *eqn.outvars)
    pure = (
      'use operations of jax.numpy and jax.lax, which only return values; to'
      ' split a batch over devices, make_private takes'
      ' Execution(batch_sharding=...)'
    )
    refs = any('Ref' in type(x.aval).__name__ for x in ends)
    need(not refs, 'has memory that is written to', pure)
    if name in _LOOPS:
      return _LOOPS[name](self, eqn, values)
    if not eqn.outvars:
      return []
    need(not eqn.effects, 'does more than return a value', pure)
    if name == 'custom_linear_solve':
      lengths = eqn.params['const_lengths']
      _, _, consts, _, given = parted(values, *lengths)
      return self.run(eqn.params['jaxprs'].solve, consts + given)
    known = name in _ALL_RULES or name in FUNCTIONS
    need(known, 'is not known to be a function of its operands', pure)
    e = Equation(eqn, self.size, [x.fact for x in values])
    out = _labels_of(e, [x.label for x in values])
    facts = self._facts_of(e, out)
    return [Value(*x) for x in zip(out, facts, strict=True)]

  def _facts_of(self, e: Equation, out: list[Label]) -> list[Fact]:
    """Facts of the results.

    Raises:
      RefusedError: If rows that were closed over meet those of the batch.
    """
    closed = [x.layout if isinstance(x, Closed) else None for x in e.facts]
    if not any(closed):
      return [_labels.fact_of(e)] if len(out) == 1 else [None] * len(out)
    try:
      layouts = _labels_of(e, closed)
    except (RefusedError, *_NOT_UNDERSTOOD):
      layouts = [None] * len(out)
    name = next(x.name for x in e.facts if isinstance(x, Closed))
    facts: list[Fact] = []
    for label, layout in zip(out, layouts, strict=True):
      rows = layout if isinstance(layout, Batched) else None
      if rows is not None and isinstance(label, Batched):
        need(
          not _meet(rows, label),
          f'brings a closed-over array {name} together with the batch, row by'
          ' row: it may be data of the examples, which belong to the batch',
          'make it an argument with a batch axis (in_axes 0), or an argument'
          ' that is the same for all (in_axes None)',
        )
      facts.append(None if rows is None else Closed(rows, name))
    return facts

  def _cond(self, eqn: core.JaxprEqn, values: list[Value]) -> list[Value]:
    predicate = values[0].label
    self._note_wait('cond', predicate)
    branches = [self.run(x, values[1:]) for x in eqn.params['branches']]
    labels = (
      functools.reduce(join, (x.label for x in outs))
      for outs in zip(*branches, strict=True)
    )
    return _governed(eqn, labels, predicate)

  def _while(self, eqn: core.JaxprEqn, values: list[Value]) -> list[Value]:
    p = eqn.params
    consts, more, carry = parted(values, p['cond_nconsts'], p['body_nconsts'])

    def once(carry: list[Value]) -> tuple[list[Value], Label]:
      ((predicate, _),) = self.run(p['cond_jaxpr'], consts + carry)
      body = self.run(p['body_jaxpr'], more + carry)
      # With a predicate for each example, which are the leading axes, a row
      # stays as it is where its predicate is False.
      labels = (
        join(a.label, b.label) for a, b in zip(carry, body, strict=True)
      )
      return _governed(eqn, labels, predicate), predicate

    carry, predicate = _equations.settled([Value(x.label) for x in carry], once)
    self._note_wait('while', predicate)
    return carry

  def _note_wait(self, name: str, predicate: Label) -> None:
    if predicate is not None:
      self.waits[f'{name} at {self._where}'] = None

  def _scan(self, eqn: core.JaxprEqn, values: list[Value]) -> list[Value]:
    p = eqn.params
    consts, carry, items = parted(values, p['num_consts'], p['num_carry'])
    self._depth += 1
    depth = self._depth
    rows = [_entered(x, depth) for x in items]

    def once(carry: list[Value]) -> tuple[list[Value], list[Value]]:
      out = self.run(p['jaxpr'], consts + carry + rows)
      after, stacked = parted(out, len(carry))
      return [
        Value(join(a.label, self._carried(b.label, depth)))
        for a, b in zip(carry, after, strict=True)
      ], stacked

    carry, stacked = _equations.settled([Value(x.label) for x in carry], once)
    self._depth -= 1
    return carry + [Value(_left(x.label, depth)) for x in stacked]

  def _carried(self, label: Label, depth: int) -> Label:
    if isinstance(label, Batched) and depth in dict(label.rounds):
      return Mixed(
        f'scan at {self._where} carries from one example to the next. Instead:'
        f' let the loop go along another axis; {VMAP}'
      )
    return label


_LOOPS: dict[
  str, Callable[[Analysis, core.JaxprEqn, list[Value]], list[Value]]
] = {
  'cond': Analysis._cond,
  'while': Analysis._while,
  'scan': Analysis._scan,
}


def _labels_of(e: Equation, labels: Sequence[Label]) -> list[Label]:
  """The labels of an equation's results."""
  batched: list[Batched] = []
  for label in labels:
    if isinstance(label, Mixed):
      return [label] * len(e.outs)
    if label is not None:
      batched.append(label)
  if not batched:
    return [None] * len(e.outs)
  owners = {(x.start, x.rounds) for x in batched}
  if all(x.is_of_one for x in batched) and len(owners) == 1 and e.name != 'pad':
    # All of one example: whatever is computed of it is of that example.
    return [batched[0].with_axes([()] * len(shape)) for shape in e.outs]
  need(
    e.name in _ALL_RULES,
    'is not known to keep examples apart',
    f'write it with operations of jax.numpy, or {VMAP}',
  )
  if all(0 in shape for shape in e.outs):
    return [None] * len(e.outs)  # No entries, and nothing to depend on.
  found = _ALL_RULES[e.name](e, *labels)
  return found if isinstance(found, list) else [found] * len(e.outs)


def _governed(
  eqn: core.JaxprEqn, labels: Iterable[Label], predicate: Label
) -> list[Value]:
  """Results that a predicate of the leading axes has chosen."""
  return [
    Value(join(lifted(predicate, len(shape_of(variable))), label))
    for label, variable in zip(labels, eqn.outvars, strict=True)
  ]


def _meet(one: Batched, other: Batched) -> bool:
  """Whether both have rows along the same axis or the same loop."""
  pairs = zip(one.axes, other.axes, strict=True)
  return any(a and b for a, b in pairs) or bool(
    dict(one.rounds).keys() & dict(other.rounds).keys()
  )


def _entered(value: Value, depth: int) -> Value:
  """A scanned value as the body of the scan gets it."""

  def row(label: Batched) -> Batched:
    own = ((depth, label.axes[0]),) if label.axes[0] else ()
    return Batched(label.axes[1:], label.start, label.rounds + own)

  label, fact = value
  if isinstance(label, Batched):
    label = row(label)
  if isinstance(fact, Closed):
    return Value(label, Closed(row(fact.layout), fact.name))
  return Value(label)


def _left(label: Label, depth: int) -> Label:
  """What the rounds of a scan return, as the scan returns it."""
  if not isinstance(label, Batched):
    return label
  front = dict(label.rounds).get(depth, ())
  rounds = tuple(x for x in label.rounds if x[0] != depth)
  return Batched((front, *label.axes), label.start, rounds)
