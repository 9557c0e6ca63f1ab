"""The decoder against ``transformers``, and adapters that PEFT saved.

On small random models. Needs packages that nothing else here does. To run it::

  pip install torch transformers peft
  pytest -m slow tests/finetune/llama_torch_test.py
"""

import numpy as np
import pytest

from prism_optax import lora
from prism_optax.finetune.models import llama_files, pretrained
from tests.finetune import conftest, decoder_oracle, language_models

torch, transformers = (
  pytest.importorskip(name, reason=f'{name} is not installed.')
  for name in ('torch', 'transformers')
)

pytestmark = pytest.mark.slow

SIZES = {
  'vocab_size': 40, 'hidden_size': 24, 'intermediate_size': 40,
  'num_hidden_layers': 2, 'num_attention_heads': 4, 'num_key_value_heads': 2,
  'max_position_embeddings': 64,
}  # fmt: skip
LLAMA_3 = {
  'rope_type': 'llama3', 'rope_theta': 50.0, 'factor': 4.0,
  'low_freq_factor': 1.0, 'high_freq_factor': 4.0,
  'original_max_position_embeddings': 12,  # One rotation of three is a mixture.
}  # fmt: skip
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


IDS = np.random.default_rng(0).integers(SIZES['vocab_size'], size=(2, 30))


def _model(kind='Llama', options=()):
  torch.manual_seed(0)
  config = getattr(transformers, f'{kind}Config')(
    **SIZES | dict(options), attn_implementation='eager'
  )
  model = getattr(transformers, f'{kind}ForCausalLM')(config).eval()
  for parameter in model.parameters():  # Norms too: ones would hide a mistake.
    torch.nn.init.normal_(parameter, std=0.3)
  return model


def _read_anew(model, folder):
  """The model and its source: what a cast did to buffers is in no file."""
  model.save_pretrained(folder, max_shard_size='20KB')
  language_models.tokenizer().save(str(folder / 'tokenizer.json'))
  assert (folder / pretrained.INDEX).exists()  # Sharded.
  model = type(model).from_pretrained(
    folder, dtype=torch.float32, attn_implementation='eager'
  )
  return model, pretrained.find(str(folder))


def _logits(model):
  with torch.no_grad():
    return model.eval()(torch.tensor(IDS)).logits.numpy()


# How a file of another type is read does not depend on the model.
@pytest.mark.parametrize(
  ('name', 'dtype'),
  [*((name, 'float32') for name in MODELS), ('qwen 3', 'bfloat16')],
)
def test_logits_are_those_of_transformers(name, dtype, tmp_path):
  stored = _model(*MODELS[name]).to(getattr(torch, dtype))
  model, source = _read_anew(stored, tmp_path)
  want, decoder = _logits(model), llama_files.load(source)
  found = conftest.run(decoder, IDS)
  # Float32 both: sums of some hundred products in another order.
  np.testing.assert_allclose(found, want, atol=1e-4 * np.abs(want).max())


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
@pytest.mark.parametrize(
  'options',
  [
    {'r': 2, 'lora_alpha': 8},
    {'r': 2, 'lora_alpha': 8, 'rank_pattern': {'v_proj': 3},
     'alpha_pattern': {'^model.layers.\\d.self_attn.q_proj': 5}},
    {'r': 3, 'lora_alpha': 6, 'use_rslora': True},
  ],
)  # fmt: skip
def test_what_peft_saved_gives_the_logits_of_peft(options, dtype, tmp_path):
  peft = pytest.importorskip('peft', reason='peft is not installed.')
  model, source = _read_anew(_model(), tmp_path / 'base')
  plain, config = _logits(model), llama_files.load(source).config
  targets = ['q_proj', 'v_proj', 'down_proj']
  theirs = peft.get_peft_model(
    model, peft.LoraConfig(target_modules=targets, **options)
  )
  for name, parameter in theirs.named_parameters():
    if 'lora_' in name:
      torch.nn.init.normal_(parameter, std=0.3)
  theirs.to(getattr(torch, dtype)).save_pretrained(tmp_path / 'adapter')
  base = type(model).from_pretrained(tmp_path / 'base', dtype=torch.float32)
  want = _logits(peft.PeftModel.from_pretrained(base, tmp_path / 'adapter'))
  adapter = lora.load_peft(tmp_path / 'adapter')
  modules = {}
  for pair in adapter.layout:
    name = pair.a.removesuffix('/lora_a')
    a, b = (np.float64(adapter.params[name][f'lora_{x}']) for x in 'ab')
    modules[name] = {'lora_a': pair.layout.scale * a, 'lora_b': b}
  found = decoder_oracle.logits(config, source.read, IDS, modules)
  np.testing.assert_allclose(found, want, atol=1e-4 * np.abs(want).max())
  assert np.abs(want - plain).max() > 0.1  # The adapter does something.
