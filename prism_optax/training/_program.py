"""The step of a training: from its loss to one program, proved before it runs.

Gradients, clip, noise and optimizer are one compiled function. Its proofs are
of the very program that runs, so they are made where it is traced.
"""

import functools
import inspect
from collections.abc import Callable, Hashable
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from prism_optax import lora
from prism_optax._exact_sum import LazyGradients
from prism_optax._proofs._equations import calls_of, names_of
from prism_optax._proofs._independence import followed
from prism_optax._proofs._proof import Proof
from prism_optax._types import ArrayTree
from prism_optax.training import _fingerprint, _seen
from prism_optax.training._releases import (
  ChangeOfVariables,
  check_declared,
  constants_of,
)
from prism_optax.training._sampling import Batch
from prism_optax.training._settings import Loss, Parts

# The name in a program of the function of gradients.
_GRADIENTS = 'prism_optax_gradients'

# Of parameters, frozen weights and rows.
OfRows: TypeAlias = Callable[[ArrayTree, ArrayTree, ArrayTree], ArrayTree]


def prepared(
  loss: Loss, has_aux: bool, change: ChangeOfVariables | None, batched: bool
) -> Loss:
  """``(loss, aux)`` of what is trained; aux is ``()`` if there is none.

  Raises:
    ValueError: When it is called, with fewer or more arguments than the loss
      takes, or if it returns no pair in spite of ``has_aux``.
  """
  signature = inspect.signature(loss)

  def to_params(variables: ArrayTree) -> ArrayTree:
    if change is None:
      return variables
    of_one = change.to_params
    return jax.vmap(of_one)(variables) if batched else of_one(variables)

  def pair(
    variables: ArrayTree, *data: ArrayTree
  ) -> tuple[ArrayTree, ArrayTree]:
    try:
      signature.bind(variables, *data)
    except TypeError as error:
      raise ValueError(
        'Expected loss(params, *example), or loss(params, frozen, *example) if'
        ' step, compile and nonprivate_means are given frozen= as well, got a'
        f' loss{signature} that is called with {1 + len(data)} arguments:'
        f' {error}.'
      ) from error
    found: ArrayTree = loss(to_params(variables), *data)
    if not has_aux:
      return found, ()
    if not isinstance(found, tuple) or len(found) != 2:
      raise ValueError(
        'Expected loss to return (loss, aux), as has_aux=True says, got'
        f' {found}.'
      )
    return found[0], found[1]

  return pair


def called(
  loss: Loss, params: ArrayTree, frozen: ArrayTree, data: ArrayTree
) -> ArrayTree:
  """``loss`` of a record; frozen weights stand before it if there are any.

  Raises:
    ValueError: If the loss changes a variable of a Flax NNX model.
  """
  example = data if isinstance(data, tuple) else (data,)
  weights = () if frozen is None else (frozen,)
  try:
    return loss(params, *weights, *example)
  except Exception as error:
    # By its name, because flax is not always installed.
    if type(error).__name__ != 'TraceContextError':
      raise
    raise ValueError(
      'Expected loss to change nothing outside of itself, but it changes a'
      ' variable of a Flax model. An active nnx.Dropout does, because it counts'
      ' the keys that it has used. Call model.eval(), or give each record its'
      ' own key, as the page on dropout shows.'
    ) from error


def gradients(parts: Parts) -> OfRows:
  """``gradients(params, frozen, rows)``, per record or per user."""

  def loss(*arguments: ArrayTree) -> ArrayTree:
    return parts.loss(*arguments)[0]

  if parts.batched_loss:
    return lambda params, frozen, rows: lora.per_example_gradients(
      lambda copies, batch: called(loss, copies, frozen, batch)
    )(params, rows)
  one = functools.partial(of_user if parts.of_users else called, loss)
  return jax.vmap(jax.grad(one), (None, None, 0))


def of_user(
  loss: Loss, params: ArrayTree, frozen: ArrayTree, row: ArrayTree
) -> ArrayTree:
  """The mean of what a loss returns over the records of a user."""
  examples, is_present = row
  # The loss of zeros may have a gradient that is not finite, which stays so
  # where its weight is zero: another record of the user's stands in.
  first = jnp.argmax(is_present)

  def only_present(x: jax.Array, other: jax.typing.ArrayLike) -> jax.Array:
    here = is_present.reshape(-1, *(1,) * (x.ndim - 1))
    return jnp.where(here, x, other)

  examples = jax.tree.map(lambda x: only_present(x, x[first]), examples)
  each = jax.vmap(lambda x: called(loss, params, frozen, x))(examples)
  count = jnp.maximum(jnp.sum(is_present), 1)
  return jax.tree.map(lambda x: jnp.sum(only_present(x, 0), 0) / count, each)


def check_scalar(
  parts: Parts, params: ArrayTree, frozen: ArrayTree, batch: Batch
) -> None:
  """Refuses a loss of one record that is no scalar, from shapes alone.

  Raises:
    ValueError: With the shapes.
  """
  if parts.batched_loss:
    return
  one = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape[1 + parts.of_users :], x.dtype),
    batch.examples,
  )
  found, _ = jax.eval_shape(
    functools.partial(called, parts.loss), params, frozen, one
  )
  if getattr(found, 'shape', None) != ():
    raise ValueError(
      'Expected loss to return a scalar, the loss of one example, which has'
      ' no batch axis (the shapes here are'
      f' {[x.shape for x in jax.tree.leaves(one)]}), got {found}.'
    )


def prove_apart(parts: Parts, traced: jax.stages.Traced, batch: Batch) -> Proof:
  """The proof that no record acts on another, or a refusal of the loss.

  The gradients are read from the program of the step that runs: of the rows of
  a micro-batch, padding included, with the derivatives that a loss defines for
  itself. A loss that was traced for the proof alone could be another function
  when it is traced again.

  Args:
    parts: Of the training.
    traced: The step.
    batch: Whose shapes it was traced with.

  Raises:
    ValueError: If the gradient of one record is not proved to depend on that
      record alone.
  """
  padded = len(batch.is_padding_example)
  size = min(parts.execution.microbatch_size or padded, padded)
  if size == 1:
    return Proof(
      'the gradient of a record depends on that record alone',
      None,
      ('gradients are computed of one record at a time: it can meet no other',),
    )
  entering = len(jax.tree.leaves((batch.examples, batch.is_present)))
  # There is a first one, or they are computed by what nobody has proved.
  first, *others = calls_of(traced.jaxpr, _GRADIENTS)
  for program in (first, *others):
    shared = len(program.in_avals) - entering
    of_batch = [False] * shared + [True] * entering
    proof = followed(program, names_of(parts.shapes), of_batch, size)
    if not proof:
      raise ValueError(
        'Expected the gradient of a record to depend on that record alone. That'
        ' is not proved of this loss, and without it the clip bounds nothing'
        f' and no epsilon holds: {proof.offence}. batched_loss needs losses'
        ' (B,) that use copy i of the parameters and record i alone: no batch'
        ' normalisation, no mean over the batch, no in-batch negatives. Without'
        ' batched_loss records meet in a custom_vmap only.'
      )
  return proof


class Program:
  """The step of a training.

  Attributes:
    run: ``run(params, state, frozen, examples, is_padding_example, is_present,
      release)``, compiled; returns parameters, state, and 1 if the step was
      held, else 0. Parameters and state are donated.
    proofs: What was proved of it; empty before it is traced.
    digests: Of each program that was traced, (8,) uint32.
  """

  def __init__(self, parts: Parts) -> None:
    self.proofs: tuple[Proof, ...] = ()
    self.digests: dict[Hashable, np.ndarray] = {}
    self._parts = parts
    self._frozen = _fingerprint.FrozenWeights()
    self._compiled: Hashable = None
    of_rows = gradients(parts)

    # Traced once, under a name by which its program is found in the step's.
    def of_records(*arguments: ArrayTree) -> ArrayTree:
      return of_rows(*arguments)

    of_records.__name__ = _GRADIENTS
    of_records = jax.jit(of_records)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def run(
      params: ArrayTree,
      state: optax.OptState,
      frozen: ArrayTree,
      examples: ArrayTree,
      is_padding_example: jax.Array,
      is_present: jax.Array | None,
      release: jax.Array | None = None,
    ) -> tuple[ArrayTree, ArrayTree, jax.Array]:
      if release is not None:  # Other parameters have other gradients.
        release = release ^ _fingerprint.of_arrays(params)
      rows = examples if is_present is None else (examples, is_present)
      own = functools.partial(of_records, params, frozen)
      lazy = LazyGradients(
        rows,
        own,
        parts.execution.microbatch_size,
        parts.execution.skip_padding,
        lambda given, padding: (
          given.examples is rows
          and given.gradients is own
          and padding is is_padding_example
        ),
      )
      updates, new = parts.transformation.update(
        lazy,
        state,
        params,
        is_padding_example=is_padding_example,
        release_digest=release,
      )
      updated = optax.apply_updates(params, updates)
      (params, state), held = _held((updated, new), (params, state))
      return params, state, held

    self.run = run

  def digest(
    self, arguments: tuple[ArrayTree, ...], batch: Batch
  ) -> np.ndarray:
    """A digest of the program that runs, which is proved when it is new.

    Args:
      arguments: Of ``run``, but for the last one.
      batch: Whose rows are among them.

    Raises:
      ValueError: If a proof fails, or something undeclared is in the program;
        if another one was compiled ahead.
    """
    name = self._name(arguments)
    if name not in self.digests:
      if self._compiled is not None:
        rows = [x.shape for x in jax.tree.leaves(arguments[3:])]
        raise ValueError(
          'Expected frozen weights and a batch as they were compiled for, got'
          f' others (rows {rows}).'
        )
      self._trace(name, arguments, batch)
    return self.digests[name]

  def compile(
    self, arguments: tuple[ArrayTree, ...], batch: Batch
  ) -> np.ndarray:
    """As :meth:`digest`; no other program is traced or compiled afterwards."""
    name = self._name(arguments)
    self._trace(name, arguments, batch).lower().compile()
    self._compiled = name
    return self.digests[name]

  def _name(self, arguments: tuple[ArrayTree, ...]) -> Hashable:
    """Structure, shapes and types, and a digest of the frozen weights."""
    _, _, frozen, *rows = arguments
    leaves, treedef = jax.tree.flatten((frozen, rows))
    shapes = tuple(
      described(x) if hasattr(x, 'dtype') else type(x) for x in leaves
    )
    return treedef, shapes, self._frozen.digest(frozen)

  def _trace(
    self, name: Hashable, arguments: tuple[ArrayTree, ...], batch: Batch
  ) -> jax.stages.Traced:
    params, _, frozen, *_ = arguments
    parts = self._parts
    check_declared('frozen', frozen, parts.declared)
    check_scalar(parts, params, frozen, batch)
    arguments = (*arguments, _fingerprint.UNKNOWN)
    # JAX runs what is traced here, so jax.disable_jit does not count.
    with jax.disable_jit(False):
      traced = self.run.trace(*arguments)
    independence = prove_apart(parts, traced, batch)
    constants = list(constants_of(traced.jaxpr))
    check_declared('the constants of loss', constants, parts.declared)
    release = _seen.prove_step(
      traced,
      arguments,
      parts.settings.noise_multiplier,
      parts.releases_per_step,
    )
    self.proofs = tuple(x for x in (independence, release) if x is not None)
    self.digests[name] = _fingerprint.agreed(
      _fingerprint.words(
        _fingerprint.program(traced.jaxpr), self._frozen.digest(frozen)
      )
    )
    return traced


def _held(new: ArrayTree, old: ArrayTree) -> tuple[ArrayTree, jax.Array]:
  """Takes a step back in which something finite became NaN or Inf.

  Too large a learning rate overflows. What is tested here is all
  post-processing of the release, so it may decide. Only floats go back: the
  step counts, and keys and counters move on, because noise that was drawn must
  not be drawn again (``optax.apply_if_finite`` puts the keys back, too).

  Args:
    new: Parameters and state after the step.
    old: The same before it. Numbers that were not finite then, such as the
      best value so far, may stay so.

  Returns:
    The tree to go on with, and 1 if it is the old one, else 0.
  """

  leaves, treedef = jax.tree.flatten(new)
  pairs = {
    i: (x, y)
    for i, (x, y) in enumerate(zip(leaves, jax.tree.leaves(old), strict=True))
    if jnp.issubdtype(x.dtype, jnp.inexact)
  }
  lost = jnp.array(False)
  for x, y in pairs.values():
    lost |= jnp.any(jnp.isfinite(y) & ~jnp.isfinite(x))
  # A branch, because XLA would put the whole update of a leaf into the loop
  # that selects and once more into the one that looks, and compile it twice.
  kept = jax.lax.cond(
    lost,
    lambda pairs: [y.astype(x.dtype) for x, y in pairs],
    lambda pairs: [x for x, _ in pairs],
    [*pairs.values()],
  )
  for i, x in zip(pairs, kept, strict=True):
    leaves[i] = x
  return jax.tree.unflatten(treedef, leaves), lost.astype(jnp.int32)


def described(x: jax.Array) -> tuple[tuple[int, ...], str]:
  """Shape and type."""
  return tuple(x.shape), str(x.dtype)
