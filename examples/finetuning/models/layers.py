"""What both transformers are made of: dense layers with LoRA, attention.

Tokens are flattened to ``(batch * length, hidden)`` before every dense layer:
on CPU XLA runs one plain matrix product more than twice as fast as the same
product with two leading axes.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from prism_optax import lora

LECUN_NORMAL = nnx.initializers.lecun_normal()

# What --lora-targets may name, and the layers that each name adapts.
TARGETS = {
  'attention': ('query', 'key', 'value', 'output'),
  'mlp': ('up', 'down'),
}


class AdaptedLinear(nnx.LoRALinear):
  """``nnx.LoRALinear`` whose factors may be copies, one for each example.

  As ``prism_optax.lora.per_example_gradients`` makes them.
  """

  def __call__(self, tokens: jax.Array) -> jax.Array:
    a, b = self.lora.lora_a[...], self.lora.lora_b[...]
    examples = len(a) if a.ndim == 3 else 1
    return nnx.Linear.__call__(self, tokens) + lora.per_example_product(
      # The encoders flatten (batch, length), the batch in front.
      tokens, a, b, tokens_per_example=len(tokens) // examples
    )  # fmt: skip


def dense(
  in_features: int,
  out_features: int,
  *,
  rank: int,
  rngs: nnx.Rngs,
  kernel_init: Callable = LECUN_NORMAL,
  **options: Any,
) -> nnx.Linear:
  """A dense layer, with a pair of LoRA factors where ``rank`` is not zero.

  Args:
    in_features: Size of the last axis of the input.
    out_features: Size of the last axis of the output.
    rank: Rank of the adapter: ``lora_a`` is ``(in_features, rank)`` and
      ``lora_b``, ``(rank, out_features)``, starts at zero. 0 gives a plain
      ``nnx.Linear``.
    rngs: Source of the initial values, which are public.
    kernel_init: Initialiser of the frozen kernel.
    **options: Of ``nnx.Linear``, for the frozen part.

  Returns:
    ``AdaptedLinear`` or ``nnx.Linear``; the frozen part has the same names in
    both.

  Raises:
    ValueError: If ``rank`` is negative or exceeds one of the two sizes.
  """
  if not 0 <= rank <= min(in_features, out_features):
    raise ValueError(
      f'Expected 0 <= rank <= {min(in_features, out_features)} for a layer '
      f'of shape {(in_features, out_features)}, got {rank=}.'
    )
  options |= {'kernel_init': kernel_init, 'rngs': rngs}
  if rank == 0:
    return nnx.Linear(in_features, out_features, **options)
  return AdaptedLinear(in_features, out_features, lora_rank=rank, **options)


class Attention(nnx.Module):
  """Multi-head self-attention over flattened tokens."""

  def __init__(
    self,
    hidden: int,
    heads: int,
    *,
    rank: int,
    rngs: nnx.Rngs,
    kernel_init: Callable = LECUN_NORMAL,
  ):
    self.heads = heads

    def make():
      return dense(
        hidden, hidden, rank=rank, rngs=rngs, kernel_init=kernel_init
      )

    self.query, self.key, self.value = make(), make(), make()
    self.output = make()

  def __call__(self, tokens: jax.Array, mask: jax.Array) -> jax.Array:
    """Attends within each sequence.

    Args:
      tokens: ``(batch * length, hidden)``.
      mask: ``(batch, length)``, True where there is a token to look at; or
        ``(batch or 1, length, length)``, True where the token of the second
        axis may look at the one of the last, as in a decoder.

    Returns:
      ``(batch * length, hidden)``. A sequence without a single token is
      attended uniformly: finite, and of no use.
    """
    hidden, length = tokens.shape[-1], mask.shape[-1]
    shape = -1, length, self.heads, hidden // self.heads
    query, key, value = (
      projection(tokens).reshape(shape)
      for projection in (self.query, self.key, self.value)
    )
    visible = mask[:, None, :] if mask.ndim == 2 else mask
    scores = jnp.einsum('bqhd,bkhd->bhqk', query, key)
    scores = scores / jnp.sqrt(query.shape[-1]).astype(scores.dtype)
    # The smallest number and not -inf: all of them masked must not be NaN.
    lowest = jnp.finfo(scores.dtype).min
    scores = jnp.where(visible[:, None], scores, lowest)
    mixed = jnp.einsum('bhqk,bkhd->bqhd', jax.nn.softmax(scores), value)
    return self.output(mixed.reshape(tokens.shape))


class FeedForward(nnx.Module):
  """Two dense layers around an exact GELU."""

  def __init__(
    self,
    hidden: int,
    inner: int,
    *,
    rank: int,
    rngs: nnx.Rngs,
    kernel_init: Callable = LECUN_NORMAL,
  ):
    self.up = dense(
      hidden, inner, rank=rank, rngs=rngs, kernel_init=kernel_init
    )
    self.down = dense(
      inner, hidden, rank=rank, rngs=rngs, kernel_init=kernel_init
    )

  def __call__(self, tokens: jax.Array) -> jax.Array:
    return self.down(jax.nn.gelu(self.up(tokens), approximate=False))


def masked_mean(
  tokens: jax.Array, mask: jax.Array, *, floor: float = 1e-9
) -> jax.Array:
  """Mean over the tokens of each sequence.

  Args:
    tokens: ``(batch * length, hidden)``.
    mask: ``(batch, length)``, True where there is a token.
    floor: Least divisor; an empty sequence gives zeros and no NaN.

  Returns:
    ``(batch, hidden)``.
  """
  weights = mask.astype(tokens.dtype)
  tokens = tokens.reshape(*mask.shape, -1)
  total = jnp.einsum('bl,blh->bh', weights, tokens)
  return total / jnp.maximum(weights.sum(axis=1, keepdims=True), floor)
