"""Private LoRA of a Keras model on JAX by `enable_lora` (pip install keras)."""

import os

os.environ.setdefault('KERAS_BACKEND', 'jax')
import jax
import keras
import optax

import prism_optax
from prism_optax import lora

BATCH = 32
layers = [keras.layers.Dense(32, activation='relu'), keras.layers.Dense(3)]
model = keras.Sequential([keras.Input((16,)), *layers])
for layer in layers:
  layer.enable_lora(2)
x = jax.random.normal(jax.random.key(0), (BATCH, 16))
y = jax.random.randint(jax.random.key(1), (BATCH,), 0, 3)
variables = model.trainable_variables
params = [v.value for v in variables]
frozen = [v.value for v in model.non_trainable_variables]
# A plain list: the names stand beside it.
layout = lora.pairs_by_name([v.path for v in variables], params)
print(lora.describe_pairs(params, layout=layout))
constants = {'l2_clip_norm': 1.0, 'expected_batch_size': BATCH}
tx = prism_optax.prism(1e-2, noise_multiplier=0.5, layout=layout, **constants)


def loss(params, x, y):
  logits, _ = model.stateless_call(params, frozen, x[None])
  return optax.softmax_cross_entropy_with_integer_labels(logits[0], y)


grads = jax.jit(jax.vmap(jax.grad(loss), (None, 0, 0)))(params, x, y)
updates, state = jax.jit(tx.update)(grads, tx.init(params), params)
new = optax.apply_updates(params, updates)
for variable, value in zip(variables, new, strict=True):
  variable.assign(value)
