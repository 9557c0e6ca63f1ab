"""A tiny language model in the layout of the hub, with random weights."""

import json
import pathlib

import numpy as np
import safetensors.numpy
import tokenizers

# No two sizes are alike, so that swapped axes cannot hide.
CONFIG = {
  'model_type': 'llama', 'vocab_size': 40, 'hidden_size': 16,
  'intermediate_size': 24, 'num_hidden_layers': 3, 'num_attention_heads': 4,
  'num_key_value_heads': 2, 'max_position_embeddings': 64, 'rms_norm_eps': 1e-5,
  'rope_theta': 1e4, 'hidden_act': 'silu', 'tie_word_embeddings': False,
  'eos_token_id': 2,
}  # fmt: skip
TEMPLATE = (
  '{% for m in messages %}{% if not m %}{% break %}{% endif %}'
  "<s>{{ m['role'] }} {{ m['content'] }}</s>"
  '{% endfor %}{% if add_generation_prompt %}<s>assistant {% endif %}'
)
WORDS = ('user', 'assistant', 'two', 'plus', 'three', 'is', 'five', 'four')


def tensors(config: dict, seed: int = 0) -> dict[str, np.ndarray]:
  """Random weights under the names of the hub, kernels as (out, in)."""
  rng = np.random.default_rng(seed)
  width, inner = config['hidden_size'], config['intermediate_size']
  heads = config['num_attention_heads']
  dim = config.get('head_dim', width // heads)
  queries, keys = heads * dim, config['num_key_value_heads'] * dim
  shapes = {
    'model.embed_tokens': (config['vocab_size'], width),
    'lm_head': (config['vocab_size'], width),
    'model.norm': (width,),
  }
  if config['tie_word_embeddings']:
    del shapes['lm_head']
  normed = 'qk' if config['model_type'] == 'qwen3' else ''
  for i in range(config['num_hidden_layers']):
    shapes |= {
      f'model.layers.{i}.{name}': shape
      for name, shape in {
        'input_layernorm': (width,), 'self_attn.q_proj': (queries, width),
        'self_attn.k_proj': (keys, width), 'self_attn.v_proj': (keys, width),
        'self_attn.o_proj': (width, queries),
        'post_attention_layernorm': (width,), 'mlp.gate_proj': (inner, width),
        'mlp.up_proj': (inner, width), 'mlp.down_proj': (width, inner),
        **{f'self_attn.{x}_norm': (dim,) for x in normed},
      }.items()
    }  # fmt: skip
  return {
    f'{name}.weight': rng.normal(size=shape, scale=0.3).astype(np.float32)
    for name, shape in shapes.items()
  }


def word_level(*vocabulary: str, unknown: str) -> tokenizers.Tokenizer:
  """A token for each of some words."""
  ids = {word: i for i, word in enumerate(vocabulary)}
  model = tokenizers.models.WordLevel(ids, unk_token=unknown)
  result = tokenizers.Tokenizer(model)
  result.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
  return result


def tokenizer() -> tokenizers.Tokenizer:
  special = ['<pad>', '<s>', '</s>']
  result = word_level(*special, '<unk>', *WORDS, unknown='<unk>')
  result.add_special_tokens(special)
  # All of which the program decides by itself.
  result.enable_padding(length=30)
  result.enable_truncation(4)
  around = tokenizers.processors.BertProcessing(('</s>', 2), ('<s>', 1))
  result.post_processor = around
  return result


def write(folder: pathlib.Path, config: dict = CONFIG) -> pathlib.Path:
  """All files of a small model."""
  folder.mkdir(parents=True, exist_ok=True)
  (folder / 'config.json').write_text(json.dumps(config))
  end = '{"eos_token": {"content": "</s>"}}'
  (folder / 'tokenizer_config.json').write_text(end)
  (folder / 'chat_template.jinja').write_text(TEMPLATE)
  tokenizer().save(str(folder / 'tokenizer.json'))
  safetensors.numpy.save_file(tensors(config), folder / 'model.safetensors')
  return folder
