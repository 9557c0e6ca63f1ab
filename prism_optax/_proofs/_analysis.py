"""Follows a batch through the equations of a program, loops and calls too."""

import collections
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jax.extend import core

from prism_optax._proofs import _facts, _known
from prism_optax._proofs._equations import CALLS, line_of
from prism_optax._proofs._facts import Closed, Fact
from prism_optax._proofs._indexing import INDEXING
from prism_optax._proofs._labels import (
  VMAP,
  Batched,
  Label,
  Mixed,
  RefusedError,
  check_shape,
  join,
  need,
  whole,
)
from prism_optax._proofs._rules import RULES, Equation, lifted, shape_of

_ALL_RULES = RULES | INDEXING


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
    self._known: dict[Any, list[Value]] = {}
    self._counted: set[int] = set()
    self._depth = 0
    self._where = 'an unknown line'

  def run(self, program: Any, values: Sequence[Value]) -> list[Value]:
    """The values of a jaxpr's results, from those of its arguments."""
    jaxpr = getattr(program, 'jaxpr', program)
    key = id(jaxpr), tuple(values)
    if key in self._known:
      return self._known[key]
    env: dict[Any, Value] = dict(zip(jaxpr.invars, values, strict=True))
    env |= {x: self._closed(x.aval) for x in jaxpr.constvars}

    def read(atom: Any) -> Value:
      if isinstance(atom, core.Literal):
        return self._closed(atom.aval)
      return env[atom]

    for eqn in jaxpr.eqns:
      if id(jaxpr) not in self._counted:
        self.counts[eqn.primitive.name] += 1
      found = self._equation(eqn, [read(x) for x in eqn.invars])
      env.update(zip(eqn.outvars, found, strict=True))
    self._counted.add(id(jaxpr))
    out = [read(x) for x in jaxpr.outvars]
    if not any(isinstance(x.label, Mixed) for x in out):  # It names a line.
      self._known[key] = out
    return out

  def _closed(self, aval: Any) -> Value:
    shape = tuple(getattr(aval, 'shape', ()))
    if shape[:1] != (self.size,):
      return Value()
    name = str(aval)
    self.closed[name] = None
    return Value(None, Closed(whole(self.size, len(shape)), name))

  def _equation(self, eqn: Any, values: list[Value]) -> list[Value]:
    # What a library traced once has no line of its own, but its caller's.
    outside, name = self._where, eqn.primitive.name
    self._where = line_of(eqn) or outside
    try:
      found = self._results(eqn, values)
      for value, variable in zip(found, eqn.outvars, strict=True):
        check_shape(value.label, shape_of(variable))
    except RefusedError as refused:
      offence = f'{name} at {self._where} {refused.what}. Instead:'
      found = [Value(Mixed(f'{offence} {refused.instead}'))] * len(eqn.outvars)
    except (LookupError, AttributeError, TypeError, ValueError) as error:
      # Parameters of another version of JAX: not known, hence not proved.
      offence = f'{name} at {self._where} is not understood ({error!r})'
      found = [Value(Mixed(f'{offence}. Instead: {VMAP}'))] * len(eqn.outvars)
    self._where = outside
    return found

  def _results(self, eqn: Any, values: list[Value]) -> list[Value]:
    name = eqn.primitive.name
    need(
      eqn.primitive in _known.PRIMITIVES,
      'is an unknown primitive',
      'write it with operations of jax.numpy and jax.lax',
    )
    if name in CALLS:
      if name in ('custom_jvp_call', 'custom_vjp_call'):
        self.derivatives[f'{eqn.params.get("name", name)} ({self._where})'] = (
          None
        )
      return self.run(eqn.params[CALLS[name]], values)
    ends = (*eqn.invars, *eqn.outvars)
    pure = 'return values; write to no memory and call no Python'
    refs = any('Ref' in type(x.aval).__name__ for x in ends)
    need(not refs, 'has memory that is written to', pure)
    if name in _LOOPS:
      return _LOOPS[name](self, eqn.params, values)
    if not eqn.outvars:
      return []
    need(not eqn.effects, 'does more than return a value', pure)
    if name == 'custom_linear_solve':
      return self._linear_solve(eqn.params, values)
    known = name in _ALL_RULES or name in _known.FUNCTIONS
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
      return [_facts.fact_of(e)] if len(out) == 1 else [None] * len(out)
    try:
      layouts = _labels_of(e, closed)
    except (RefusedError, LookupError, AttributeError, TypeError, ValueError):
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

  def _linear_solve(self, p: Any, values: list[Value]) -> list[Value]:
    lengths = p['const_lengths']
    first = lengths.matvec + lengths.vecmat
    consts = values[first : first + lengths.solve]
    return self.run(p['jaxprs'].solve, consts + values[sum(lengths) :])

  def _cond(self, p: Any, values: list[Value]) -> list[Value]:
    predicate = values[0].label
    self._note_wait('cond', predicate)
    branches = [self.run(branch, values[1:]) for branch in p['branches']]
    out = [x.label for x in branches[0]]
    for branch in branches[1:]:
      out = [join(x, y.label) for x, y in zip(out, branch, strict=True)]
    shapes = [x.shape for x in p['branches'][0].out_avals]
    return [
      Value(_governed(x, predicate, len(shape)))
      for x, shape in zip(out, shapes, strict=True)
    ]

  def _while(self, p: Any, values: list[Value]) -> list[Value]:
    first, second = p['cond_nconsts'], p['body_nconsts']
    consts, more = values[:first], values[first : first + second]
    carry = [Value(x.label) for x in values[first + second :]]
    shapes = [x.shape for x in p['body_jaxpr'].out_avals]
    while True:
      (predicate,) = self.run(p['cond_jaxpr'], consts + carry)
      body = self.run(p['body_jaxpr'], more + carry)
      # With a predicate for each example, which are the leading axes, a row
      # stays as it is where its predicate is False.
      new = [
        Value(_governed(join(a.label, b.label), predicate.label, len(shape)))
        for a, b, shape in zip(carry, body, shapes, strict=True)
      ]
      if new == carry:
        self._note_wait('while', predicate.label)
        return carry
      carry = new

  def _note_wait(self, name: str, predicate: Label) -> None:
    if predicate is not None:
      self.waits[f'{name} at {self._where}'] = None

  def _scan(self, p: Any, values: list[Value]) -> list[Value]:
    first, second = p['num_consts'], p['num_carry']
    consts = values[:first]
    carry = [Value(x.label) for x in values[first : first + second]]
    self._depth += 1
    depth = self._depth
    rows = [_entered(x, depth) for x in values[first + second :]]
    while True:
      out = self.run(p['jaxpr'], [*consts, *carry, *rows])
      new = [
        Value(join(a.label, self._carried(b.label, depth)))
        for a, b in zip(carry, out[:second], strict=True)
      ]
      if new == carry:
        break
      carry = new
    self._depth -= 1
    return carry + [Value(_left(x.label, depth)) for x in out[second:]]

  def _carried(self, label: Label, depth: int) -> Label:
    if isinstance(label, Batched) and depth in dict(label.rounds):
      return Mixed(
        f'scan at {self._where} carries from one example to the next. Instead:'
        f' let the loop go along another axis; {VMAP}'
      )
    return label


_LOOPS: dict[str, Callable[[Analysis, Any, list[Value]], list[Value]]] = {
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


def _governed(label: Label, predicate: Label, ndim: int) -> Label:
  """The label of a value that a predicate of the leading axes has chosen."""
  return label if predicate is None else join(lifted(predicate, ndim), label)


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
