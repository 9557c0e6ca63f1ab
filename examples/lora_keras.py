"""Private LoRA of a Keras model on JAX by `enable_lora` (pip install keras)."""

import os
from functools import partial

os.environ.setdefault('KERAS_BACKEND', 'jax')
import keras
import numpy as np

from prism_optax import lora, prism, training

layers = [keras.layers.Dense(32, activation='relu'), keras.layers.Dense(3)]
model = keras.Sequential([keras.Input((16,)), *layers])
for layer in layers:
  layer.enable_lora(2)
x = np.float32(np.random.default_rng(0).normal(size=(400, 16)))
y = np.int32(x[:, 0] > 0)  # 400 private records.
variables = model.trainable_variables
params = [v.value for v in variables]
frozen = [v.value for v in model.non_trainable_variables]
# A plain list: the names stand beside it.
layout = lora.pairs_by_name([v.path for v in variables], params)
print(lora.describe_pairs(params, layout=layout))


def loss(params, frozen, x, y):  # Of one record; Keras wants a batch axis.
  logits = model.stateless_call(params, frozen, x[None])[0][0]
  return keras.losses.sparse_categorical_crossentropy(y, logits, True)


private = training.make_private(
  loss, params, optimizer=partial(prism, 1e-2, layout=layout),
  l2_clip_norm=1.0, noise_multiplier=1.0, expected_batch_size=32,
  dataset_size=len(x), steps=5, delta=1e-4)  # fmt: skip
state = private.init(params)
for batch in private.batches(state, (x, y)):
  state = private.step(state, batch, frozen)
for variable, value in zip(variables, state.params, strict=True):
  variable.assign(value)
print(private.statement(state))
