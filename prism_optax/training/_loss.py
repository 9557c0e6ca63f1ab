"""What a loss is made into: gradients of records, and what is refused."""

import functools
import inspect
from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp

from prism_optax import lora
from prism_optax._proofs._independence import prove_independent
from prism_optax._proofs._proof import Proof
from prism_optax._types import ArrayTree
from prism_optax.training._releases import ChangeOfVariables
from prism_optax.training._sampling import Batch

Loss: TypeAlias = Callable[..., ArrayTree]
# Of parameters, frozen weights and rows.
OfRows: TypeAlias = Callable[[ArrayTree, ArrayTree, ArrayTree], ArrayTree]


def with_counted_arguments(loss: Loss) -> Loss:
  """The loss, which says what is missing when it is called.

  Raises:
    ValueError: When it is called with fewer or more arguments than it takes.
  """
  signature = inspect.signature(loss)

  def counted(*arguments: ArrayTree) -> ArrayTree:
    try:
      signature.bind(*arguments)
    except TypeError as error:
      raise ValueError(
        'Expected loss(params, *example), or loss(params, frozen, *example) if'
        ' step, compile and nonprivate_means are given frozen= as well, got a'
        f' loss{signature} that is called with {len(arguments)} arguments:'
        f' {error}.'
      ) from error
    return loss(*arguments)

  return counted


def in_coordinates(
  loss: Loss, change: ChangeOfVariables, batched: bool
) -> Loss:
  """The loss as a function of what is trained in place of its parameters."""

  to_params = jax.vmap(change.to_params) if batched else change.to_params

  def of_coordinates(coordinates: ArrayTree, *data: ArrayTree) -> ArrayTree:
    return loss(to_params(coordinates), *data)

  return of_coordinates


def _called(
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


def with_aux(loss: Loss, has_aux: bool) -> Loss:
  """The loss with auxiliary values, ``()`` if it has none.

  Raises:
    ValueError: When it is called, if it returns no pair in spite of
      ``has_aux``.
  """

  def pair(*arguments: ArrayTree) -> tuple[ArrayTree, ArrayTree]:
    found: ArrayTree = loss(*arguments)
    if not has_aux:
      return found, ()
    if not isinstance(found, tuple) or len(found) != 2:
      raise ValueError(
        'Expected loss to return (loss, aux), as has_aux=True says, got'
        f' {found}.'
      )
    return found[0], found[1]

  return pair


def without_aux(loss: Loss, has_aux: bool) -> Loss:
  """The loss alone, of which a step takes gradients."""
  if not has_aux:
    return loss
  pair = with_aux(loss, has_aux)
  return lambda *arguments: pair(*arguments)[0]


def gradients(loss: Loss, batched: bool, of_users: bool) -> OfRows:
  """``gradients(params, frozen, rows)``, per record or per user."""
  if batched:
    return lambda params, frozen, rows: lora.per_example_gradients(
      lambda copies, batch: _called(loss, copies, frozen, batch)
    )(params, rows)

  def of_user(
    params: ArrayTree, frozen: ArrayTree, rows: ArrayTree
  ) -> jax.Array:
    each = _of_records_of_user(loss, params, frozen, rows)
    return _mean_of_user(each, rows[1])

  one = of_user if of_users else functools.partial(_called, loss)
  return jax.vmap(jax.grad(one), (None, None, 0))


def _of_records_of_user(
  loss: Loss, params: ArrayTree, frozen: ArrayTree, rows: ArrayTree
) -> ArrayTree:
  """What a loss returns for each record of a user."""
  examples, is_present = rows
  # The loss of zeros may have a gradient that is not finite, which stays so
  # where its weight is zero: another record of the user's stands in.
  first = jnp.argmax(is_present)

  def filled(x: jax.Array) -> jax.Array:
    here = is_present.reshape(-1, *(1,) * (x.ndim - 1))
    return jnp.where(here, x, x[first])

  examples = jax.tree.map(filled, examples)
  return jax.vmap(lambda x: _called(loss, params, frozen, x))(examples)


def _mean_of_user(each: jax.Array, is_present: jax.Array) -> jax.Array:
  return jnp.sum(jnp.where(is_present, each, 0)) / jnp.maximum(
    jnp.sum(is_present), 1
  )


def measured(loss: Loss, batched: bool, of_users: bool) -> OfRows:
  """``measured(params, frozen, rows)``: losses, auxiliary values, gradients.

  Args:
    loss: Of :func:`with_aux`.
    batched: Whether it takes many examples.
    of_users: Whether rows are of users.
  """
  if batched:
    of_batch = gradients(lambda *x: loss(*x)[0], True, False)

    def call(
      params: ArrayTree, frozen: ArrayTree, rows: ArrayTree
    ) -> ArrayTree:
      count = len(jax.tree.leaves(rows)[0])
      copies = jax.tree.map(
        lambda x: jnp.broadcast_to(x, (count, *x.shape)), params
      )
      values, aux = _called(loss, copies, frozen, rows)
      return values, aux, of_batch(params, frozen, rows)

    return call

  def one(
    params: ArrayTree, frozen: ArrayTree, row: ArrayTree
  ) -> tuple[ArrayTree, ArrayTree]:
    if not of_users:
      value, aux = _called(loss, params, frozen, row)
      return value, aux
    each = _of_records_of_user(loss, params, frozen, row)
    mean = jax.vmap(_mean_of_user, (-1, None), -1)

    def of_leaf(x: jax.Array) -> jax.Array:
      flat = mean(x.reshape(len(x), -1), row[1])
      return flat.reshape(x.shape[1:])

    value, aux = jax.tree.map(of_leaf, each)
    return value, aux

  def call_each(
    params: ArrayTree, frozen: ArrayTree, rows: ArrayTree
  ) -> ArrayTree:
    (values, aux), found = jax.vmap(
      jax.value_and_grad(one, has_aux=True), (None, None, 0)
    )(params, frozen, rows)
    return values, aux, found

  return call_each


def check(
  loss: Loss,
  batched: bool,
  microbatch_size: int | None,
  params: ArrayTree,
  frozen: ArrayTree,
  batch: Batch,
) -> Proof:
  """The proof that no record meets another, or a refusal of the loss.

  What is proved is the function of gradients as a step runs it: for the rows of
  a micro-batch, padding included, with the derivatives that a loss defines for
  itself. Only shapes and types of the records are looked at.

  Raises:
    ValueError: If the loss has another shape, or the gradient of one record is
      not proved to depend on that record alone.
  """
  users = batch.is_present is not None
  if not batched:
    one = jax.eval_shape(
      lambda: jax.tree.map(lambda x: x[0, 0] if users else x[0], batch.examples)
    )
    found = jax.eval_shape(
      functools.partial(_called, loss), params, frozen, one
    )
    if getattr(found, 'shape', None) != ():
      raise ValueError(
        'Expected loss to return a scalar, the loss of one example, which has'
        ' no batch axis (the shapes here are'
        f' {[x.shape for x in jax.tree.leaves(one)]}), got {found}.'
      )
  rows = (batch.examples, batch.is_present) if users else batch.examples
  padded = len(batch.is_padding_example)
  size = min(microbatch_size or padded, padded)
  part = jax.eval_shape(lambda x: jax.tree.map(lambda x: x[:size], x), rows)
  if size == 1:
    return Proof(
      'the gradient of a record depends on that record alone',
      None,
      ('gradients are computed of one record at a time: it can meet no other',),
    )
  proof = prove_independent(
    gradients(loss, batched, users), params, frozen, part,
    in_axes=(None, None, 0),
  )  # fmt: skip
  if not proof:
    raise ValueError(
      'Expected the gradient of a record to depend on that record alone. That'
      ' is not proved of this loss, and without it the clip bounds nothing and'
      f' no epsilon holds: {proof.offence}. batched_loss needs losses (B,) that'
      ' use copy i of the parameters and record i alone: no batch'
      ' normalisation, no mean over the batch, no in-batch negatives. Without'
      ' batched_loss records meet in a custom_vmap only.'
    )
  return proof
