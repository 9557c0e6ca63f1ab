"""A Llama in NumPy and float64, as the papers write it: what others round."""

from collections.abc import Callable, Mapping

import numpy as np

from prism_optax.finetune.models import llama_config


def logits(
  config: llama_config.Config,
  read: Callable[[str], np.ndarray],
  ids: np.ndarray,
  adapters: Mapping[str, Mapping[str, np.ndarray]],
) -> np.ndarray:
  """Logits of the next token, ``(batch, length, vocabulary)``.

  Args:
    config: Of a model without biases and scaled rotations.
    read: A weight by its name on the hub, ``(out, in)``.
    ids: ``(batch, length)``.
    adapters: ``lora_a`` (in, r) and ``lora_b`` (r, out) by module.
  """
  batch, length = ids.shape
  dim = config.head_dim

  def weight(name: str) -> np.ndarray:
    return np.asarray(read(f'{name}.weight')).astype(np.float64)

  def linear(x: np.ndarray, name: str) -> np.ndarray:
    y = x @ weight(name).T
    if name in adapters:
      a, b = (
        np.asarray(adapters[name][factor], np.float64)
        for factor in ('lora_a', 'lora_b')
      )
      y = y + x @ a @ b
    return y

  def norm(x: np.ndarray, name: str) -> np.ndarray:
    square = np.mean(x**2, axis=-1, keepdims=True)
    return weight(name) * x / np.sqrt(square + config.rms_norm_eps)

  frequencies = config.rope_theta ** -(np.arange(0, dim, 2) / dim)
  angles = (np.arange(length)[:, None] * frequencies)[:, None]

  def rotated(x: np.ndarray) -> np.ndarray:
    first, second = np.split(x, 2, axis=-1)
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate(
      [first * cos - second * sin, second * cos + first * sin], axis=-1
    )

  embedding = weight('model.embed_tokens')
  x = embedding[ids]
  for i in range(config.num_hidden_layers):
    at = f'model.layers.{i}'
    h = norm(x, f'{at}.input_layernorm')
    q, k, v = (
      linear(h, f'{at}.self_attn.{n}_proj').reshape(batch, length, -1, dim)
      for n in 'qkv'
    )
    if config.qk_norm:
      q = norm(q, f'{at}.self_attn.q_norm')
      k = norm(k, f'{at}.self_attn.k_norm')
    shared = q.shape[2] // k.shape[2]
    k, v = (np.repeat(y, shared, axis=2) for y in (rotated(k), v))
    scores = np.einsum('bqhd,bkhd->bhqk', rotated(q), k) / np.sqrt(dim)
    scores = np.where(np.tri(length, dtype=bool), scores, -np.inf)
    shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
    shares /= shares.sum(axis=-1, keepdims=True)
    mixed = np.einsum('bhqk,bkhd->bqhd', shares, v).reshape(batch, length, -1)
    x = x + linear(mixed, f'{at}.self_attn.o_proj')
    h = norm(x, f'{at}.post_attention_layernorm')
    gate = linear(h, f'{at}.mlp.gate_proj')
    inner = gate / (1 + np.exp(-gate)) * linear(h, f'{at}.mlp.up_proj')
    x = x + linear(inner, f'{at}.mlp.down_proj')
  tied = config.tie_word_embeddings
  return norm(x, 'model.norm') @ (embedding if tied else weight('lm_head')).T
