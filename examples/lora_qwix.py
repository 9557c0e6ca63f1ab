"""Private LoRA of a flax nnx block that qwix adapts (pip install qwix flax)."""

import jax
import jax.numpy as jnp
import qwix
from flax import nnx

import prism_optax
from prism_optax import lora

RANK, ALPHA, BATCH = 4, 8.0, 32


class Block(nnx.Module):
  def __init__(self, rngs):
    self.attention = nnx.MultiHeadAttention(2, 16, decode=False, rngs=rngs)
    self.dense = nnx.Linear(16, 16, rngs=rngs)

  def __call__(self, x):
    return self.dense(nnx.gelu(x + self.attention(x)))


x = jax.random.normal(jax.random.key(0), (BATCH, 6, 16))
model = Block(nnx.Rngs(0))
provider = qwix.LoraProvider(module_path='.*', rank=RANK, alpha=ALPHA)
model = qwix.apply_lora_to_model(model, provider, x, rngs=nnx.Rngs(1))
graph, params, frozen = nnx.split(model, nnx.LoRAParam, ...)
layout = lora.Layout(scale=ALPHA / RANK)  # It is not in the tree.
print(lora.describe_pairs(params, layout=layout))
constants = {'l2_clip_norm': 1.0, 'expected_batch_size': BATCH}
tx = prism_optax.prism(1e-2, noise_multiplier=0.5, layout=layout, **constants)


def loss(params, x):
  return jnp.mean((nnx.merge(graph, params, frozen)(x[None]) - x) ** 2)


grads = jax.jit(jax.vmap(jax.grad(loss), (None, 0)))(params, x)
updates, state = jax.jit(tx.update)(grads, tx.init(params), params)
nnx.update(model, jax.tree.map(jnp.add, params, updates))
