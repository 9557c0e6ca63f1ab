"""The encoder of all-MiniLM-L6-v2 in Flax, read from safetensors.

A BERT encoder (Devlin et al., arXiv:1810.04805, post-layer-norm) with six
layers of width 384, distilled as in MiniLM (arXiv:2002.10957); a sentence is
the mean of its tokens. Only inference-time behaviour: no dropout, which would
also put randomness that nobody accounted for into a per-example gradient.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers
from flax import nnx

from . import classifier, layers, sizes
from .layers import NO_ADAPTERS, LoraConfig
from .pretrained import Pretrained


@dataclasses.dataclass(frozen=True)
class Config:
  """Sizes of the encoder, named as in its ``config.json``."""

  vocab_size: int
  hidden_size: int
  num_hidden_layers: int
  num_attention_heads: int
  intermediate_size: int
  max_position_embeddings: int
  layer_norm_eps: float

  @classmethod
  def from_dict(cls, stored: Mapping[str, Any], where: str) -> 'Config':
    """Reads the entries of a ``config.json``.

    Raises:
      ValueError: If one of the fields is no positive number.
    """
    kinds: dict[Any, Any] = {int: (int,), float: (int, float)}
    fields = dataclasses.fields(cls)
    return cls(
      *(sizes.positive(stored, x.name, where, kinds[x.type]) for x in fields)
    )


# Paths of our modules, and what they are called on the hub.
OUTSIDE = {
  'words': 'word_embeddings',
  'positions': 'position_embeddings',
  'norm': 'LayerNorm',
}
IN_LAYER = {
  ('attention', 'query'): 'attention.self.query',
  ('attention', 'key'): 'attention.self.key',
  ('attention', 'value'): 'attention.self.value',
  ('attention', 'output'): 'attention.output.dense',
  ('attention_norm',): 'attention.output.LayerNorm',
  ('mlp', 'up'): 'intermediate.dense',
  ('mlp', 'down'): 'output.dense',
  ('mlp_norm',): 'output.LayerNorm',
}


class Layer(nnx.Module):
  """Attention and a feed-forward layer, each followed by a layer norm."""

  def __init__(
    self, config: Config, lora: LoraConfig, index: int, rngs: nnx.Rngs
  ):
    def make(target):
      rank = lora.rank_of(target, index, config.num_hidden_layers)
      options: dict[str, Any] = {'kernel_init': layers.ZEROS, 'rngs': rngs}
      return functools.partial(layers.Dense, rank=rank, **options)

    width, inner = config.hidden_size, config.intermediate_size
    heads = config.num_attention_heads
    self.attention = layers.Attention(width, heads, make('attention'))
    self.attention_norm = _norm(config, rngs)
    self.mlp = layers.FeedForward(width, inner, make('mlp'))
    self.mlp_norm = _norm(config, rngs)

  def __call__(self, tokens: jax.Array, mask: jax.Array) -> jax.Array:
    tokens = self.attention_norm(tokens + self.attention(tokens, mask))
    return self.mlp_norm(tokens + self.mlp(tokens))


def _norm(config: Config, rngs: nnx.Rngs) -> nnx.LayerNorm:
  return nnx.LayerNorm(
    config.hidden_size, epsilon=config.layer_norm_eps, rngs=rngs
  )


class Encoder(nnx.Module):
  """Token ids to one vector for each sentence."""

  def __init__(
    self, config: Config, lora: LoraConfig = NO_ADAPTERS, *, rngs: nnx.Rngs
  ):
    self.hidden_size = config.hidden_size
    options: dict[str, Any] = {'embedding_init': layers.ZEROS, 'rngs': rngs}
    width, places = config.hidden_size, config.max_position_embeddings
    self.words = nnx.Embed(config.vocab_size, width, **options)
    self.positions = nnx.Embed(places, width, **options)
    self.norm = _norm(config, rngs)
    self.layers = nnx.List(
      [Layer(config, lora, i, rngs) for i in range(config.num_hidden_layers)]
    )

  def __call__(self, ids: jax.Array) -> jax.Array:
    """Encodes sentences.

    Args:
      ids: ``(batch, length)`` integers, 0 is padding.

    Returns:
      ``(batch, hidden)``: means over the tokens, not normalised.
    """
    mask = ids != 0
    tokens = self.words(ids) + self.positions(jnp.arange(ids.shape[1]))
    tokens = self.norm(tokens.reshape(-1, self.hidden_size))
    for layer in self.layers:
      tokens = layer(tokens, mask)
    return layers.masked_mean(tokens, mask)


def _stored_name(module: Sequence[Any]) -> str:
  """The hub's name of a module, by its path in ours."""
  if module[0] != 'layers':
    return f'embeddings.{OUTSIDE[module[0]]}'
  _, i, *inside = module
  return f'encoder.layer.{i}.{IN_LAYER[tuple(inside)]}'


def load(source: Pretrained, lora: LoraConfig = NO_ADAPTERS) -> Encoder:
  """Builds the encoder with the stored weights, in float32.

  Args:
    source: What ``pretrained.find`` returned.
    lora: Where adapters are put; they start as no change at all, from public
      values.

  Raises:
    ValueError: If a weight is missing or has another shape than the
      configuration says, or a LoRA rank does not fit.
  """
  config = Config.from_dict(source.config, f'{source.where}/config.json')
  encoder = Encoder(config, lora, rngs=nnx.Rngs(0))
  _, _, frozen = classifier.split(encoder, nnx.LoRAParam)
  for path, leaf in nnx.to_flat_state(frozen):
    *module, end = path
    stored = source.weight(_stored_name(module), end, leaf.shape)
    leaf.set_value(jnp.asarray(stored, jnp.float32))  # The encoder's own.
  # One segment only, so its embedding is a constant of every position.
  segment = source.read('embeddings.token_type_embeddings.weight')[0]
  positions = encoder.positions.embedding
  positions.set_value(positions[...] + segment)
  return encoder


def adapters(params: Any) -> dict[str, dict[str, jax.Array]]:
  """``{'encoder.layer.0.output.dense': {'lora_a': (in, r), ...}, ...}``."""
  result: dict[str, dict[str, jax.Array]] = {}
  for (*module, _, factor), leaf in nnx.to_flat_state(params):
    result.setdefault(_stored_name(module), {})[str(factor)] = leaf[...]
  return result


def tokenize(
  folder: pathlib.Path, texts: list[str], max_length: int
) -> np.ndarray:
  """Texts to ids, cut and padded with 0 to one length.

  Args:
    folder: Holds ``tokenizer.json``.
    texts: Any strings, lone surrogates included.
    max_length: Number of columns, the two special tokens included: a declared
      constant, never the longest text of a private file.

  Returns:
    ``(len(texts), max_length)`` int32.
  """
  tokenizer = tokenizers.Tokenizer.from_file(str(folder / 'tokenizer.json'))
  tokenizer.enable_truncation(max_length)
  tokenizer.enable_padding(length=max_length)
  # A lone surrogate, legal in JSON, cannot be encoded and would raise: one
  # record must not be able to stop the run.
  clean = [t.encode('utf-8', 'replace').decode('utf-8') for t in texts]
  rows = [e.ids for e in tokenizer.encode_batch_fast(clean)]
  return np.asarray(rows, np.int32).reshape(len(texts), max_length)
