"""Accuracy with correlated and with independent noise, at the same epsilon.

    python benchmarks/accuracy/correlated_utility.py [--seeds 5]

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
from jax_privacy.matrix_factorization import streaming_matrix, toeplitz

ROOT = pathlib.Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / 'examples')]

import prism_optax  # noqa: E402
from benchmarks.accuracy import digits_network  # noqa: E402
from benchmarks.common import methods, results  # noqa: E402
from prism_optax import accounting, transforms  # noqa: E402

RANK, BATCH, EPOCHS, CLIP, DELTA = 4, 100, 8, 1.0, 1e-4
RATES = (1e-2, 3e-2, 1e-1, 3e-1)
EPSILONS = (2.0, 8.0)


def full_rank_start(
  weights: digits_network.Weights, key: jax.Array, size: float = 1.0
) -> tuple[digits_network.Params, digits_network.Weights]:
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


def strategies(
  steps: int,
) -> dict[str, tuple[streaming_matrix.StreamingMatrix, np.ndarray]]:
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


def run(
  method: str,
  epsilon: float,
  steps: int,
  train: digits_network.Rows,
  evaluation: digits_network.Rows,
  weights: digits_network.Weights,
  seeds: int,
  fraction: float,
) -> tuple[np.ndarray, float]:
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
  per_step = transforms.correlated_noise_stddev(matrix, stddev, steps)
  clip = prism_optax.intrinsic_clip(CLIP, normalize_by=BATCH)
  x, y = map(jnp.asarray, train)

  def train_once(key, rate):
    keys = jax.random.split(key, 3)
    params, frozen = full_rank_start(weights, keys[0])
    privatizer = methods.correlated_privatizer(matrix, stddev, steps, keys[1])
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
      grads = jax.vmap(jax.grad(digits_network.loss), (None, None, 0, 0))(
        params, frozen, x[rows], y[rows]
      )
      updates, state = tx.update(
        grads, state, params, is_padding_example=padding
      )
      return (optax.apply_updates(params, updates), state), None

    carry = params, tx.init(params)
    (params, _), _ = jax.lax.scan(step, carry, jnp.arange(steps))
    guess = digits_network.logits(params, frozen, evaluation.x)
    return jnp.argmax(guess, -1) == evaluation.y

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
  public, train, evaluation = digits_network.pictures()
  weights = digits_network.public_weights(*public)
  steps = EPOCHS * len(train.x) // BATCH
  tuning = len(evaluation.x) // 3
  found = {'environment': results.environment(), 'rows': []}
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
        BATCH / len(train.x),
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
      found['rows'].append(row)
      print(
        f'{epsilon:8}{method:>22}{sigma:8.2f}{RATES[best]:8.3f}'
        f'{row["accuracy"]:10.3f} +- {accuracies.std(ddof=1):.3f}',
        flush=True,
      )
  print(f'Written to {results.save("correlated_utility", found)}')


if __name__ == '__main__':
  main()
