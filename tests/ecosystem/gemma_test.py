"""gemma: the adapters that gm.nn.LoRA puts into its layers.

The adapters themselves come from gemma.peft. The whole models need kauldron and
with it TensorFlow, two gigabytes, so the einsums of the transformer stand here
one by one, with the equations and shapes of the library's modules.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

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
  params = module.init(jax.random.key(0), jnp.ones((1, *one)))['params']
  weight = jnp.asarray(np.random.default_rng(3).standard_normal(shape))

  def apply(params, x):
    x = x.reshape(-1, *one)
    adapter = module.apply({'params': params['layer']['lora']}, x)
    out = jnp.einsum(equation, x, weight) + adapter
    return jnp.moveaxis(out, batch_axis, 0).reshape(len(x), -1)

  tree = {'layer': {'lora': checks.randomised(params)}}
  return checks.Layer(tree, apply, int(np.prod(one)))


@pytest.mark.parametrize('name', EINSUMS)
def test_intrinsic_is_the_change_of_the_weight(name):
  checks.intrinsic_is_the_change_of_the_weight(_layer(name))


@pytest.mark.parametrize('name', EINSUMS)
def test_all_adapters_move(name):
  checks.all_adapters_move(_layer(name))
