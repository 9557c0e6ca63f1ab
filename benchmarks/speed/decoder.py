"""A decoder in the shape of Gemma-3, its layers scanned.

Root-mean-square norms, rotary positions, grouped queries, a gated feed-forward
layer, and activations kept of one layer at a time, as whoever trains a decoder
of this size has it. A pure function of plain trees of stacks of weights, one
entry a layer; the examples have no decoder.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax


@dataclasses.dataclass(frozen=True)
class Shape:
  """Sizes of a decoder and of its batches."""

  layers: int
  width: int
  heads: int
  key_heads: int
  head: int
  inner: int
  vocabulary: int
  length: int
  batch: int
  microbatch: int
  dtype: jax.typing.DTypeLike = jnp.float32

  @property
  def dense(self) -> dict[str, tuple[int, int]]:
    """Inputs and outputs of the weights of a layer."""
    queries, keys = self.heads * self.head, self.key_heads * self.head
    return {
      'q': (self.width, queries),
      'k': (self.width, keys),
      'v': (self.width, keys),
      'output': (queries, self.width),
      'gate': (self.width, self.inner),
      'up': (self.width, self.inner),
      'down': (self.inner, self.width),
    }


ADAPTED = ('q', 'k', 'v', 'up', 'down')
SHAPES = {
  'gemma': Shape(
    34, 2560, 8, 4, 256, 10240, 262_144, 256, 64, 4, dtype=jnp.bfloat16
  ),
  'small': Shape(6, 384, 6, 6, 64, 1536, 1000, 64, 32, 8),
  # All weights of one shape: one group to compile.
  'smoke': Shape(2, 16, 4, 4, 4, 16, 50, 8, 4, 2),
}


def weights(shape: Shape, key: jax.Array) -> dict[str, Any]:
  """Random frozen weights, each kind stacked over the layers."""
  keys = iter(jax.random.split(key, len(shape.dense) + 1))
  layers: dict[str, Any] = {
    name: (
      jax.random.normal(next(keys), (shape.layers, *size), shape.dtype)
      * size[0] ** -0.5
    )
    for name, size in shape.dense.items()
  }
  ones = jnp.ones((shape.layers, shape.width), shape.dtype)
  layers |= {'attention_norm': ones, 'mlp_norm': ones}
  words = (shape.vocabulary, shape.width)
  return {
    'layers': layers,
    'words': 0.02 * jax.random.normal(next(keys), words, shape.dtype),
  }


def adapters(shape: Shape, rank: int, key: jax.Array) -> dict[str, Any]:
  """The usual start: ``lora_a`` at random and ``lora_b`` zero."""
  return {
    name: {
      'lora_a': jax.random.normal(k, (shape.layers, shape.dense[name][0], rank))
      * shape.dense[name][0] ** -0.5,
      'lora_b': jnp.zeros((shape.layers, rank, shape.dense[name][1])),
    }
    for name, k in zip(ADAPTED, jax.random.split(key, 5), strict=True)
  }


def _normalized(scale: jax.Array, x: jax.Array) -> jax.Array:
  """Divides by the root of the mean square of the last axis."""
  squares = jnp.mean(jnp.square(x.astype(jnp.float32)), -1, keepdims=True)
  return scale * (x * jax.lax.rsqrt(squares + 1e-6)).astype(x.dtype)


def _rotated(x: jax.Array) -> jax.Array:
  """Rotary positions for (batch, length, heads, head)."""
  half = x.shape[-1] // 2
  angles = jnp.arange(x.shape[1])[:, None] * 1e4 ** (-jnp.arange(half) / half)
  cosine, sine = (
    f(angles)[:, None, :].astype(x.dtype) for f in (jnp.cos, jnp.sin)
  )
  a, b = jnp.split(x, 2, axis=-1)
  return jnp.concatenate([a * cosine - b * sine, b * cosine + a * sine], -1)


def make_loss(shape: Shape) -> Callable[[Any, Any, jax.Array], jax.Array]:
  """``loss(params, frozen, tokens)``: mean next-token cross-entropy.

  ``tokens`` are (batch, length + 1). Dense layers see (batch * length, width).
  """

  def layer(x, both):
    fixed, trained = both
    rows, length = x.shape[0] // shape.length, shape.length

    def dense(name, x):
      y = x @ fixed[name]
      if name in trained:
        a, b = (
          trained[name][leaf].astype(x.dtype) for leaf in ('lora_a', 'lora_b')
        )
        y = y + (x @ a) @ b
      return y

    y = _normalized(fixed['attention_norm'], x)
    q, k, v = (
      dense(name, y).reshape(rows, length, -1, shape.head)
      for name in ('q', 'k', 'v')
    )
    mixed = jax.nn.dot_product_attention(
      _rotated(q), _rotated(k), v, is_causal=True
    )
    x = x + dense('output', mixed.reshape(rows * length, -1))
    y = _normalized(fixed['mlp_norm'], x)
    return x + dense('down', jax.nn.gelu(dense('gate', y)) * dense('up', y))

  def loss(params, frozen, tokens):
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    x = frozen['words'][inputs].reshape(-1, shape.width)
    # Activations of one layer at a time are kept, as whoever trains it would.
    x, _ = jax.lax.scan(
      jax.checkpoint(lambda x, both: (layer(x, both), None)),
      x,
      (frozen['layers'], params),
    )
    x = _normalized(jnp.ones((), x.dtype), x)
    logits = (x @ frozen['words'].T).astype(jnp.float32)
    return jnp.mean(
      optax.softmax_cross_entropy_with_integer_labels(logits, targets.ravel())
    )

  return loss
