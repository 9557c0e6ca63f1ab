"""The decoder against ``transformers`` on small random models.

Needs torch and transformers, which nothing else here does; see
``tests/lora/peft_torch_test.py``.
"""

import numpy as np
import pytest
from flax import nnx

from prism_optax.finetune.models import llama_files, pretrained
from tests.finetune import language_models

torch, transformers = (
  pytest.importorskip(name, reason=f'{name} is not installed.')
  for name in ('torch', 'transformers')
)

pytestmark = pytest.mark.slow

SIZES = {
  'vocab_size': 40,
  'hidden_size': 24,
  'intermediate_size': 40,
  'num_hidden_layers': 2,
  'num_attention_heads': 4,
  'num_key_value_heads': 2,
  'max_position_embeddings': 64,
}
LLAMA_3 = {
  'rope_type': 'llama3',
  'rope_theta': 50.0,
  'factor': 4.0,
  'low_freq_factor': 1.0,
  'high_freq_factor': 4.0,
  # So that of three rotations one is in each of the three ranges.
  'original_max_position_embeddings': 12,
}
MODELS = {
  'llama': ('Llama', {'attention_bias': True, 'mlp_bias': True}),
  'llama 3': ('Llama', {'rope_parameters': LLAMA_3}),
  'llama 3.2': (
    'Llama',
    {'rope_parameters': LLAMA_3, 'tie_word_embeddings': True},
  ),
  'mistral': ('Mistral', {'sliding_window': None, 'head_dim': 8}),
  'qwen 2.5': ('Qwen2', {'tie_word_embeddings': True}),
  'qwen 3': ('Qwen3', {'head_dim': 10}),
}


# How a file of another type is read does not depend on the model.
@pytest.mark.parametrize(
  ('name', 'dtype'),
  [*((name, 'float32') for name in MODELS), ('qwen 3', 'bfloat16')],
)
def test_logits_are_those_of_transformers(name, dtype, tmp_path):
  kind, more = MODELS[name]
  torch.manual_seed(0)
  config = getattr(transformers, f'{kind}Config')(
    **SIZES | more, attn_implementation='eager'
  )
  model = getattr(transformers, f'{kind}ForCausalLM')(config).eval()
  for parameter in model.parameters():  # Norms too: ones would hide a mistake.
    torch.nn.init.normal_(parameter, std=0.3)
  model.to(getattr(torch, dtype)).save_pretrained(
    tmp_path, max_shard_size='20KB'
  )
  language_models.tokenizer().save(str(tmp_path / 'tokenizer.json'))
  assert (tmp_path / pretrained.INDEX).exists()  # Sharded.
  ids = np.random.default_rng(0).integers(SIZES['vocab_size'], size=(2, 30))
  # Read anew: what a cast did to the rotations' buffers is not in the file.
  model = type(model).from_pretrained(
    tmp_path, dtype=torch.float32, attn_implementation='eager'
  )
  with torch.no_grad():
    want = model.eval()(torch.tensor(ids)).logits.numpy()
  decoder = llama_files.load(pretrained.find(str(tmp_path)))
  found = nnx.jit(lambda model, ids: model(ids))(decoder, ids)
  # Float32 both: sums of some hundred products in another order.
  np.testing.assert_allclose(found, want, atol=1e-4 * np.abs(want).max())
