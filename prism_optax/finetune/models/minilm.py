"""The encoder of all-MiniLM-L6-v2 in Flax, read from safetensors.

A BERT encoder (Devlin et al., arXiv:1810.04805, post-layer-norm) with six
layers of width 384, distilled as in MiniLM (arXiv:2002.10957); a sentence is
the mean of its tokens. Only inference-time behaviour: no dropout, which would
also put randomness that nobody accounted for into a per-example gradient.
"""

import dataclasses
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy
import tokenizers
from flax import nnx

from .. import files
from . import layers, sizes


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
  def read(cls, folder: pathlib.Path) -> 'Config':
    """Reads ``config.json``.

    Raises:
      ValueError: If it is no JSON object with a positive number for each field.
    """
    path = folder / 'config.json'
    stored = files.read_json(path)
    values = {
      field.name: sizes.positive(
        stored,
        field.name,
        str(path),
        types=(int, float) if field.type in (float, 'float') else (int,),
      )
      for field in dataclasses.fields(cls)
    }
    return cls(**values)


# The sizes of all-MiniLM-L6-v2.
ALL_MINILM_L6_V2 = Config(
  vocab_size=30522,
  hidden_size=384,
  num_hidden_layers=6,
  num_attention_heads=12,
  intermediate_size=1536,
  max_position_embeddings=512,
  layer_norm_eps=1e-12,
)


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
    first = num_layers - (
      num_layers if self.top_layers is None else self.top_layers
    )
    return self.rank if target in self.targets and layer >= first else 0


class Layer(nnx.Module):
  """Attention and a feed-forward layer, each followed by a layer norm."""

  def __init__(
    self, config: Config, lora: LoraConfig, index: int, rngs: nnx.Rngs
  ):
    # The kernels are overwritten by the stored ones: zeros cost no time.
    zeros = nnx.initializers.zeros_init()

    def rank(target):
      return lora.rank_of(target, index, config.num_hidden_layers)

    width, heads = config.hidden_size, config.num_attention_heads
    options: dict[str, Any] = {'rngs': rngs, 'kernel_init': zeros}
    self.attention = layers.Attention(
      width, heads, rank=rank('attention'), **options
    )
    self.attention_norm = _norm(config, rngs)
    self.mlp = layers.FeedForward(
      width, config.intermediate_size, rank=rank('mlp'), **options
    )
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
    self, config: Config, lora: LoraConfig = LoraConfig(), *, rngs: nnx.Rngs
  ):
    self.hidden_size = config.hidden_size

    zeros = nnx.initializers.zeros_init()
    options: dict[str, Any] = {'embedding_init': zeros, 'rngs': rngs}
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


def stored_names(num_layers: int) -> dict[tuple[Any, ...], str]:
  """Path in our module -> name in ``model.safetensors``, without suffix."""
  names: dict[tuple[Any, ...], str] = {('norm',): 'embeddings.LayerNorm'}
  inside = {
    ('attention', 'query'): 'attention.self.query',
    ('attention', 'key'): 'attention.self.key',
    ('attention', 'value'): 'attention.self.value',
    ('attention', 'output'): 'attention.output.dense',
    ('attention_norm',): 'attention.output.LayerNorm',
    ('mlp', 'up'): 'intermediate.dense',
    ('mlp', 'down'): 'output.dense',
    ('mlp_norm',): 'output.LayerNorm',
  }
  for i in range(num_layers):
    for path, name in inside.items():
      names['layers', i, *path] = f'encoder.layer.{i}.{name}'
  return names


def load(
  folder: pathlib.Path,
  lora: LoraConfig = LoraConfig(),
  rngs: nnx.Rngs | None = None,
) -> Encoder:
  """Reads the encoder from a folder in the layout of the Hugging Face hub.

  Args:
    folder: Holds ``config.json`` and ``model.safetensors``.
    lora: Where adapters are put; they start as no change at all.
    rngs: Source of the adapters' initial values, which are public.

  Returns:
    The encoder with the stored weights in float32.

  Raises:
    ValueError: If a weight is missing or has another shape than
      ``config.json`` says, or a LoRA rank does not fit.
  """
  config = Config.read(folder)
  encoder = Encoder(config, lora, rngs=nnx.Rngs(0) if rngs is None else rngs)
  stored = safetensors.numpy.load_file(folder / 'model.safetensors')

  def assign(variable: Any, name: str, transpose: bool = False):
    if name not in stored:
      raise ValueError(f'{folder}/model.safetensors has no weight {name!r}.')
    value = stored[name].astype(np.float32)
    value = value.T if transpose else value
    if value.shape != variable.shape:
      raise ValueError(
        f'{folder}/model.safetensors: {name!r} has shape {value.shape}, '
        f'expected {variable.shape}.'
      )
    variable.set_value(jnp.asarray(value))

  assign(encoder.words.embedding, 'embeddings.word_embeddings.weight')
  assign(encoder.positions.embedding, 'embeddings.position_embeddings.weight')
  # One segment only, so its embedding is a constant of every position.
  segment = stored['embeddings.token_type_embeddings.weight'][0]
  positions = encoder.positions.embedding
  positions.set_value(positions[...] + segment)
  for path, name in stored_names(config.num_hidden_layers).items():
    module: Any = encoder
    for key in path:
      module = module[key] if isinstance(key, int) else getattr(module, key)
    if isinstance(module, nnx.LayerNorm):
      assign(module.scale, f'{name}.weight')
    else:
      # PyTorch keeps (out, in), Flax (in, out).
      assign(module.kernel, f'{name}.weight', transpose=True)
    assign(module.bias, f'{name}.bias')
  return encoder


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
