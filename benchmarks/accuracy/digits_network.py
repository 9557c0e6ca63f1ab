"""Handwritten digits and a network of two layers.

With LoRA on both (:func:`logits`); or on the first one, with a head for its
units (:func:`features`), as the other tasks of ``problems.py`` have. Public
training is on the pictures turned by 90 degrees, private training on upright
ones.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from prism_optax.finetune import digits

HIDDEN, SIZE = 64, 1200
Weights = dict[str, jax.Array]
Params = dict[str, dict[str, jax.Array]]


class Rows(NamedTuple):
  """Pictures ``(rows, 64)`` in [0, 1] and labels ``(rows,)``."""

  x: np.ndarray
  y: np.ndarray


def pictures() -> tuple[Rows, Rows, Rows]:
  """``(public, private, held out)``; the public ones are turned."""
  images, labels = digits.shuffled()
  turned = np.rot90(images, axes=(1, 2)).reshape(len(images), -1)
  flat = images.reshape(len(images), -1)
  return (
    Rows(turned[:SIZE], labels[:SIZE]),
    Rows(flat[:SIZE], labels[:SIZE]),
    Rows(flat[SIZE:], labels[SIZE:]),
  )


def logits(params: Params, weights: Weights, x: jax.Array) -> jax.Array:
  """Two layers, each with an adapter, and a rectifier between them."""

  def dense(name, x):
    pair = params[name]
    return x @ weights[name] + x @ pair['lora_a'] @ pair['lora_b']

  return dense('last', jax.nn.relu(dense('first', x)))


def loss(
  params: Params, weights: Weights, x: jax.Array, y: jax.Array
) -> jax.Array:
  """Cross-entropy, one number for each row."""
  return optax.softmax_cross_entropy_with_integer_labels(
    logits(params, weights, x), y
  )


def features(
  adapters: list[Any],
  frozen: list[Any],
  pictures: jax.Array,
  lengths: jax.Array,
  scale: float = 1.0,
) -> jax.Array:
  """The hidden units of pictures (rows, 1, 64), as ``encoded_text.features``.

  The first layer is named ``up``.
  """
  del lengths
  x = pictures[:, 0]
  trained = adapters[0].get('up', {})
  units = x @ trained.get('kernel', frozen[0]['up']['kernel'])
  if 'lora_a' in trained:
    units += scale * (x @ trained['lora_a']) @ trained['lora_b']
  return jax.nn.relu(units)


@functools.cache
def parts() -> tuple[tuple[tuple[np.ndarray, ...], ...], list[Any], int]:
  """``(train, tuning, test)``, layers without adapters, number of classes.

  Rows are pictures (rows, 1, 64), ones and labels. A third of the pictures that
  are held out is for tuning.
  """
  public, private, held_out = pictures()
  tuning = len(held_out.x) // 3
  rows = (
    private,
    Rows(*(x[:tuning] for x in held_out)),
    Rows(*(x[tuning:] for x in held_out)),
  )
  layers = [{'up': {'kernel': public_weights(*public)['first']}}]
  return tuple((x[:, None], np.ones_like(y), y) for x, y in rows), layers, 10


def public_weights(x: np.ndarray, y: np.ndarray) -> Weights:
  """Weights after 300 steps of Adam on all public pictures."""
  keys = jax.random.split(jax.random.key(0), 2)
  weights = {
    'first': jax.random.normal(keys[0], (64, HIDDEN)) / 8,
    'last': jax.random.normal(keys[1], (HIDDEN, 10)) / HIDDEN**0.5,
  }
  nothing = {
    name: {
      'lora_a': jnp.zeros((w.shape[0], 1)),
      'lora_b': jnp.zeros((1, w.shape[1])),
    }
    for name, w in weights.items()
  }
  adam = optax.adam(3e-3)

  def step(carry, _):
    weights, state = carry
    grads = jax.grad(lambda w: jnp.mean(loss(nothing, w, x, y)))(weights)
    updates, state = adam.update(grads, state)
    return (optax.apply_updates(weights, updates), state), None

  carry, _ = jax.lax.scan(step, (weights, adam.init(weights)), length=300)
  return carry[0]
