"""The weights of a decoder of the Llama family: read, and named for others."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from . import classifier, layers, llama
from .layers import NO_ADAPTERS, LoraConfig
from .llama_config import IN_LAYER, OUTSIDE, Config
from .pretrained import Pretrained


def load(
  source: Pretrained,
  lora: LoraConfig = NO_ADAPTERS,
  *,
  dtype: Any = jnp.float32,
) -> llama.Decoder:
  """Builds the decoder with the stored weights.

  Args:
    source: What :func:`pretrained.find` returned.
    lora: Where adapters are put; they start as no change at all, from public
      values.
    dtype: Type of the frozen weights: float32, bfloat16, or int8 in the dense
      layers, with a scale for each output, and bfloat16 elsewhere.

  Raises:
    ValueError: If a weight is missing or has another shape than the
      configuration says, or a rank does not fit.
  """
  config = Config.from_dict(source.config, f'{source.where}/config.json')

  def build():
    return llama.Decoder(config, lora, dtype=dtype, rngs=nnx.Rngs(0))

  # Shapes only: no second copy of the weights is ever made.
  shapes = nnx.eval_shape(build)
  graphdef, adapters, frozen = classifier.split(shapes, nnx.LoRAParam)
  leaves = {}
  for path, leaf in nnx.to_flat_state(frozen):
    if path[-1] == 'kernel_scale':
      continue  # It comes with the kernel.
    stored = _stored(source, path, leaf.shape, config.num_hidden_layers)
    if leaf.dtype == jnp.int8:
      stored, scale = layers.to_int8(stored)
      leaves[(*path[:-1], 'kernel_scale')] = jnp.asarray(scale)
    leaves[path] = jnp.asarray(stored, leaf.dtype)
  rng = np.random.default_rng(0)
  for path, leaf in nnx.to_flat_state(adapters):
    # ``lora_a`` uniform as He et al. have it, ``lora_b`` zero: no change.
    bound, drawn = np.sqrt(6 / leaf.shape[-2]), np.zeros(leaf.shape)
    if path[-1] == 'lora_a':
      drawn = rng.uniform(-bound, bound, leaf.shape)
    leaves[path] = jnp.asarray(drawn, jnp.float32)

  def filled(state):
    flat = [leaves[path] for path, _ in nnx.to_flat_state(state)]
    return jax.tree.unflatten(jax.tree.structure(state), flat)

  return nnx.merge(graphdef, filled(adapters), filled(frozen))


def _stored(
  source: Pretrained, path: tuple[Any, ...], shape: tuple[int, ...], depth: int
) -> np.ndarray:
  *module, end = path
  if module[0] != 'stacks':
    return source.weight(OUTSIDE[module[0]], end, shape)
  names = _in_stack(module, shape[0], depth)
  return np.stack([source.weight(name, end, shape[1:]) for name in names])


def _in_stack(module: list[Any], size: int, depth: int) -> list[str]:
  """The hub's name of a module in each layer of its stack."""
  _, stack, *inside = module
  first = depth - size if stack else 0
  name = IN_LAYER[tuple(inside)]
  return [f'model.layers.{i}.{name}' for i in range(first, first + size)]


def adapters(params: Any, config: Config) -> dict[str, dict[str, jax.Array]]:
  """``{'model.layers.0.self_attn.q_proj': {'lora_a': (in, r), ...}}``."""
  result: dict[str, dict[str, jax.Array]] = {}
  for (*module, _, factor), leaf in nnx.to_flat_state(params):
    names = _in_stack(module, len(leaf[...]), config.num_hidden_layers)
    for i, name in enumerate(names):
      result.setdefault(name, {})[str(factor)] = leaf[...][i]
  return result
