"""A decoder of the Llama family in Flax: Llama, Mistral, Qwen 2 and Qwen 3.

RMS norms, rotary positions, grouped heads and SwiGLU (arXiv:2302.13971, with
the changes of arXiv:2407.21783, 2310.06825, 2407.10671 and 2505.09388). Our
own, because the libraries that have these models bring far more than 200
lines: google-tunix depends on tensorflow-datasets and transformers and has no
reader of GGUF, keras-hub depends on tensorflow-text, and gemma has other
models.

All layers are one module whose leaves have a leading axis: the program, and
the time to compile it, are those of one layer, and PRISM sees one stack of
matrices for each kind of layer. With adapters in the top layers only there are
two such stacks, and nothing is differentiated through the lower one.
"""

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from ..command_line import TARGETS
from . import layers
from .layers import NO_ADAPTERS, LoraConfig
from .llama_config import Config


class Cache(NamedTuple):
  """Keys and values of the tokens so far, ``(layers, batch, length, heads,
  head_dim)`` each; one of these for each stack of layers."""

  keys: jax.Array
  values: jax.Array


def frequencies(config: Config) -> jax.Array:
  """Radians a token of each of the ``head_dim / 2`` rotations."""
  exponents = jnp.arange(0, config.head_dim, 2) / config.head_dim
  plain = config.rope_theta**-exponents
  scaling = config.rope_scaling
  if scaling is None:
    return plain
  # Rotations that are slow on the original length are slowed down by the
  # factor, fast ones are left; between the two bounds it is a mixture.
  turns = scaling.original_max_position_embeddings * plain / (2 * math.pi)
  low, high = scaling.low_freq_factor, scaling.high_freq_factor
  share = jnp.clip((turns - low) / (high - low), 0, 1)
  return plain * (share + (1 - share) / scaling.factor)


def rotate(x: jax.Array, positions: jax.Array, config: Config) -> jax.Array:
  """Turns queries or keys by the positions of their tokens.

  ``x`` is ``(batch, length, heads, head_dim)``, positions ``(batch, length)``.
  The two coordinates of a rotation are half of the features apart, as on the
  Hugging Face hub (GGUF has them side by side).
  """
  angles = positions[..., None, None] * frequencies(config)
  first, second = jnp.split(x, 2, axis=-1)
  cos, sin = jnp.cos(angles), jnp.sin(angles)
  return jnp.concatenate(
    [first * cos - second * sin, second * cos + first * sin], axis=-1
  ).astype(x.dtype)


class Attention(nnx.Module):
  """Causal attention; several queries share a key and a value."""

  def __init__(self, config: Config, rank: int, dtype: Any, rngs: nnx.Rngs):
    self.config = config
    width, dim = config.hidden_size, config.head_dim
    inner = config.num_attention_heads * dim
    shared = config.num_key_value_heads * dim

    make = _dense(rank, dtype, rngs)
    self.query = make(width, inner, use_bias=config.qkv_bias)
    self.key = make(width, shared, use_bias=config.qkv_bias)
    self.value = make(width, shared, use_bias=config.qkv_bias)
    self.output = make(inner, width, use_bias=config.output_bias)
    if config.qk_norm:
      self.query_norm = _norm(config, dim, dtype, rngs)
      self.key_norm = _norm(config, dim, dtype, rngs)

  def __call__(
    self, tokens: jax.Array, positions: jax.Array, cache: Cache | None
  ) -> tuple[jax.Array, Cache | None]:
    """``(batch * length, hidden)`` tokens at ``positions (batch, length)``."""
    batch, length = positions.shape

    def heads(projection):
      return projection(tokens).reshape(batch, length, -1, self.config.head_dim)

    query, key, value = heads(self.query), heads(self.key), heads(self.value)
    if self.config.qk_norm:
      query, key = self.query_norm(query), self.key_norm(key)
    query = rotate(query, positions, self.config)
    key = rotate(key, positions, self.config)
    seen = positions
    if cache is not None:
      # What lies beyond a row's position is of no use yet: it is hidden by the
      # mask until it has been overwritten.
      rows = jnp.arange(batch)[:, None]
      cache = Cache(
        cache.keys.at[rows, positions].set(key.astype(cache.keys.dtype)),
        cache.values.at[rows, positions].set(value.astype(cache.values.dtype)),
      )
      key, value = cache.keys.astype(key.dtype), cache.values.astype(key.dtype)
      seen = jnp.broadcast_to(jnp.arange(key.shape[1]), (batch, key.shape[1]))
    mask = positions[:, None, :, None] >= seen[:, None, None, :]
    mixed = jax.nn.dot_product_attention(query, key, value, mask=mask)
    return self.output(mixed.reshape(batch * length, -1)), cache


class FeedForward(nnx.Module):
  """SwiGLU."""

  def __init__(self, config: Config, rank: int, dtype: Any, rngs: nnx.Rngs):
    bias = config.mlp_bias
    make = functools.partial(_dense(rank, dtype, rngs), use_bias=bias)
    self.gate = make(config.hidden_size, config.intermediate_size)
    self.up = make(config.hidden_size, config.intermediate_size)
    self.down = make(config.intermediate_size, config.hidden_size)

  def __call__(self, tokens: jax.Array) -> jax.Array:
    return self.down(jax.nn.silu(self.gate(tokens)) * self.up(tokens))


class Layer(nnx.Module):
  """Attention and a feed-forward part, each on normalised tokens."""

  def __init__(
    self, config: Config, ranks: dict[str, int], dtype: Any, rngs: nnx.Rngs
  ):
    width = config.hidden_size
    self.attention_norm = _norm(config, width, dtype, rngs)
    self.attention = Attention(config, ranks['attention'], dtype, rngs)
    self.mlp_norm = _norm(config, width, dtype, rngs)
    self.mlp = FeedForward(config, ranks['mlp'], dtype, rngs)

  def __call__(
    self, tokens: jax.Array, positions: jax.Array, cache: Cache | None
  ) -> tuple[jax.Array, Cache | None]:
    mixed, cache = self.attention(self.attention_norm(tokens), positions, cache)
    tokens = tokens + mixed
    return tokens + self.mlp(self.mlp_norm(tokens)), cache


def _dense(rank: int, dtype: Any, rngs: nnx.Rngs) -> Any:
  return functools.partial(
    layers.Dense, rank=rank, rngs=rngs, param_dtype=dtype
  )


def _norm(config: Config, width: int, dtype: Any, rngs: nnx.Rngs):
  return nnx.RMSNorm(
    width,
    epsilon=config.rms_norm_eps,
    param_dtype=_at_least_bfloat16(dtype),
    rngs=rngs,
  )


def _at_least_bfloat16(dtype: Any) -> Any:
  """Only dense layers are int8. Most models come in bfloat16: nothing lost."""
  return jnp.bfloat16 if dtype == jnp.int8 else dtype


class Decoder(nnx.Module):
  """Token ids to the logits of the next token.

  Args:
    config: Sizes.
    lora: Which layers carry adapters, in float32 whatever ``dtype`` is.
    dtype: Type in which the frozen weights are kept; int8 is that of the dense
      layers alone, the others are bfloat16 then. Activations are float32: a
      product takes the wider of its two types.
    rngs: Source of the adapters' initial values, which are public.
  """

  def __init__(
    self,
    config: Config,
    lora: LoraConfig = NO_ADAPTERS,
    *,
    dtype: Any = jnp.float32,
    rngs: nnx.Rngs,
  ):
    self.config = config

    def embedding():
      return nnx.Embed(
        config.vocab_size,
        config.hidden_size,
        param_dtype=_at_least_bfloat16(dtype),
        dtype=jnp.float32,
        rngs=rngs,
      )

    def stack(first: int, end: int):
      ranks = {x: lora.rank_of(x, first, depth) for x in TARGETS}
      make = nnx.vmap(lambda rngs: Layer(config, ranks, dtype, rngs))
      return nnx.split_rngs(splits=end - first)(make)(rngs)

    self.embedding = embedding()
    # Layers without adapters come first.
    depth = config.num_hidden_layers
    bounds = sorted({0, lora.first(depth), depth})
    self.stacks = nnx.List([stack(*x) for x in itertools.pairwise(bounds)])
    self.norm = _norm(config, config.hidden_size, dtype, rngs)
    if not config.tie_word_embeddings:
      self.head = embedding()

  def __call__(
    self,
    ids: jax.Array,
    positions: jax.Array | None = None,
    caches: Sequence[Cache] | None = None,
    *,
    keep: jax.Array | None = None,
  ) -> Any:
    """Logits of the token after each one.

    Args:
      ids: ``(batch, length)`` integers. Padding stands at the end, where no
        token sees it.
      positions: ``(batch, length)``; None for 0, 1, 2 and so on.
      caches: What :func:`empty_caches` or the last call returned.
      keep: ``(batch,)``: only the logits of this place of each row are wanted.

    Returns:
      ``(batch, length, vocabulary)`` float32, or ``(batch, vocabulary)`` with
      ``keep``; with caches a pair of it and the new caches.
    """
    batch, length = ids.shape
    if positions is None:
      positions = jnp.broadcast_to(jnp.arange(length), (batch, length))
    tokens = self.embedding(ids).reshape(batch * length, -1)
    new = []
    for i, stack in enumerate(self.stacks):
      graphdef, state = nnx.split(stack)

      # Kept for the gradient is what enters a layer, not what is inside.
      @jax.checkpoint
      def layer(tokens, leaves, graphdef=graphdef):
        state, cache = leaves
        return nnx.merge(graphdef, state)(tokens, positions, cache)

      cache = None if caches is None else caches[i]
      tokens, cache = jax.lax.scan(layer, tokens, (state, cache))
      new.append(cache)
    tokens = tokens.reshape(batch, length, -1)
    if keep is not None:
      kept = jnp.take_along_axis(tokens, keep[:, None, None], 1)
      tokens = kept.squeeze(1)
    table = self.embedding if self.config.tie_word_embeddings else self.head
    logits = table.attend(self.norm(tokens))
    return logits if caches is None else (logits, new)


def empty_caches(
  model: Decoder, batch: int, length: int, dtype: Any = jnp.float32
) -> list[Cache]:
  """Room for ``length`` tokens of each of ``batch`` rows."""
  config, caches = model.config, []
  for stack in model.stacks:
    layers_ = stack.attention_norm.scale.shape[0]
    shape = layers_, batch, length, config.num_key_value_heads, config.head_dim
    caches.append(Cache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)))
  return caches
