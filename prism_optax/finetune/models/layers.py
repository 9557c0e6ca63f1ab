"""What both transformers are made of: dense layers with LoRA, attention.

Tokens are flattened to ``(batch * length, hidden)`` before every dense layer:
on CPU XLA runs one plain matrix product more than twice as fast as the same
product with two leading axes.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from prism_optax import lora

# Of what is overwritten by stored weights: it costs no time.
ZEROS = nnx.initializers.zeros_init()


@dataclasses.dataclass(frozen=True)
class LoraConfig:
  """Which layers carry adapters.

  Attributes:
    rank: Rank of every adapter; 0 for none at all.
    targets: Keys of ``command_line.TARGETS``.
    top_layers: Only the last so many layers are adapted; None for all.
  """

  rank: int = 0
  targets: tuple[str, ...] = ('attention', 'mlp')
  top_layers: int | None = None

  def rank_of(self, target: str, layer: int, num_layers: int) -> int:
    is_adapted = target in self.targets and layer >= self.first(num_layers)
    return self.rank if is_adapted else 0

  def first(self, num_layers: int) -> int:
    """The lowest layer that may have adapters."""
    top = self.top_layers
    return 0 if top is None else max(0, num_layers - top)


NO_ADAPTERS = LoraConfig()
# Makes a dense layer of its two sizes.
Maker = Callable[[int, int], nnx.Linear]


class Dense(nnx.Linear):
  """A dense layer, with a pair of LoRA factors where ``rank`` is not zero.

  The factors may be copies, one for each example, as
  ``prism_optax.lora.per_example_gradients`` makes them.

  Args:
    in_features: Size of the last axis of the input.
    out_features: Size of the last axis of the output.
    rank: Rank of the adapter: ``lora_a`` is ``(in_features, rank)`` and
      ``lora_b``, ``(rank, out_features)``, starts at zero.
    rngs: Source of the initial values, which are public.
    **options: Of ``nnx.Linear``, for the frozen part. With the ``param_dtype``
      int8 only the kernel is: :func:`to_int8` gives it and ``kernel_scale``
      (out_features,). The bias is bfloat16.

  Raises:
    ValueError: If ``rank`` is negative or exceeds one of the two sizes.
  """

  def __init__(
    self,
    in_features: int,
    out_features: int,
    *,
    rank: int,
    rngs: nnx.Rngs,
    **options: Any,
  ):
    shape = in_features, out_features
    if not 0 <= rank <= min(shape):
      raise ValueError(
        f'Expected 0 <= rank <= {min(shape)} for a layer of shape {shape}, got '
        f'{rank=}.'
      )
    is_int8 = options.get('param_dtype') == jnp.int8
    if is_int8:
      options['param_dtype'] = jnp.bfloat16
    super().__init__(*shape, rngs=rngs, **options)
    if is_int8:
      self.kernel = nnx.Param(jnp.zeros(shape, jnp.int8))
      self.kernel_scale = nnx.Param(jnp.ones(out_features))
    # Drawn in any case: frozen values do not depend on which layers have one.
    adapter = nnx.LoRA(in_features, rank or 1, out_features, rngs=rngs)
    if rank:
      self.lora = adapter

  # Without the argument for sharding that Flax has.
  def __call__(self, tokens: jax.Array) -> jax.Array:  # type: ignore[override]
    if hasattr(self, 'kernel_scale'):
      # A column has one scale: it can wait until after the product.
      product = tokens @ self.kernel[...].astype(tokens.dtype)
      product = product * self.kernel_scale[...]
      if self.bias is not None:
        product = product + self.bias[...]
    else:
      product = super().__call__(tokens)
    if not hasattr(self, 'lora'):
      return product
    a, b = self.lora.lora_a[...], self.lora.lora_b[...]
    # The encoders flatten (batch, length), the batch in front.
    length = len(tokens) // (len(a) if a.ndim == 3 else 1)
    return product + lora.per_example_product(
      tokens, a, b, tokens_per_example=length
    )


def to_int8(kernel: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Rounds ``(..., in, out)`` to 255 steps between +- the largest of a column.

  Not by qwix: it replaces the weights of the module that calls it, and the
  layers of the decoder are modules only inside of a scan. There it rounded in
  every call, and what lay in memory stayed float32.

  Returns:
    int8 and ``(..., out)`` float32, whose product is off by half a step.
  """
  largest = np.abs(kernel).max(axis=-2)
  scale = np.where(largest > 0, largest, 1).astype(np.float32) / 127
  rounded = np.rint(kernel / scale[..., None, :])
  return rounded.astype(np.int8), scale


class Attention(nnx.Module):
  """Multi-head self-attention over flattened tokens."""

  def __init__(self, hidden: int, heads: int, make: Maker):
    self.heads = heads
    self.query = make(hidden, hidden)
    self.key = make(hidden, hidden)
    self.value = make(hidden, hidden)
    self.output = make(hidden, hidden)

  def __call__(self, tokens: jax.Array, mask: jax.Array) -> jax.Array:
    """Attends within each sequence.

    Args:
      tokens: ``(batch * length, hidden)``.
      mask: ``(batch, length)``, True where there is a token to look at.

    Returns:
      ``(batch * length, hidden)``. A sequence without a single token is
      attended uniformly: finite, and of no use.
    """
    hidden, length = tokens.shape[1], mask.shape[1]
    shape = -1, length, self.heads, hidden // self.heads
    query, key, value = (
      projection(tokens).reshape(shape)
      for projection in (self.query, self.key, self.value)
    )
    scores = jnp.einsum('bqhd,bkhd->bhqk', query, key)
    scores = scores / jnp.sqrt(query.shape[-1]).astype(scores.dtype)
    # The smallest number and not -inf: all of them masked must not be NaN.
    lowest = jnp.finfo(scores.dtype).min
    scores = jnp.where(mask[:, None, None], scores, lowest)
    mixed = jnp.einsum('bhqk,bkhd->bqhd', jax.nn.softmax(scores), value)
    return self.output(mixed.reshape(tokens.shape))


class FeedForward(nnx.Module):
  """Two dense layers around an exact GELU."""

  def __init__(self, hidden: int, inner: int, make: Maker):
    self.up = make(hidden, inner)
    self.down = make(inner, hidden)

  def __call__(self, tokens: jax.Array) -> jax.Array:
    return self.down(jax.nn.gelu(self.up(tokens), approximate=False))


def masked_mean(tokens: jax.Array, mask: jax.Array) -> jax.Array:
  """Mean over the tokens of each sequence.

  Args:
    tokens: ``(batch * length, hidden)``.
    mask: ``(batch, length)``, True where there is a token.

  Returns:
    ``(batch, hidden)``.
  """
  weights = mask.astype(tokens.dtype)
  tokens = tokens.reshape(*mask.shape, -1)
  total = jnp.einsum('bl,blh->bh', weights, tokens)
  # An empty sequence gives zeros and no NaN.
  return total / jnp.maximum(weights.sum(axis=1, keepdims=True), 1)
