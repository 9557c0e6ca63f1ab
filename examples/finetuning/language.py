"""What a causal language model learns by, and what is measured of it."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from . import data, sampling


def make_loss(graphdef: Any, divisor: int) -> Callable:
  """``loss(params, frozen, batch) -> (loss, hits)`` for records of one batch.

  Args:
    graphdef: Static part of the model.
    divisor: The loss of a record is the SUM over the tokens of its response,
      in nats, over this declared constant. The mean over a batch's tokens would
      couple records: one with many tokens would change what the others count.
  """

  def loss(params, frozen, batch: sampling.Batch):
    losses, hits, weights = _tokens(graphdef, params, frozen, batch)
    # Over the records: the private step gives them one by one.
    mean = jnp.mean(jnp.sum(losses * weights, axis=-1)) / divisor
    hits = jnp.sum(hits * weights, -1) / jnp.maximum(jnp.sum(weights, -1), 1)
    return mean, jnp.mean(hits)

  return loss


def _tokens(graphdef: Any, params: Any, frozen: Any, batch: sampling.Batch):
  """Loss and hit of each token, and whether it counts: ``(batch, length)``."""
  logits = nnx.merge(graphdef, params, frozen)(batch.inputs)
  weights = batch.labels != data.BLANK
  labels = jnp.where(weights, batch.labels, 0)
  losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
  hits = jnp.argmax(logits, axis=-1) == labels
  return losses, hits, weights.astype(losses.dtype)


def make_evaluate(
  graphdef: Any, evaluation: data.Examples, chunk: int
) -> Callable[[Any, Any], dict[str, float]]:
  """Builds ``evaluate(params, frozen)`` over a public set.

  Args:
    graphdef: Static part of the model.
    evaluation: Public rows with at least one token of a response.
    chunk: Rows at once.

  Returns:
    A function that returns, over all tokens of the responses, ``eval_loss``,
    the mean in nats, ``eval_perplexity``, its exponential, and
    ``eval_accuracy``, the fraction that was the likeliest.
  """
  used = np.flatnonzero((evaluation.labels != data.BLANK).any(axis=1))
  indices = np.full(-(-len(used) // chunk) * chunk, -1)
  indices[: len(used)] = used
  batch, _ = sampling.gather(evaluation, indices)
  chunked = jax.tree.map(
    lambda x: jnp.asarray(x.reshape(-1, chunk, *x.shape[1:])), batch
  )

  @jax.jit
  def totals(params, frozen):
    def one(rows):
      losses, hits, weights = _tokens(graphdef, params, frozen, rows)
      return (
        jnp.sum(losses * weights),
        jnp.sum(hits * weights),
        jnp.sum(weights),
      )

    return jax.tree.map(jnp.sum, jax.lax.map(one, chunked))

  def evaluate(params, frozen):
    loss, hits, tokens = map(float, totals(params, frozen))
    return {
      'eval_loss': loss / tokens,
      'eval_perplexity': float(np.exp(loss / tokens)),
      'eval_accuracy': hits / tokens,
    }

  return evaluate
