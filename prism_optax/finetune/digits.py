"""The default task: handwritten digits that come with scikit-learn.

1,797 pictures of 8x8 pixels. A third of them is the public part: upright, and
used to pretrain a small vision transformer. The others are mirrored, the top
row at the bottom, as if read off their reflection: the pretrained model reads
three in ten. 900 of those are the private records, 297 are the public
evaluation set. No picture is in two parts.
"""

import pathlib

import jax
import numpy as np
import optax
from flax import nnx
from sklearn import datasets

from . import adapters, data
from .models import classifier, weights

PUBLIC_SIZE, PRIVATE_SIZE = 600, 900
# Sharpness of the softmax over normalised features.
TEMPERATURE = 16.0
STEPS, BATCH_SIZE, LEARNING_RATE = 1500, 64, 3e-3
LABELS = tuple(str(digit) for digit in range(10))


def shuffled() -> tuple[np.ndarray, np.ndarray]:
  """All pictures and their labels, in a fixed order.

  Inputs are ``(1797, 8, 8)`` float32 in [0, 1], labels ``(1797,)`` int32. The
  order is a public constant, so that runs can be compared.
  """
  images, labels = datasets.load_digits(return_X_y=True)
  order = np.random.default_rng(0).permutation(len(labels))
  images = images[order].reshape(-1, 8, 8).astype(np.float32) / 16
  return images, labels[order].astype(np.int32)


def load() -> tuple[data.Examples, data.Examples, data.Examples]:
  """Returns the parts ``(public, private, evaluation)``.

  Inputs are ``(rows, 8, 8)`` float32 in [0, 1]. The split is a public
  constant too.
  """
  images, labels = shuffled()
  cuts = [PUBLIC_SIZE, PUBLIC_SIZE + PRIVATE_SIZE]
  parts = zip(np.split(images, cuts), np.split(labels, cuts), strict=True)
  public, private, evaluation = (data.Examples(*part) for part in parts)
  return (
    public,
    private._replace(inputs=private.inputs[:, ::-1]),
    evaluation._replace(inputs=evaluation.inputs[:, ::-1]),
  )


def pretrain_or_load(
  network: classifier.Classifier, public: data.Examples, path: pathlib.Path
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
