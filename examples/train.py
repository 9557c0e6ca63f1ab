"""Private LoRA of a small Flax model, from the data to the privacy statement.

    python examples/train.py

A file to copy. A network that reads digits is trained on public pictures, then
adapted to private ones, which are upside down. The guarantee rests on the
constants below, which must not depend on private data, and on the secrets that
`init` draws. Half a minute on two cores. `prism-optax train` has checkpoints.
"""

import argparse
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from sklearn import datasets

import prism_optax
from prism_optax import training

# Public constants. The guarantee (EPSILON, DELTA) is about one private picture
# that is added or removed.
EPSILON = 3.0
DELTA = 1e-4  # Well below 1 / PRIVATE_SIZE.
PUBLIC_SIZE, PRIVATE_SIZE = 600, 900  # Declared, not counted from a file.
BATCH = 128  # EXPECTED number of pictures in a batch, and the divisor.
CLIP = 1.0  # Largest norm that one picture's gradient may have.
# Public too: never tune them on private data without paying for it.
HIDDEN, RANK, LEARNING_RATE = 128, 8, 5e-2


class Network(nnx.Module):
  """Three dense layers, each with a pair of LoRA factors."""

  def __init__(self, rngs: nnx.Rngs):
    sizes = [(64, HIDDEN), (HIDDEN, HIDDEN), (HIDDEN, 10)]
    self.layers = nnx.List(
      [nnx.LoRALinear(*size, lora_rank=RANK, rngs=rngs) for size in sizes]
    )

  def __call__(self, x: jax.Array) -> jax.Array:
    """Pictures ``(..., 64)`` to logits ``(..., 10)``."""
    for layer in self.layers[:-1]:
      x = nnx.relu(layer(x))
    return self.layers[-1](x)


# The initial values are public: PRISM trains the params, the weights stay.
GRAPH, PARAMS, WEIGHTS = nnx.split(Network(nnx.Rngs(0)), nnx.LoRAParam, ...)


def loss(params, weights, x, y):
  """Mean cross-entropy; of one picture ``(64,)`` or of many."""
  logits = nnx.merge(GRAPH, params, weights)(x)
  return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


@jax.jit
def accuracy(params, weights, x, y):
  logits = nnx.merge(GRAPH, params, weights)(x)
  return jnp.mean(jnp.argmax(logits, -1) == y)


def load() -> list[tuple[np.ndarray, np.ndarray]]:
  """Pictures and labels: public, private, and held out (declared public)."""
  pictures, y = datasets.load_digits(return_X_y=True)
  upright = pictures.astype(np.float32) / 16
  turned = upright.reshape(-1, 8, 8)[:, ::-1].reshape(-1, 64)
  order = np.random.default_rng(0).permutation(len(y))
  parts = np.split(order, [PUBLIC_SIZE, PUBLIC_SIZE + PRIVATE_SIZE])
  kinds = (upright, turned, turned)
  return [(x[i], y[i]) for x, i in zip(kinds, parts, strict=True)]


@jax.jit
def pretrain(x, y):
  """Weights after plain training on public pictures."""
  adamw = optax.adamw(3e-3)

  def step(_, carry):
    weights, state = carry
    grads = jax.grad(loss, 1)(PARAMS, weights, x, y)
    updates, state = adamw.update(grads, state, weights)
    return optax.apply_updates(weights, updates), state

  return jax.lax.fori_loop(0, 200, step, (WEIGHTS, adamw.init(WEIGHTS)))[0]


def main(steps: int = 200, seed: int | None = None) -> tuple[float, str]:
  """Returns the accuracy on held-out pictures and the privacy statement."""
  public, (x, y), held_out = load()
  weights = pretrain(*public)
  rates = optax.cosine_decay_schedule(LEARNING_RATE, steps)
  # Batches, clip, noise and what they cost, from one set of constants. The two
  # secrets, which pictures are drawn and the noise, come from the operating
  # system. A seed that somebody knows voids the guarantee.
  private = training.make_private(
    loss, PARAMS, optimizer=functools.partial(prism_optax.prism, rates),
    l2_clip_norm=CLIP, expected_batch_size=BATCH, dataset_size=PRIVATE_SIZE,
    steps=steps, delta=DELTA, target_epsilon=EPSILON, prng_key=seed,
  )  # fmt: skip
  state = private.init(PARAMS)  # Once for each budget: as secret as the data.

  def evaluate():  # On public pictures only.
    found = accuracy(state.params, weights, *held_out)
    print(f'step {state.step} of {steps}: accuracy {found:.3f}')
    return float(found)

  for batch in private.batches(state, (x, y)):
    if batch.step % 25 == 0:
      evaluate()
    state = private.step(state, batch, weights)
  found, statement = evaluate(), private.statement(state)
  print(f'{statement}.')
  return found, statement


if __name__ == '__main__':
  parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
  parser.add_argument('--steps', type=int, default=200)
  parser.add_argument('--seed', type=int, help='for tests: voids the guarantee')
  main(**vars(parser.parse_args()))
