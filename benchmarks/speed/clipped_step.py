"""A private step with jax-privacy's clip in front of a method."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax_privacy
import optax

from benchmarks.common import methods
from prism_optax import lora


def make(
  name: str,
  loss: Callable,
  params: Any,
  *,
  batch: int,
  microbatch: int,
  layout: lora.Layout | None = None,
  has_aux: bool = False,
):
  """A step of clip norm and noise multiplier one.

  Args:
    name: Key of ``methods.METHODS``.
    loss: ``loss(params, frozen, batch)``.
    params: The trainable parameters.
    batch: Rows of a batch.
    microbatch: Rows at once.
    layout: How the pairs are found.
    has_aux: Whether the loss returns a pair.

  Returns:
    The parameters to start with and the state, and ``step(carried, fixed)`` of
    these and of ``(frozen, batch)``.
  """
  method, layout = methods.METHODS[name], layout or lora.Layout()
  release = methods.Release(1.0, batch, 1.0 / batch, jax.random.key(0))

  def step(carried, fixed):
    params, state = carried
    clipped = jax_privacy.clipped_grad(
      loss,
      has_aux=has_aux,
      # A norm in float32 may be off by a few roundings: stay inside.
      l2_clip_norm=release.clip * (1 - 1e-6),
      normalize_by=batch,
      batch_argnums=2,
      pre_clipping_transform=method.coordinates(params, release, layout),
      microbatch_size=microbatch,
      dtype=jnp.float32,
    )(params, *fixed)
    mean = clipped[0] if has_aux else clipped
    tx = method.make(1e-3, release, params, layout)
    updates, state = tx.update(mean, state, params)
    return optax.apply_updates(params, updates), state

  start = method.prepare(params, layout)
  return (start, method.make(1e-3, release, params, layout).init(start)), step
