"""Accuracy with correlated and with independent noise, at the same epsilon.

    python benchmarks/correlated_utility.py [--seeds 5]

LoRA of rank 4 on both layers of a small network for handwritten digits
(scikit-learn). Public training on the pictures turned by 90 degrees; private
training on the upright ones, in a fixed order that repeats: each record takes
part once in every epoch, which is what the matrix mechanism is accounted with.
Independent noise is shown under the same promise, and with Poisson sampling,
whose amplification correlated noise cannot use. Each method at the best of its
learning rates, chosen on a third of the held-out pictures, reported on the
rest. The start has full rank (its product is taken out of the frozen weights).
About three minutes on two CPU cores.
"""

import argparse
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax_privacy import noise_addition
from jax_privacy.matrix_factorization import streaming_matrix, toeplitz
from sklearn import datasets

ROOT = str(pathlib.Path(__file__).parents[1])
if ROOT not in sys.path:
  sys.path.insert(0, ROOT)

import prism_optax  # noqa: E402
from benchmarks import timing  # noqa: E402
from prism_optax import accounting  # noqa: E402

HIDDEN, RANK, BATCH, EPOCHS, CLIP, DELTA = 64, 4, 100, 8, 1.0, 1e-4
RATES = (1e-2, 3e-2, 1e-1, 3e-1)
EPSILONS = (2.0, 8.0)


def pictures():
  x, y = datasets.load_digits(return_X_y=True)
  order = np.random.default_rng(0).permutation(len(x))
  x, y = x[order].astype(np.float32) / 16, y[order]
  turned = np.rot90(x.reshape(-1, 8, 8), axes=(1, 2)).reshape(len(x), -1)
  size = 12 * BATCH
  return (turned[:size], y[:size]), (x[:size], y[:size]), (x[size:], y[size:])


def logits(params, weights, x):
  def dense(name, x):
    pair = params[name]
    return x @ weights[name] + x @ pair['lora_a'] @ pair['lora_b']

  return dense('last', jax.nn.relu(dense('first', x)))


def loss(params, weights, x, y):
  return optax.softmax_cross_entropy_with_integer_labels(
    logits(params, weights, x), y
  )


def public_weights(x, y):
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


def full_rank_start(weights, key, size=1.0):
  """Factors with ``size`` singular values, and weights that take them out."""
  params, frozen = {}, {}
  for i, (name, w) in enumerate(weights.items()):
    keys = jax.random.split(jax.random.fold_in(key, i))
    right, left = (
      jnp.linalg.qr(jax.random.normal(k, (n, RANK)))[0] * size**0.5
      for k, n in zip(keys, w.shape, strict=True)
    )
    params[name] = {'lora_a': right, 'lora_b': left.T}
    frozen[name] = w - right @ left.T
  return params, frozen


def strategies(steps):
  """Noising matrices with their strategy matrices, by name."""
  coefs = toeplitz.optimal_max_error_strategy_coefs(steps)
  bands = coefs[: steps // EPOCHS]
  lower = toeplitz.materialize_lower_triangular
  pad = jnp.zeros(steps).at[: len(bands)].set(bands)
  return {
    'independent': (streaming_matrix.identity(), np.eye(steps)),
    'prefix sums': (toeplitz.inverse_as_streaming_matrix(coefs), lower(coefs)),
    'banded': (toeplitz.inverse_as_streaming_matrix(bands), lower(pad)),
  }


def run(method, epsilon, steps, train, evaluation, weights, seeds, fraction):
  """Accuracies (rates, seeds, pictures) of one method, and its multiplier."""
  matrix, strategy = strategies(steps)[method.removesuffix(', Poisson')]
  poisson = method.endswith('Poisson')
  if poisson:
    sigma = accounting.calibrate_noise_multiplier(
      epsilon, DELTA, fraction, steps
    )
  else:
    sigma = accounting.calibrate_matrix_mechanism(
      epsilon, DELTA, strategy, max_participations=EPOCHS,
      min_separation=steps // EPOCHS,
    )  # fmt: skip
  stddev = sigma * CLIP / BATCH
  per_step = prism_optax.correlated_noise_stddev(matrix, stddev, steps)
  clip = prism_optax.intrinsic_clip(CLIP, normalize_by=BATCH)
  x, y = map(jnp.asarray, train)

  def train_once(key, rate):
    keys = jax.random.split(key, 3)
    params, frozen = full_rank_start(weights, keys[0])
    privatizer = prism_optax.correlated_tangent_privatizer(
      lambda key: noise_addition.matrix_factorization_privatizer(
        matrix, stddev=stddev, prng_key=key
      ),
      horizon=steps, prng_key=keys[1],
    )  # fmt: skip
    tx = optax.chain(
      clip,
      privatizer,
      prism_optax.scale_by_rank_preconditioner(noise_stddev=per_step),
      optax.scale_by_learning_rate(rate),
      prism_optax.retract(),
    )

    def step(carry, t):
      params, state = carry
      if poisson:  # Padded to three times the expectation: never cut here.
        chosen = jax.random.bernoulli(
          jax.random.fold_in(keys[2], t), fraction, (len(x),)
        )
        rows = jnp.nonzero(chosen, size=3 * BATCH, fill_value=0)[0]
        padding = jnp.arange(3 * BATCH) >= chosen.sum()
      else:
        start = (t % (steps // EPOCHS)) * BATCH
        rows, padding = start + jnp.arange(BATCH), jnp.zeros(BATCH, bool)
      grads = jax.vmap(jax.grad(loss), (None, None, 0, 0))(
        params, frozen, x[rows], y[rows]
      )
      updates, state = tx.update(
        grads, state, params, is_padding_example=padding
      )
      return (optax.apply_updates(params, updates), state), None

    carry = params, tx.init(params)
    (params, _), _ = jax.lax.scan(step, carry, jnp.arange(steps))
    return (
      jnp.argmax(logits(params, frozen, evaluation[0]), -1) == evaluation[1]
    )

  program = jax.jit(train_once)
  right = [
    [program(jax.random.key(seed), rate) for seed in range(seeds)]
    for rate in RATES
  ]
  return np.asarray(right), float(sigma)


def main():
  parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
  parser.add_argument('--seeds', type=int, default=5)
  args = parser.parse_args()
  public, train, evaluation = pictures()
  weights = public_weights(*public)
  steps = EPOCHS * len(train[0]) // BATCH
  tuning = len(evaluation[0]) // 3
  results = {'environment': timing.environment(), 'rows': []}
  print(f'{"epsilon":>8}{"method":>22}{"sigma":>8}{"rate":>8}{"accuracy":>10}')
  for epsilon in EPSILONS:
    for method in (
      'independent',
      'prefix sums',
      'banded',
      'independent, Poisson',
    ):
      right, sigma = run(
        method, epsilon, steps, train, evaluation, weights, args.seeds,
        BATCH / len(train[0]),
      )  # fmt: skip
      best = int(np.argmax(right[:, :, :tuning].mean((1, 2))))
      accuracies = right[best, :, tuning:].mean(-1)
      row = {
        'epsilon': epsilon,
        'method': method,
        'noise multiplier': sigma,
        'learning rate': RATES[best],
        'accuracy': float(accuracies.mean()),
        'standard deviation over seeds': float(accuracies.std(ddof=1)),
        'accuracies by rate': right[:, :, tuning:].mean((1, 2)).tolist(),
      }
      results['rows'].append(row)
      print(
        f'{epsilon:8}{method:>22}{sigma:8.2f}{RATES[best]:8.3f}'
        f'{row["accuracy"]:10.3f} +- {accuracies.std(ddof=1):.3f}',
        flush=True,
      )
  print(f'Written to {timing.save("correlated_utility", results)}')


if __name__ == '__main__':
  main()
