"""Proves from its jaxpr that a function of a batch keeps the examples apart.

The batch is followed through every equation (:mod:`_labels` says what is known
of an array, :mod:`_rules` and :mod:`_indexing` what each primitive makes of
it). No value is looked at, so that what is proved holds for every record; zero
times a number depends on the number. What no rule covers is refused: a
primitive that is not known costs a proof, never its truth.
"""

import collections
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
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
from prism_optax._proofs._proof import Proof
from prism_optax._proofs._rules import RULES, Equation, lifted, shape_of

_ALL_RULES = RULES | INDEXING


class Value(NamedTuple):
  """What is known of a variable."""

  label: Label = None
  fact: Fact = None


class _Analysis:
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
    outside = eqn.effects or name in _known.OUTSIDE
    need(not (eqn.outvars and outside), 'runs outside of the program', pure)
    labels = [x.label for x in values]
    if name == 'custom_linear_solve':
      return self._linear_solve(eqn.params, values)
    e = Equation(eqn, self.size, [x.fact for x in values])
    out = _labels_of(e, labels)
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


_LOOPS: dict[str, Callable[[_Analysis, Any, list[Value]], list[Value]]] = {
  'cond': _Analysis._cond,
  'while': _Analysis._while,
  'scan': _Analysis._scan,
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


def analyse(
  program: Any, axes: Sequence[int | None], size: int, names: Sequence[str]
) -> Proof:
  """The proof for a closed jaxpr.

  Args:
    program: The closed jaxpr.
    axes: For each of its arguments 0 or None.
    size: B.
    names: Of its results.
  """
  arguments = [shape_of(x) for x in program.jaxpr.invars]
  analysis = _Analysis(size)
  found = analysis.run(
    program,
    [
      Value(None if axis is None else whole(size, len(shape)))
      for axis, shape in zip(axes, arguments, strict=True)
    ],
  )
  offence = None
  for name, value, variable in zip(
    names, found, program.jaxpr.outvars, strict=True
  ):
    label = value.label
    if isinstance(label, Mixed):
      offence = label.offence
      break
    ndim = len(shape_of(variable))
    if label is not None and label != (whole(size, ndim) if ndim else None):
      offence = offence or (
        f'output{name} has not example i in row i: {_order(label)}. Instead:'
        ' return arrays (B, ...), examples in the order of the batch'
      )
  batched = sum(x == 0 for x in axes)
  counts = ', '.join(f'{n} {x}' for n, x in analysis.counts.most_common())
  return Proof(
    _claim(size),
    offence,
    (
      f'enter: {batched} arrays of {size} examples,'
      f' {len(axes) - batched} that are the same for all',
      f'leave: {len(found)} arrays',
      f'equations: {analysis.counts.total()} ({counts})',
      *(
        f'calls a function with a custom derivative, which is proved only where'
        f' it is computed, in a function of gradients: {x}'
        for x in analysis.derivatives
      ),
    ),
    _assumptions(analysis),
  )


def _claim(size: int) -> str:
  return (
    'row i of every output depends on example i alone and on what is the same'
    f' for all examples, whatever the values are, in a batch of {size}'
  )


def _order(label: Batched) -> str:
  axes = [k for k, digits in enumerate(label.axes) if digits]
  return f'the batch is along the axes {axes}, from example {label.start}'


def _assumptions(analysis: _Analysis) -> tuple[str, ...]:
  out = [
    'the compiler keeps the rows of an operation apart, as its definition does',
    'a batch of another size is another program',
  ]
  if analysis.closed:
    out.append(
      f'arrays with {analysis.size} rows that the function closes over are no'
      f' data of the examples: {", ".join(analysis.closed)}'
    )
  out += [
    f'time is not looked at, and that of {x} depends on all examples'
    for x in analysis.waits
  ]
  return tuple(out)


def prove_independent(
  function: Callable[..., Any],
  *args: Any,
  in_axes: int | tuple[int | None, ...] | None = 0,
) -> Proof:
  """Proves that row i of every output depends on example i alone.

  A clip bounds what one record changes in its own gradient. Where the gradients
  of other records change too (batch normalisation, a mean over the batch, a
  count of its tokens, experts with a capacity, in-batch negatives), the sum
  moves by more than the clip norm, and no epsilon holds.

  The function is traced, not run: this follows the batch axis through every
  operation of the program and looks at no value, so that the proof holds for
  every batch of these shapes. Zero times a number depends on the number. What
  is not known to keep examples apart is refused; the refusal names the
  operation, its line and what to write instead. Ours.

  **Prove the gradients that a clip gets, not the loss**: a custom derivative
  may mix examples and is invisible in a loss. So ``function`` is
  ``jax.vmap(jax.grad(loss), (None, 0))`` or
  :func:`prism_optax.lora.per_example_gradients` of losses.
  :func:`prism_optax.training.make_private` does this by itself.

  =====================================  ======================================
  a function that mixes examples         a false proof with an ``offence``
  an operation that is not known         the same
  an output that depends on no example   proved; it may have any shape
  a ``while`` that ends by what          proved, and the proof assumes that
  examples hold                          nobody measures its time
  a closed-over array with B rows        assumed to be the same for all; refused
                                         where its rows meet those of the batch
  a closed-over array that is an         refused
  argument of the batch as well
  keys of examples, not Threefry         refused: others draw for all at once
  =====================================  ======================================

  Args:
    function: Takes ``args`` and returns a tree of arrays (B, ...).
    *args: Trees of arrays or of ``jax.ShapeDtypeStruct``. Only shapes and types
      count.
    in_axes: For each argument 0, if its leaves are (B, ...) with B at least 2,
      or None, if it is the same for all examples. A tuple, or one for all.

  Returns:
    The proof: true, or false with the first offence.

  Raises:
    ValueError: If ``in_axes`` does not fit, or the arguments have not one batch
      size of at least 2. What ``function`` raises passes through.

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> from prism_optax import diagnostics
    >>> def loss(w, x, mean):
    ...   return jnp.sum((w * (x - mean)) ** 2)
    >>> gradients = jax.vmap(jax.grad(loss), (None, 0, None))
    >>> w, x = jnp.ones(4), jax.ShapeDtypeStruct((8, 4), jnp.float32)
    >>> bool(diagnostics.prove_independent(
    ...   lambda w, x: gradients(w, x, jnp.zeros(4)), w, x, in_axes=(None, 0)))
    True
    >>> proof = diagnostics.prove_independent(
    ...   lambda w, x: gradients(w, x, x.mean(0)), w, x, in_axes=(None, 0))
    >>> bool(proof), 'reduces over the batch axis' in proof.offence
    (False, True)
  """
  axes = in_axes if isinstance(in_axes, tuple) else (in_axes,) * len(args)
  if len(axes) != len(args) or not set(axes) <= {0, None}:
    raise ValueError(
      'Expected in_axes to be 0 or None, one for all or a tuple with one for'
      f' each of {len(args)} arguments, got {in_axes=}.'
    )
  flat: list[int | None] = []
  leaves: list[Any] = []
  for axis, arg in zip(axes, args, strict=True):
    found = jax.tree.leaves(arg)
    leaves += found
    flat += [axis] * len(found)
  firsts = {
    np.shape(x)[:1] for x, axis in zip(leaves, flat, strict=True) if axis == 0
  }
  if len(firsts) != 1 or max(firsts) < (2,):
    raise ValueError(
      'Expected the arguments with in_axes=0 to be arrays (B, ...) with one'
      ' batch of at least 2 examples, got the first axes'
      f' {sorted(firsts)}.'
    )
  size = firsts.pop()[0]
  program, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
  names = [
    jax.tree_util.keystr(x) for x, _ in jax.tree.leaves_with_path(shapes)
  ]
  known = {id(getattr(x, 'val', x)) for x in program.consts}
  rows = {id(x) for x, axis in zip(leaves, flat, strict=True) if axis == 0}
  if known & rows:
    return Proof(
      _claim(size),
      'the function closes over an array that is also an argument of the'
      ' batch. Instead: use the argument, so that its rows can be followed',
    )
  return analyse(program, flat, size, names)
