"""DP-Muon on scikit-learn's digits: noise splits, bias correction, DP-Adam.

A two-layer perceptron (64 - 64 - 10) is trained with Poisson-sampled batches:
every step sees the whole training set, and the records that are not sampled
are marked as padding, so the batches are exactly those of the accounting. All
methods have the same (epsilon, delta = 1e-5), the same steps and the same
sampling; each learning rate is chosen on a split of its own, by the mean over
the tuning seeds, and the accuracies are of other seeds on the test split.

    python benchmarks/accuracy/dp_muon_digits.py [--epsilon 1 3] [--seeds 6]

Results go to ``benchmarks/results`` as they are finished.
"""

import argparse
import functools
import itertools
import pathlib
import sys

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
import optax

ROOT = pathlib.Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / 'examples')]

from finetuning import digits  # noqa: E402

import prism_optax  # noqa: E402
from benchmarks.common import baselines, results  # noqa: E402
from prism_optax import accounting  # noqa: E402

DELTA, EXPECTED_BATCH, STEPS, HIDDEN, CLIP = 1e-5, 128.0, 120, 64, 0.5


def load() -> list[tuple[jax.Array, jax.Array]]:
  """(inputs, labels) of training, tuning and test records."""
  images, labels = map(jnp.asarray, digits.shuffled())
  inputs = images.reshape(len(images), -1)
  cuts = [slice(0, 1197), slice(1197, 1497), slice(1497, None)]
  return [(inputs[c], labels[c]) for c in cuts]


def initial(key):
  keys = jax.random.split(key)
  return {
    'hidden': {
      'b': jnp.zeros(HIDDEN),
      'w': jax.random.normal(keys[0], (64, HIDDEN)) / 8,
    },
    'out': {
      'b': jnp.zeros(10),
      'w': jax.random.normal(keys[1], (HIDDEN, 10)) / HIDDEN**0.5,
    },
  }


def logits(params, x):
  h = jnp.tanh(x @ params['hidden']['w'] + params['hidden']['b'])
  return h @ params['out']['w'] + params['out']['b']


def loss(params, x, y):
  return optax.softmax_cross_entropy_with_integer_labels(logits(params, x), y)


def muon(rate, sigma, key, clip=CLIP, **options):
  return prism_optax.dp_muon(
    rate,
    l2_clip_norms=clip,
    noise_multiplier=sigma,
    expected_batch_size=EXPECTED_BATCH,
    prng_key=key,
    adam_learning_rate=0.01,
    **options,
  )


def adam(rate, sigma, key):
  """Plain DP-Adam; DP-Muon's three groups have sqrt(3) CLIP together."""
  return baselines.dp_adam(
    rate,
    l2_clip_norm=2 * CLIP,
    noise_multiplier=sigma,
    expected_batch_size=EXPECTED_BATCH,
    key=key,
  )


METHODS = {
  'DP-Adam': adam,
  'DP-Muon': muon,
  'DP-Muon, least energy': functools.partial(muon, noise_split='least_energy'),
  'DP-Muon, always normalized': functools.partial(muon, normalize='frobenius'),
  'DP-Muon, degree 1': functools.partial(muon, degree=1),
  'DP-Muon, best polynomials, 3 steps': functools.partial(
    muon, ns_steps=prism_optax.muon.minimax_coefficients(0.1, 3)
  ),
  'DP-Muon, best polynomials, 5 steps': functools.partial(
    muon, ns_steps=prism_optax.muon.minimax_coefficients(0.003, 5)
  ),
}
RATES = [0.003, 0.01, 0.03, 0.1, 0.3]


@functools.partial(jax.jit, static_argnames=('make',))
def train(make, rate, sigma, seed, data, evaluation):
  x, y = data
  keys = jax.random.split(jax.random.key(seed), 3)
  schedule = optax.linear_schedule(1.0, 0.1, STEPS)
  tx = make(lambda t: rate * schedule(t), sigma, keys[0])
  params = initial(keys[1])
  per_example = jax.vmap(jax.grad(loss), (None, 0, 0))

  def step(carry, key):
    params, state = carry
    absent = ~jax.random.bernoulli(key, EXPECTED_BATCH / len(x), (len(x),))
    grads = per_example(params, x, y)
    updates, state = tx.update(grads, state, params, is_padding_example=absent)
    return (optax.apply_updates(params, updates), state), None

  (params, _), _ = jax.lax.scan(
    step, (params, tx.init(params)), jax.random.split(keys[2], STEPS)
  )
  found = jnp.argmax(logits(params, evaluation[0]), -1)
  return jnp.mean(found == evaluation[1])


def measure(epsilon: float, name: str, seeds: int, tuning_seeds: int) -> dict:
  """One row: a method at its best rate."""
  training, tuning, test = load()
  sigma = accounting.calibrate_noise_multiplier(
    epsilon,
    DELTA,
    EXPECTED_BATCH / len(training[0]),
    STEPS,
    neighboring_relation=dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE,
  )
  make = METHODS[name]
  tuned = [
    np.mean(
      [
        train(make, rate, sigma, 1000 + s, training, tuning)
        for s in range(tuning_seeds)
      ]
    )
    for rate in RATES
  ]
  rate = RATES[int(np.argmax(tuned))]
  scores = [
    float(train(make, rate, sigma, s, training, test)) for s in range(seeds)
  ]
  return {
    'epsilon': epsilon,
    'method': name,
    'seeds': seeds,
    'learning rate': rate,
    'accuracy': float(np.mean(scores)),
    'standard error': float(np.std(scores, ddof=1) / seeds**0.5),
  }


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
  parser.add_argument('--epsilon', type=float, nargs='+', default=[1.0, 3.0])
  parser.add_argument('--seeds', type=int, default=6)
  parser.add_argument('--tuning-seeds', type=int, default=2)
  parser.add_argument('--only', nargs='+', choices=METHODS, default=METHODS)
  args = parser.parse_args()
  rows = results.add_rows(
    results.path_of('dp_muon_digits'),
    ('epsilon', 'method'),
    itertools.product(args.epsilon, args.only),
    lambda *key: measure(*key, args.seeds, args.tuning_seeds),
  )
  print('| epsilon | method | learning rate | accuracy | standard error |')
  print('| --- | --- | --- | --- | --- |')
  for row in rows:
    print(
      f'| {row["epsilon"]:g} | {row["method"]} | {row["learning rate"]:g}'
      f' | {row["accuracy"]:.4f} | {row["standard error"]:.4f} |'
    )


if __name__ == '__main__':
  main()
