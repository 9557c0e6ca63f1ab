"""What a loss is made into: gradients of records, and what is refused."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from prism_optax import diagnostics, lora
from prism_optax.lora import InputMetric
from prism_optax.training._sampling import Batch


def in_coordinates(
  loss: Callable[..., jax.Array], metric: InputMetric, batched: bool
) -> Callable[..., jax.Array]:
  """The loss as a function of the coordinates of a metric."""

  to_params = jax.vmap(metric.to_params) if batched else metric.to_params

  def of_coordinates(coordinates: Any, *data: Any) -> jax.Array:
    return loss(to_params(coordinates), *data)

  return of_coordinates


def _called(
  loss: Callable[..., Any], params: Any, frozen: Any, data: Any
) -> Any:
  """``loss`` of a record; frozen weights stand before it if there are any."""
  example = data if isinstance(data, tuple) else (data,)
  weights = () if frozen is None else (frozen,)
  return loss(params, *weights, *example)


def gradients(
  loss: Callable[..., Any], batched: bool, of_users: bool
) -> Callable[[Any, Any, Any], Any]:
  """``gradients(params, frozen, rows)``, per record or per user."""
  if batched:
    return lambda params, frozen, rows: lora.per_example_gradients(
      lambda copies, batch: _called(loss, copies, frozen, batch)
    )(params, rows)

  def mean_of_user(params: Any, frozen: Any, rows: Any) -> jax.Array:
    examples, is_present = rows
    # The loss of zeros may have a gradient that is not finite, which stays so
    # where its weight is zero: another record of the user's stands in.
    first = jnp.argmax(is_present)

    def filled(x: jax.Array) -> jax.Array:
      here = is_present.reshape(-1, *(1,) * (x.ndim - 1))
      return jnp.where(here, x, x[first])

    examples = jax.tree.map(filled, examples)
    each = jax.vmap(lambda x: _called(loss, params, frozen, x))(examples)
    return jnp.sum(jnp.where(is_present, each, 0)) / jnp.maximum(
      jnp.sum(is_present), 1
    )

  def of_record(params: Any, frozen: Any, example: Any) -> Any:
    return _called(loss, params, frozen, example)

  one = mean_of_user if of_users else of_record
  return jax.vmap(jax.grad(one), (None, None, 0))


def check(
  loss: Callable[..., Any],
  batched: bool,
  params: Any,
  frozen: Any,
  batch: Batch,
) -> None:
  """Refuses a loss of another shape, or one that mixes the records."""
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
    return
  rng = np.random.default_rng(0)  # Of made-up records: nothing private.

  def made_up(x: jax.Array) -> np.ndarray:
    shape = (3, *x.shape[1:])
    if jnp.issubdtype(x.dtype, jnp.floating):
      return rng.normal(size=shape).astype(x.dtype)
    return rng.integers(0, 2, shape).astype(x.dtype)

  of_batch = jax.jit(gradients(loss, True, False))
  if diagnostics.depends_on_other_examples(
    lambda params, rows: of_batch(params, frozen, rows),
    params,
    jax.tree.map(made_up, batch.examples),
  ):
    raise ValueError(
      'The gradient of one record depends on others of its batch, so that the'
      ' clip bounds nothing and no epsilon holds. batched_loss needs losses'
      ' (B,) that use copy i of the parameters and record i alone: no batch'
      ' normalisation, no mean over the batch, no in-batch negatives. Without'
      ' batched_loss records cannot mix.'
    )
