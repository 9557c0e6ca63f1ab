"""The real PEFT on a tiny random transformer: the same logits either way.

Needs torch, peft and transformers, which nothing else here does. To run it::

  pip install torch peft transformers
  pytest -m slow tests/lora/peft_torch_test.py
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prism_optax import lora

peft, torch, transformers = (
  pytest.importorskip(name, reason=f'{name} is not installed.')
  for name in ('peft', 'torch', 'transformers')
)

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures('x64')]

LAYERS, WIDTH, HEADS, KV_HEADS, HIDDEN, VOCABULARY = 2, 16, 4, 2, 24, 32
DIM = WIDTH // HEADS
TOKENS = np.array([[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8, 2, 8, 1, 8]])
NAMES = {
  'layers/q': 'model.layers.{}.self_attn.q_proj',
  'layers/v': 'model.layers.{}.self_attn.v_proj',
  'layers/down': 'model.layers.{}.mlp.down_proj',
}
TARGETS = ['q_proj', 'v_proj', 'down_proj']
# PyTorch's norms, rotations and softmax are in float32 also in a float64 model.
TOLERANCE = 2e-6


def _model():
  torch.manual_seed(0)
  config = transformers.LlamaConfig(
    vocab_size=VOCABULARY,
    hidden_size=WIDTH,
    intermediate_size=HIDDEN,
    num_hidden_layers=LAYERS,
    num_attention_heads=HEADS,
    num_key_value_heads=KV_HEADS,
    max_position_embeddings=32,
    attn_implementation='eager',
  )
  model = transformers.LlamaForCausalLM(config).double().eval()
  for parameter in model.parameters():  # Norms too: ones would hide a mistake.
    torch.nn.init.normal_(parameter, std=0.3)
  return model


def _torch_logits(model):
  with torch.no_grad():
    return model.double().eval()(torch.tensor(TOKENS)).logits.numpy()


# The same model in JAX: layers stacked, heads split.


def _weights(model):
  """Kernels (*stack, in, *out) from the state of the PyTorch model."""
  state = {k: x.numpy() for k, x in model.state_dict().items()}

  def stacked(name, *shape):
    layers = [state[f'model.layers.{i}.{name}.weight'] for i in range(LAYERS)]
    return jnp.stack([x.T.reshape(shape) for x in layers])

  return {
    'layers': {
      'q': {'kernel': stacked('self_attn.q_proj', WIDTH, HEADS, DIM)},
      'k': {'kernel': stacked('self_attn.k_proj', WIDTH, KV_HEADS, DIM)},
      'v': {'kernel': stacked('self_attn.v_proj', WIDTH, KV_HEADS, DIM)},
      'o': {'kernel': stacked('self_attn.o_proj', WIDTH, WIDTH)},
      'gate': {'kernel': stacked('mlp.gate_proj', WIDTH, HIDDEN)},
      'up': {'kernel': stacked('mlp.up_proj', WIDTH, HIDDEN)},
      'down': {'kernel': stacked('mlp.down_proj', HIDDEN, WIDTH)},
      'norm_1': stacked('input_layernorm', WIDTH),
      'norm_2': stacked('post_attention_layernorm', WIDTH),
    },
    'table': jnp.asarray(state['model.embed_tokens.weight']),
    'norm': jnp.asarray(state['model.norm.weight']),
    'head': jnp.asarray(state['lm_head.weight'].T),
  }


def _rms_norm(x, scale):
  return scale * x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)


def _rotated(x):
  """Rotary positions, (batch, length, heads, dim)."""
  frequencies = 10_000.0 ** (-jnp.arange(0, DIM, 2) / DIM)
  angles = jnp.arange(x.shape[1])[:, None] * jnp.tile(frequencies, 2)
  half = jnp.concatenate([-x[..., DIM // 2 :], x[..., : DIM // 2]], -1)
  return x * jnp.cos(angles)[:, None] + half * jnp.sin(angles)[:, None]


def _logits(weights):
  """Reads kernels alone: adapters are merged before."""
  x = weights['table'][TOKENS]
  mask = jnp.tril(jnp.ones((TOKENS.shape[1],) * 2, bool))
  for i in range(LAYERS):
    w = jax.tree.map(lambda leaf, i=i: leaf[i], weights['layers'])
    h = _rms_norm(x, w['norm_1'])
    q, k, v = (jnp.einsum('bti,ihd->bthd', h, w[n]['kernel']) for n in 'qkv')
    k, v = (jnp.repeat(y, HEADS // KV_HEADS, 2) for y in (_rotated(k), v))
    scores = jnp.einsum('bthd,bshd->bhts', _rotated(q), k) / DIM**0.5
    attention = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf), -1)
    mixed = jnp.einsum('bhts,bshd->bthd', attention, v)
    x = x + mixed.reshape(*x.shape) @ w['o']['kernel']
    h = _rms_norm(x, w['norm_2'])
    gated = jax.nn.silu(h @ w['gate']['kernel']) * (h @ w['up']['kernel'])
    x = x + gated @ w['down']['kernel']
  return np.asarray(_rms_norm(x, weights['norm']) @ weights['head'])


def _adapters(ranks, dtype=jnp.float32, seed=1):
  rng = np.random.default_rng(seed)
  shapes = {
    'q': (WIDTH, (HEADS, DIM)), 'v': (WIDTH, (KV_HEADS, DIM)),
    'down': (HIDDEN, (WIDTH,)),
  }  # fmt: skip
  return {
    'layers': {
      name: {
        'lora_a': jnp.asarray(rng.normal(size=(LAYERS, n, rank)) / 4, dtype),
        'lora_b': jnp.asarray(rng.normal(size=(LAYERS, rank, *out)) / 4, dtype),
      }
      for (name, (n, out)), rank in zip(shapes.items(), ranks, strict=True)
    }
  }


def _layout(*scales):
  """b is (L, r, heads, dim) for q and v: only names say which axis is what."""
  return [
    lora.Pair(
      f'layers/{name}/lora_a',
      f'layers/{name}/lora_b',
      lora.Layout(-1, 1, (0,), (0,), scale=scale),
    )
    for name, scale in zip(('q', 'v', 'down'), scales, strict=True)
  ]


def _assert_same(got, want, plain):
  assert np.abs(got - want).max() < TOLERANCE * np.abs(want).max()
  assert np.abs(want - plain).max() > 0.1  # The adapter does something.


def test_the_reading_of_the_model_is_right():
  model = _model()
  want = _torch_logits(model)
  got = _logits(_weights(model))
  assert np.abs(got - want).max() < TOLERANCE * np.abs(want).max()


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
  'options',
  [
    {'r': 2, 'lora_alpha': 8},
    {
      'r': 2,
      'lora_alpha': 8,
      'rank_pattern': {'v_proj': 3},
      'alpha_pattern': {'^model.layers.\\d.self_attn.q_proj': 5},
    },
    {'r': 3, 'lora_alpha': 6, 'use_rslora': True},
  ],
)
def test_what_peft_saved_gives_the_logits_of_peft(tmp_path, options, dtype):
  model = _model()
  weights, plain = _weights(model), _torch_logits(model)
  theirs = peft.get_peft_model(
    model, peft.LoraConfig(target_modules=TARGETS, **options)
  )
  for name, parameter in theirs.named_parameters():
    if 'lora_' in name:
      with torch.no_grad():
        value = 0.3 * torch.randn_like(parameter)
        parameter.copy_(value.to(dtype))  # Values that the type can hold.
  theirs.to(dtype).save_pretrained(tmp_path)
  theirs = peft.PeftModel.from_pretrained(_model(), tmp_path)
  want = _torch_logits(theirs)

  adapter = lora.load_peft(tmp_path)
  assert adapter.params['model.layers.0.self_attn.q_proj'][
    'lora_a'
  ].dtype == jnp.dtype(str(dtype).removeprefix('torch.'))
  ranks = [
    adapter.params[NAMES[f'layers/{name}'].format(0)]['lora_a'].shape[1]
    for name in ('q', 'v', 'down')
  ]
  layout = _layout(1.0, 2.0, 4.0)  # The model's own; not those of the file.
  params = lora.from_peft(
    adapter, _adapters(ranks, jnp.float64), names=NAMES, layout=layout
  )
  _assert_same(_logits(lora.merge(params, weights, layout=layout)), want, plain)
