"""gemma: the adapters that gm.nn.LoRA puts into its layers.

The adapters come from gemma.peft: the einsums of the transformer stand here one
by one, with the equations and shapes of the library's modules. Whole models
need kauldron and with it TensorFlow, two gigabytes; the last test runs where
they are installed.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import prism_optax
from tests.ecosystem import checks

peft = pytest.importorskip('gemma.peft', reason='needs gemma')

D, HEADS, WIDTH, HIDDEN, RANK = 6, 3, 4, 7, 2
# Equation, shape of the weight, shape of one input, axis of the batch in the
# output.
EINSUMS = {
  'q': ('BTD,NDH->BTNH', (HEADS, D, WIDTH), (1, D), 0),
  'kv': ('BSD,CKDH->CBSKH', (2, 1, D, WIDTH), (1, D), 1),
  'attn_vec': ('BTNH,NHD->BTD', (HEADS, WIDTH, D), (1, HEADS, WIDTH), 0),
  'gating': ('...F,NHF->...NH', (2, HIDDEN, D), (1, D), 0),
  'linear': ('...H,HF->...F', (HIDDEN, D), (1, HIDDEN), 0),
}


def _layer(name):
  equation, shape, one, batch_axis = EINSUMS[name]
  module = peft.LoRAEinsumAdapter(
    rank=RANK, einsum_str=equation, shape=shape, dtype=jnp.float32
  )
  shapes = jax.eval_shape(module.init, jax.random.key(0), jnp.ones((1, *one)))
  weight = np.float32(np.random.default_rng(3).standard_normal(shape))

  def apply(params, x):
    x = x.reshape(-1, *one)
    adapter = module.apply({'params': params['layer']['lora']}, x)
    out = jnp.einsum(equation, x, weight) + adapter
    return jnp.moveaxis(out, batch_axis, 0).reshape(len(x), -1)

  tree = {'layer': {'lora': checks.randomised(shapes['params'])}}
  return checks.Layer(tree, apply, int(np.prod(one)))


@pytest.mark.parametrize('name', EINSUMS)
def test_intrinsic_is_the_change_of_the_weight(name):
  checks.intrinsic_is_the_change_of_the_weight(_layer(name))


# What moves them is the same for all, once they are found (above).
@pytest.mark.slow
@pytest.mark.parametrize(
  'name',
  [
    pytest.param(name, marks=() if name == 'q' else pytest.mark.slow)
    for name in EINSUMS
  ],
)
def test_all_adapters_move(name):
  checks.all_adapters_move(_layer(name))


@pytest.mark.slow
def test_they_move_by_the_whole_optimizer():
  checks.all_adapters_move(_layer('kv'), checks.whole_prism)


@pytest.mark.slow
def test_no_frozen_weight_of_a_whole_model_moves():
  pytest.importorskip('kauldron', reason='needs kauldron and TensorFlow')
  from gemma import gm

  config = gm.nn.config.TransformerConfig(
    num_embed=16, embed_dim=8, hidden_dim=12, num_heads=2, head_dim=4,
    num_kv_heads=1, final_logit_softcap=None, use_post_attn_norm=True,
    use_post_ffw_norm=True, attention_types=[gm.nn.AttentionType.GLOBAL] * 2,
  )  # fmt: skip
  model = gm.nn.LoRA(
    rank=RANK, model=gm.nn.Transformer(config=config), dtype=jnp.float32
  )
  tokens = jnp.arange(12).reshape(2, 6)
  variables = model.init(jax.random.key(0), tokens)['params']
  frozen, params = peft.split_params(variables)
  before = jax.tree.map(np.array, frozen)

  def loss(params, tokens):
    merged = {'params': peft.merge_params(frozen, params)}
    return jnp.mean(jnp.sin(model.apply(merged, tokens[None]).logits))

  grads = jax.vmap(jax.grad(loss), (None, 0))(params, tokens)
  tx = prism_optax.prism(
    0.1, l2_clip_norm=1.0, noise_multiplier=0.5, expected_batch_size=2
  )
  updates, _ = tx.update(grads, tx.init(params), params)
  assert len(jax.tree.leaves(updates)) == 2 * 10  # Five einsums, two layers.
  new = jax.tree.map(jnp.add, params, updates)
  for old, moved in zip(
    jax.tree.leaves(params), jax.tree.leaves(new), strict=True
  ):
    assert jnp.any(old != moved)
  merged = peft.merge_params(frozen, new)
  after, _ = peft.split_params(merged)
  jax.tree.map(np.testing.assert_array_equal, before, after)
