"""The weights of a decoder of the Llama family: read, and named for others."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from . import classifier, layers, llama
from .llama_config import Config
from .minilm import LoraConfig
from .pretrained import Pretrained

# Paths of our modules in a layer, and the names of the hub's.
LINEAR = {
  ('attention', 'query'): 'self_attn.q_proj',
  ('attention', 'key'): 'self_attn.k_proj',
  ('attention', 'value'): 'self_attn.v_proj',
  ('attention', 'output'): 'self_attn.o_proj',
  ('mlp', 'gate'): 'mlp.gate_proj',
  ('mlp', 'up'): 'mlp.up_proj',
  ('mlp', 'down'): 'mlp.down_proj',
}
NORMS = {
  ('attention_norm',): 'input_layernorm',
  ('mlp_norm',): 'post_attention_layernorm',
  ('attention', 'query_norm'): 'self_attn.q_norm',
  ('attention', 'key_norm'): 'self_attn.k_norm',
}
OUTSIDE = {
  ('embedding', 'embedding'): 'model.embed_tokens.weight',
  ('head', 'embedding'): 'lm_head.weight',
  ('norm', 'scale'): 'model.norm.weight',
}
ENDS = {'kernel': 'weight', 'scale': 'weight', 'bias': 'bias'}


def load(
  source: Pretrained,
  lora: LoraConfig = llama.NO_ADAPTERS,
  *,
  dtype: Any = jnp.float32,
  seed: int = 0,
) -> llama.Decoder:
  """Builds the decoder with the stored weights.

  Args:
    source: What :func:`pretrained.find` returned.
    lora: Where adapters are put; they start as no change at all.
    dtype: Type of the frozen weights: float32, bfloat16, or int8 in the dense
      layers, with a scale for each output, and bfloat16 elsewhere.
    seed: Of the adapters' initial values, which are public.

  Raises:
    ValueError: If a weight is missing or has another shape than the
      configuration says, or a rank does not fit.
  """
  config = Config.from_dict(source.config, f'{source.where}: config.json')

  def build():
    return llama.Decoder(config, lora, dtype=dtype, rngs=nnx.Rngs(seed))

  # Shapes only: no second copy of the weights is ever made.
  shapes = nnx.eval_shape(build)
  graphdef, adapters, frozen = classifier.split(shapes, nnx.LoRAParam)
  leaves = {}
  for path, leaf in nnx.to_flat_state(frozen):
    if path[-1] == 'kernel_scale':
      continue  # It comes with the kernel.
    stored = _stored(source, path, leaf.shape, config, lora)
    if leaf.dtype == jnp.int8:
      stored, scale = layers.to_int8(stored)
      leaves[(*path[:-1], 'kernel_scale')] = jnp.asarray(scale)
    leaves[path] = jnp.asarray(stored, leaf.dtype)
  frozen = _filled(frozen, leaves)
  rng = np.random.default_rng(seed)
  drawn = {
    path: jnp.asarray(_initial(path, leaf.shape, rng))
    for path, leaf in nnx.to_flat_state(adapters)
  }
  return nnx.merge(graphdef, _filled(adapters, drawn), frozen)


def _filled(state: Any, leaves: dict[tuple[Any, ...], jax.Array]) -> Any:
  flat = [leaves[path] for path, _ in nnx.to_flat_state(state)]
  return jax.tree.unflatten(jax.tree.structure(state), flat)


def _initial(
  path: tuple[Any, ...], shape: tuple[Any, ...], rng: np.random.Generator
) -> np.ndarray:
  """``lora_a`` uniform as He et al. have it, ``lora_b`` zero: no change."""
  if path[-1] == 'lora_b':
    return np.zeros(shape, np.float32)
  bound = np.sqrt(6 / shape[-2])
  return rng.uniform(-bound, bound, shape).astype(np.float32)


def stored_names(
  path: tuple[Any, ...], config: Config, lora: LoraConfig
) -> list[str] | str:
  """The hub's name of a leaf; of a stacked one, the name in each layer."""
  if path[0] != 'stacks':
    return OUTSIDE[path]
  _, stack, *module, end = path
  name = (LINEAR | NORMS)[tuple(module)]
  sizes = llama.stack_sizes(config, lora)
  first = sum(sizes[:stack])
  return [
    f'model.layers.{i}.{name}.{ENDS[end]}'
    for i in range(first, first + sizes[stack])
  ]


def _stored(
  source: Pretrained,
  path: tuple[Any, ...],
  shape: tuple[int, ...],
  config: Config,
  lora: LoraConfig,
) -> np.ndarray:
  names = stored_names(path, config, lora)
  expected = shape if isinstance(names, str) else shape[1:]

  def one(name: str) -> np.ndarray:
    if name not in source.names:
      raise ValueError(f'{source.where} has no weight {name!r}.')
    value = source.read(name)
    # PyTorch keeps (out, in), Flax (in, out).
    value = value.T if path[-1] == 'kernel' else value
    if value.shape != expected:
      raise ValueError(
        f'{source.where}: {name!r} has shape {value.shape}, expected '
        f'{expected}.'
      )
    return value

  if isinstance(names, str):
    return one(names)
  return np.stack([one(name) for name in names])


def adapters(
  params: Any, config: Config, lora: LoraConfig
) -> dict[str, dict[str, jax.Array]]:
  """``{'model.layers.0.self_attn.q_proj': {'lora_a': (in, r), ...}}``."""
  result: dict[str, dict[str, jax.Array]] = {}
  for path, leaf in nnx.to_flat_state(params):
    *module, _, factor = path
    names = stored_names((*module, 'kernel'), config, lora)
    for i, name in enumerate(names):
      module_name = name.removesuffix('.weight')
      result.setdefault(module_name, {})[str(factor)] = leaf[...][i]
  return result
