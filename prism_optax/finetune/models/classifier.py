"""An encoder with a linear head, and its split into trained and frozen."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx


class HeadParam(nnx.Param[jax.Array]):
  """Marks the head, which is trained beside the adapters."""


TRAINED = nnx.LoRAParam, HeadParam


def logits_of(
  features: jax.Array, kernel: jax.Array, bias: jax.Array, temperature: float
) -> jax.Array:
  """Logits from normalised features.

  The features of a sentence are divided by their norm: on raw features (norm
  5 for MiniLM) the gradient of the head takes nearly the whole clipping norm
  of an example and starves the adapters.

  Args:
    features: ``(batch, hidden)``, of any norm.
    kernel: ``(hidden, classes)``, or a copy for each example, ``(batch, hidden,
      classes)``.
    bias: ``(classes,)`` or ``(batch, classes)``.
    temperature: The factor of the logits.

  Returns:
    ``(batch, classes)``.
  """
  # The floor keeps the gradient finite where an input has no token.
  square = jnp.sum(features**2, axis=1, keepdims=True)
  features = features * jax.lax.rsqrt(jnp.maximum(square, 1e-12))
  # A row each: the head may be copies, one for each example.
  logits = (features[..., None, :] @ kernel).squeeze(-2)
  return temperature * (logits + bias)


class Classifier(nnx.Module):
  """An encoder and a linear head on its normalised features."""

  def __init__(
    self,
    encoder: Any,
    hidden: int,
    classes: int,
    temperature: float,
    rngs: nnx.Rngs,
  ):
    self.encoder = encoder
    self.temperature = temperature
    # Not zero: the adapters would have no gradient at the first step.
    self.kernel = HeadParam(
      nnx.initializers.orthogonal()(rngs.params(), (hidden, classes))
    )
    self.bias = HeadParam(jnp.zeros(classes))

  def __call__(self, inputs: jax.Array) -> jax.Array:
    """``(batch, ...)`` inputs to ``(batch, classes)`` logits."""
    head = self.kernel[...], self.bias[...]
    return logits_of(self.encoder(inputs), *head, self.temperature)


def split(model: nnx.Module, trained: Any = TRAINED) -> tuple[Any, Any, Any]:
  """Returns ``(graphdef, trained, frozen)`` for ``nnx.merge``."""
  parts: Any = nnx.split(model, trained, ...)
  return parts[0], parts[1], parts[2]
