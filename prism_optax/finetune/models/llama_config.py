"""The sizes of a decoder of the Llama family, as ``config.json`` has them."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from . import sizes

FAMILY = ('llama', 'mistral', 'qwen2', 'qwen3')

SIZES = 'vocab_size', 'hidden_size', 'intermediate_size', 'num_hidden_layers'
# Paths of our modules, and what they are called on the hub.
LINEAR = {
  ('attention', 'query'): 'self_attn.q_proj',
  ('attention', 'key'): 'self_attn.k_proj',
  ('attention', 'value'): 'self_attn.v_proj',
  ('attention', 'output'): 'self_attn.o_proj',
  ('mlp', 'gate'): 'mlp.gate_proj',
  ('mlp', 'up'): 'mlp.up_proj',
  ('mlp', 'down'): 'mlp.down_proj',
}
IN_LAYER = LINEAR | {
  ('attention_norm',): 'input_layernorm',
  ('mlp_norm',): 'post_attention_layernorm',
  ('attention', 'query_norm'): 'self_attn.q_norm',
  ('attention', 'key_norm'): 'self_attn.k_norm',
}
OUTSIDE = {
  'embedding': 'model.embed_tokens',
  'head': 'lm_head',
  'norm': 'model.norm',
}


@dataclasses.dataclass(frozen=True)
class RopeScaling:
  """How Llama 3 stretches its slow rotations to longer texts."""

  factor: float
  low_freq_factor: float
  high_freq_factor: float
  original_max_position_embeddings: int


@dataclasses.dataclass(frozen=True)
class Config:
  """What the four members of the family differ in.

  Attributes:
    max_length: Tokens that the model may see at once: its positions, and no
      more than a sliding window, which is not done here.
    head_dim: Features of one head; Qwen 3 has more of them than the width.
    rope_scaling: None for plain rotary positions.
    qkv_bias: Whether queries, keys and values have biases, as in Qwen 2.
    output_bias: Whether the output of the attention has one.
    mlp_bias: Whether the three layers of the feed-forward part have them.
    qk_norm: Whether queries and keys are normalised head by head, as in Qwen 3.
  """

  vocab_size: int
  hidden_size: int
  intermediate_size: int
  num_hidden_layers: int
  num_attention_heads: int
  num_key_value_heads: int
  head_dim: int
  max_length: int
  rms_norm_eps: float
  rope_theta: float
  rope_scaling: RopeScaling | None
  tie_word_embeddings: bool
  qkv_bias: bool
  output_bias: bool
  mlp_bias: bool
  qk_norm: bool

  @classmethod
  def from_dict(cls, stored: Mapping[str, Any], where: str) -> 'Config':
    """Reads the entries of a ``config.json``.

    Args:
      stored: The entries, of any version of ``transformers``.
      where: Name of the file, for messages.

    Raises:
      ValueError: If the model is of another family, a size is missing or not
        positive, or the model does what the decoder here does not.
    """
    kind = stored.get('model_type')
    if kind not in FAMILY:
      raise ValueError(
        f'{where}: expected model_type of {FAMILY}, got {kind!r}.'
      )
    activation = stored.get('hidden_act', 'silu')
    if activation != 'silu':
      raise ValueError(
        f"{where}: expected hidden_act 'silu', got {activation!r}."
      )

    def number(name, default=None, types=(int,), entries=stored) -> Any:
      return sizes.positive(entries, name, where, types, default)

    heads = number('num_attention_heads')
    key_value_heads = number('num_key_value_heads', heads)
    if heads % key_value_heads:
      raise ValueError(
        f'{where}: expected num_attention_heads to be a multiple of '
        f'num_key_value_heads, got {heads} and {key_value_heads}.'
      )
    rope = _rope(stored, where)
    theta = number('rope_theta', 1e4, (int, float), {**stored, **rope})
    bias = stored.get('attention_bias', False)
    return cls(
      **{name: number(name) for name in SIZES},
      num_attention_heads=heads,
      num_key_value_heads=key_value_heads,
      head_dim=number('head_dim', number('hidden_size') // heads),
      max_length=_max_length(stored, number('max_position_embeddings')),
      rms_norm_eps=number('rms_norm_eps', 1e-6, (int, float)),
      rope_theta=float(theta),
      rope_scaling=_scaling(rope, where),
      tie_word_embeddings=stored.get('tie_word_embeddings', False),
      qkv_bias=kind == 'qwen2' or bias,
      # Qwen 2 has no such option: biases in three of the four, always.
      output_bias=kind != 'qwen2' and bias,
      mlp_bias=stored.get('mlp_bias', False),
      qk_norm=kind == 'qwen3',
    )


def _max_length(stored: Mapping[str, Any], positions: int) -> int:
  window = stored.get('sliding_window')
  # Mistral has no switch; Qwen names a window that is off unless it says so.
  active = stored.get('use_sliding_window', stored['model_type'] == 'mistral')
  return min(positions, window) if active and window else positions


def _rope(stored: Mapping[str, Any], where: str) -> Mapping[str, Any]:
  """``rope_parameters``, or ``rope_scaling`` as it was called before."""
  rope = stored.get('rope_parameters') or stored.get('rope_scaling') or {}
  if not isinstance(rope, Mapping):
    raise ValueError(f'{where}: expected rope_scaling to be an object.')
  return rope


def _scaling(rope: Mapping[str, Any], where: str) -> RopeScaling | None:
  kind = rope.get('rope_type', rope.get('type', 'default'))
  if kind == 'default':
    return None
  if kind != 'llama3':
    raise ValueError(
      f"{where}: expected the rope_type 'default' or 'llama3', got {kind!r}."
    )
  fields = [field.name for field in dataclasses.fields(RopeScaling)]
  missing = [name for name in fields if name not in rope]
  if missing:
    raise ValueError(f'{where}: rope_scaling lacks {missing}.')
  return RopeScaling(*(rope[name] for name in fields))
