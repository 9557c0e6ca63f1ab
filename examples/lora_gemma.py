"""Private LoRA with gemma's adapters, as gm.nn.LoRA puts them into a model.

pip install einops flax && pip install --no-deps gemma
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from gemma import peft

import prism_optax
from prism_optax import lora

BATCH, RANK = 32, 4


class Block(nn.Module):  # Random and tiny; a whole model takes the same lines.
  @nn.compact
  def __call__(self, x):
    x = x + nn.MultiHeadDotProductAttention(2, name='attention')(x, x)
    return nn.Dense(16, name='down')(nn.gelu(nn.Dense(32, name='up')(x)))


def adapted(module):
  dense = type(module) is nn.Dense
  return peft.LoRADense(rank=RANK, wrapped=module) if dense else module


def loss(params, frozen, x):
  merged = {'params': peft.merge_params(frozen, params)}
  with peft.ModuleInterceptor(adapted):
    return jnp.mean((Block().apply(merged, x[None]) - x) ** 2)


x = jax.random.normal(jax.random.key(0), (BATCH, 6, 16))
with peft.ModuleInterceptor(adapted):
  variables = Block().init(jax.random.key(1), x)['params']
frozen, params = peft.split_params(variables)
print(lora.describe_pairs(params))
constants = {'l2_clip_norm': 1.0, 'expected_batch_size': BATCH}
tx = prism_optax.prism(1e-2, noise_multiplier=0.5, **constants)
grads = jax.vmap(jax.grad(loss), (None, None, 0))(params, frozen, x)
updates, state = tx.update(grads, tx.init(params), params)
variables = peft.merge_params(frozen, optax.apply_updates(params, updates))
