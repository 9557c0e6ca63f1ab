"""Proves from its jaxpr that a function of a batch keeps the examples apart.

The batch is followed through every equation. ``_labels`` says what is known of
an array, ``_rules`` and ``_indexing`` what each primitive makes of it,
``_analysis`` how programs are made of primitives. No value is looked at, so
that what is proved holds for every record; zero times a number depends on the
number. What no rule covers is refused: a primitive that is not known costs a
proof, never its truth.
"""

from collections.abc import Callable

import jax
import numpy as np
from jax.extend import core

from prism_optax._proofs._analysis import Analysis, Value
from prism_optax._proofs._equations import names_of
from prism_optax._proofs._labels import Label, Mixed, shape_of, whole
from prism_optax._proofs._proof import Proof
from prism_optax._types import ArrayTree


def followed(
  jaxpr: core.ClosedJaxpr, names: list[str], of_batch: list[bool], size: int
) -> Proof:
  """The proof, from which arguments have a batch of this size."""
  analysis = Analysis(size)
  values = [
    Value(whole(size, len(shape_of(variable))) if x else None)
    for x, variable in zip(of_batch, jaxpr.jaxpr.invars, strict=True)
  ]
  found = analysis.run(jaxpr, values)
  offences = [
    _offence(name, value.label, size, len(shape_of(variable)))
    for name, value, variable in zip(
      names, found, jaxpr.jaxpr.outvars, strict=True
    )
  ]
  counts = ', '.join(f'{n} {x}' for x, n in analysis.counts.most_common())
  return Proof(
    _claim(size),
    next((x for x in offences if x is not None), None),
    (
      f'enter: {sum(of_batch)} arrays of {size} examples,'
      f' {len(of_batch) - sum(of_batch)} that are the same for all',
      f'leave: {len(found)} arrays',
      f'equations: {analysis.counts.total()} ({counts})',
      *(
        'calls a function with a custom derivative, of which a proof of'
        f' gradients takes notice: {x}'
        for x in analysis.derivatives
      ),
    ),
    _assumptions(analysis),
  )


def _offence(name: str, label: Label, size: int, ndim: int) -> str | None:
  """Why a result is not one row for each example, in their order."""
  if isinstance(label, Mixed):
    return label.offence
  if label is None or (ndim and label == whole(size, ndim)):
    return None
  axes = [k for k, digits in enumerate(label.axes) if digits]
  return (
    f'output{name} has not example i in row i: the batch is along the axes'
    f' {axes}, from example {label.start}. Instead: return arrays (B, ...),'
    ' examples in the order of the batch'
  )


def _claim(size: int) -> str:
  return (
    'row i of every output depends on example i alone and on what is the same'
    f' for all examples, whatever the values are, in a batch of {size}'
  )


def _assumptions(analysis: Analysis) -> tuple[str, ...]:
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
  function: Callable[..., ArrayTree],
  *args: ArrayTree,
  in_axes: int | tuple[int | None, ...] | None = 0,
) -> Proof:
  """Proves that row i of every output depends on example i alone.

  A clip bounds the effect of one record on its own gradient. If the gradients
  of other records change too (batch normalisation, a mean over the batch, a
  count of its tokens, experts with a capacity, in-batch negatives), the sum
  moves by more than the clip norm, and no epsilon holds.

  The function is traced, not run: the proof follows the batch axis through
  every operation of the program and reads no values, so it holds for every
  batch of these shapes. (Zero times a number counts as depending on the
  number.) An operation that is not known to keep examples apart is refused; the
  refusal names the operation, its line and an alternative. The method is ours.

  **Prove the gradients that a clip gets, not the loss**: a custom derivative
  may mix examples and is invisible in a loss. So ``function`` is
  ``jax.vmap(jax.grad(loss), (None, 0))`` or
  :func:`prism_optax.lora.per_example_gradients` of losses.
  :func:`prism_optax.training.make_private` does this by itself.

  ==================================  =========================================
  a function that mixes examples      a false proof with an ``offence``
  an operation that is not known      the same
  an output that needs no example     proved; it may have any shape
  a ``while`` until all are finished  proved; the proof assumes that nobody
                                      measures its time
  a closed-over array with B rows     taken for the same for all; refused if it
                                      is combined, as it is, with the batch
  a closed-over argument              refused, if it is one of the batch
  keys of examples, not Threefry      refused: others draw for all at once
  ==================================  =========================================

  Args:
    function: Takes ``args`` and returns a tree of arrays (B, ...).
    *args: Trees of arrays or of ``jax.ShapeDtypeStruct``. Only shapes and types
      count.
    in_axes: For each argument 0, if its leaves are (B, ...) with B at least 2,
      or None, if it is the same for all examples. A tuple, or one for all.

  Returns:
    The proof. It is true, or false with the first ``offence``: the primitive,
    its line in the source, and what to write instead. ``print`` shows all of
    it.

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
  leaves = [
    (x, axis == 0)
    for axis, arg in zip(axes, args, strict=True)
    for x in jax.tree.leaves(arg)
  ]
  firsts = {np.shape(x)[:1] for x, of_batch in leaves if of_batch}
  if len(firsts) != 1 or max(firsts) < (2,):
    raise ValueError(
      'Expected the arguments with in_axes=0 to be arrays (B, ...) with one'
      ' batch of at least 2 examples, got the first axes'
      f' {sorted(firsts)}.'
    )
  ((size,),) = firsts
  jaxpr, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
  closed = {id(getattr(x, 'val', x)) for x in jaxpr.consts}
  if closed & {id(x) for x, of_batch in leaves if of_batch}:
    return Proof(
      _claim(size),
      'the function closes over an array that is also an argument of the'
      ' batch. Instead: use the argument, so that its rows can be followed',
    )
  return followed(jaxpr, names_of(shapes), [x for _, x in leaves], size)
