"""Pretraining of the small vision transformer on public digits."""

import pathlib

import jax
import numpy as np
import optax
from flax import nnx

from . import adapters, data
from .models import classifier, weights

# Sharpness of the softmax over normalised features.
TEMPERATURE = 16.0
STEPS, BATCH_SIZE, LEARNING_RATE = 1500, 64, 3e-3


def pretrain_or_load(
  network: classifier.Classifier,
  public: data.Examples,
  path: pathlib.Path,
) -> str:
  """Gives the network its pretrained weights, in place.

  Args:
    network: Adapters at their start, where they change nothing. The backbone
      and the head are trained, the adapters are not.
    public: Public examples.
    path: Safetensors file; read if it is there, else written.

  Returns:
    SHA-256 of the file.
  """
  backbone = nnx.All(nnx.Param, nnx.Not(nnx.LoRAParam))
  graphdef, params, rest = classifier.split(network, backbone)
  if not path.exists():
    adapters.save(path, _pretrain(graphdef, params, rest, public), {})
  # Read back even if just written: a resumed run starts from the same bytes.
  nnx.update(network, adapters.load(path, params))
  return weights.sha256(path)


def _pretrain(graphdef, params, rest, public: data.Examples):
  """Plain AdamW on shifted copies of the pictures."""
  schedule = optax.cosine_decay_schedule(LEARNING_RATE, STEPS)
  optimizer = optax.adamw(schedule, weight_decay=0.05)

  @jax.jit
  def step(params, state, images, labels):
    def loss(params):
      logits = nnx.merge(graphdef, params, rest)(images)
      return optax.softmax_cross_entropy_with_integer_labels(
        logits, labels
      ).mean()

    updates, state = optimizer.update(jax.grad(loss)(params), state, params)
    return optax.apply_updates(params, updates), state

  rng = np.random.default_rng(1)
  state = optimizer.init(params)
  for _ in range(STEPS):
    rows = rng.integers(len(public.labels), size=BATCH_SIZE)
    images = augment(public.inputs[rows], rng)
    params, state = step(params, state, images, public.labels[rows])
  return params


def augment(images: np.ndarray, rng: np.random.Generator) -> np.ndarray:
  """Moves every picture by up to one pixel along each axis."""
  size = images.shape[1]
  padded = np.pad(images, ((0, 0), (1, 1), (1, 1)))
  moved = [
    image[down : down + size, right : right + size]
    for image, (down, right) in zip(
      padded, rng.integers(0, 3, (len(images), 2)), strict=True
    )
  ]
  return np.stack(moved)
