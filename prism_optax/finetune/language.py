"""What a causal language model learns by, and what is measured of it."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from . import data, training


def make_loss(graphdef: Any, divisor: int) -> Callable[..., Any]:
  """``loss(params, frozen, inputs, labels) -> (loss, hits)`` of one record.

  Args:
    graphdef: Static part of the model.
    divisor: The loss of a record is the SUM over the tokens of its response,
      in nats, over this declared constant. The mean over a batch's tokens would
      couple records: one with many tokens would change what the others count.
  """

  def loss(params, frozen, inputs, labels):
    model = nnx.merge(graphdef, params, frozen)
    losses, hits, weights = _tokens(model, inputs[None], labels[None])
    hits = jnp.sum(hits * weights) / jnp.maximum(jnp.sum(weights), 1)
    return jnp.sum(losses * weights) / divisor, hits

  return loss


def _tokens(model: Any, inputs: jax.Array, labels: jax.Array):
  """Loss and hit of each token, and whether it counts: ``(batch, length)``."""
  logits = model(inputs)
  weights = labels != data.BLANK
  labels = jnp.where(weights, labels, 0)
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
  used = (evaluation.labels != data.BLANK).any(axis=1)
  rows = jax.tree.map(lambda x: x[used], evaluation)

  @jax.jit
  def totals(params, frozen, inputs, labels, present):
    model = nnx.merge(graphdef, params, frozen)
    losses, hits, weights = _tokens(model, inputs, labels)
    weights = weights * present[:, None]
    return jnp.array([jnp.sum(x * weights) for x in (losses, hits, weights)])

  def evaluate(params, frozen):
    loss, hits, tokens = np.sum(
      [
        np.asarray(totals(params, frozen, *part, present), np.float64)
        for part, present in training.in_chunks(rows, chunk)
      ],
      axis=0,
    )
    return {
      'eval_loss': loss / tokens,
      'eval_perplexity': np.exp(loss / tokens),
      'eval_accuracy': hits / tokens,
    }

  return evaluate
