"""A small vision transformer (Dosovitskiy et al., arXiv:2010.11929).

Pre-layer-norm, mean of the tokens instead of a class token; sized for 8x8
pictures of digits, where it trains in seconds on a CPU.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from . import layers


@dataclasses.dataclass(frozen=True)
class Config:
  """Sizes, all in pixels or features."""

  image_size: int = 8
  patch_size: int = 2
  hidden: int = 64
  heads: int = 4
  inner: int = 128
  num_layers: int = 2


class Block(nnx.Module):
  """Attention and a feed-forward layer, each on normalised tokens."""

  def __init__(
    self, config: Config, rank: int, targets: Sequence[str], rngs: nnx.Rngs
  ):
    def make(target):
      own = rank if target in targets else 0
      return functools.partial(layers.Dense, rank=own, rngs=rngs)

    width = config.hidden
    self.attention_norm = nnx.LayerNorm(width, rngs=rngs)
    self.attention = layers.Attention(width, config.heads, make('attention'))
    self.mlp_norm = nnx.LayerNorm(width, rngs=rngs)
    self.mlp = layers.FeedForward(width, config.inner, make('mlp'))

  def __call__(self, tokens: jax.Array, mask: jax.Array) -> jax.Array:
    tokens = tokens + self.attention(self.attention_norm(tokens), mask)
    return tokens + self.mlp(self.mlp_norm(tokens))


class VisionTransformer(nnx.Module):
  """Pictures to one vector each."""

  def __init__(
    self, config: Config, rank: int, targets: Sequence[str], rngs: nnx.Rngs
  ):
    self.config = config
    pixels = config.patch_size * config.patch_size
    self.embed = nnx.Linear(pixels, config.hidden, rngs=rngs)
    patches = (config.image_size // config.patch_size) ** 2
    normal = nnx.initializers.normal(0.02)
    self.positions = nnx.Param(normal(rngs.params(), (patches, config.hidden)))
    self.blocks = nnx.List(
      [Block(config, rank, targets, rngs) for _ in range(config.num_layers)]
    )
    self.norm = nnx.LayerNorm(config.hidden, rngs=rngs)

  def __call__(self, images: jax.Array) -> jax.Array:
    """``(batch, size, size)`` in [0, 1] to ``(batch, hidden)``."""
    batch, patch = images.shape[0], self.config.patch_size
    side = self.config.image_size // patch
    patches = images.reshape(batch, side, patch, side, patch)
    patches = patches.transpose(0, 1, 3, 2, 4).reshape(batch * side**2, -1)
    tokens = self.embed(patches).reshape(batch, side**2, -1)
    tokens = (tokens + self.positions[...]).reshape(batch * side**2, -1)
    mask = jnp.ones((batch, side**2), bool)
    for block in self.blocks:
      tokens = block(tokens, mask)
    return layers.masked_mean(self.norm(tokens), mask)
