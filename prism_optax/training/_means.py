"""Means over a private batch, for the owner of the data alone."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from prism_optax._types import ArrayTree
from prism_optax.training._program import called, gradients, of_user
from prism_optax.training._settings import Parts
from prism_optax.transforms import tangent_coordinates
from prism_optax.transforms._chain import TangentTransformation


class Means(NamedTuple):
  """Means over the records (or users) of a batch; no epsilon covers them.

  Zeros if nobody was drawn.

  Attributes:
    loss: Of one record.
    gradient_norm: Before the clip, of what is clipped: the gradient, or for
      PRISM its tangent coordinates.
    aux: Of what the loss returned besides, leaf by leaf; ``()`` if nothing.
  """

  loss: jax.Array
  gradient_norm: jax.Array
  aux: ArrayTree


def means(parts: Parts) -> Callable[..., Means]:
  """Makes ``means(params, frozen, examples, is_padding, is_present)``."""
  of_rows = gradients(parts)
  layout = getattr(parts.transformation, 'layout', None)

  def norm(params: ArrayTree, gradient: ArrayTree) -> jax.Array:
    if isinstance(parts.transformation, TangentTransformation):
      gradient = tangent_coordinates(params, layout=layout)(gradient)
    found: jax.Array = optax.tree.norm(gradient)
    return found

  def call(
    params: ArrayTree,
    frozen: ArrayTree,
    examples: ArrayTree,
    is_padding_example: jax.Array,
    is_present: jax.Array | None,
  ) -> Means:
    rows = examples if is_present is None else (examples, is_present)
    size = parts.execution.microbatch_size or len(is_padding_example)

    def part(rows: ArrayTree) -> Means:
      losses, aux = _values(parts, params, frozen, rows)
      found = of_rows(params, frozen, rows)
      return Means(losses, jax.vmap(norm, (None, 0))(params, found), aux)

    # Every so-many-th row, as the step takes them: a split batch stays split.
    split = jax.tree.map(
      lambda x: x.reshape(size, -1, *x.shape[1:]).swapaxes(0, 1), rows
    )
    each = jax.lax.map(part, split)
    counts = ~is_padding_example.reshape(size, -1).T

    def mean(x: jax.Array) -> jax.Array:
      here = counts.reshape(*counts.shape, *(1,) * (x.ndim - 2))
      total = jnp.sum(jnp.where(here, x, 0), (0, 1))
      return total / jnp.maximum(jnp.sum(counts), 1)

    found: Means = jax.tree.map(mean, each)
    return found

  return call


def _values(
  parts: Parts, params: ArrayTree, frozen: ArrayTree, rows: ArrayTree
) -> ArrayTree:
  """The losses and the auxiliary values of rows."""
  if not parts.batched_loss:
    one = of_user if parts.of_users else called
    return jax.vmap(lambda row: one(parts.loss, params, frozen, row))(rows)
  count = len(jax.tree.leaves(rows)[0])
  copies = jax.tree.map(
    lambda x: jnp.broadcast_to(x, (count, *x.shape)), params
  )
  return called(parts.loss, copies, frozen, rows)
