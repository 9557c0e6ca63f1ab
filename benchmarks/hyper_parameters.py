"""Accuracy of `prism` as one hyper-parameter at a time is changed.

    python benchmarks/hyper_parameters.py [--seeds 10] [--only rank start]

The digits of ``correlated_utility.py``: public training on turned pictures,
private LoRA on the upright ones, Poisson batches, epsilon 2 at delta 1e-4.
Around one setting (rank 4, expected batch 100, 96 steps, zero start, cosine
decay of the rate, no weight decay, Adam's bias correction) each option is
changed by itself, with the noise calibrated anew, and DP-AdamW on the factors
is run beside it. Each row has all learning rates; the best is chosen on a third
of the held-out pictures, reported on the rest. Rows are added to
``benchmarks/results`` as they are finished, and those that are there are not
run again. Some ten minutes on one CPU core.
"""

import argparse
import functools
import json
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax

ROOT = str(pathlib.Path(__file__).parents[1])
if ROOT not in sys.path:
  sys.path.insert(0, ROOT)

import prism_optax  # noqa: E402
from benchmarks import correlated_utility as digits  # noqa: E402
from benchmarks import timing  # noqa: E402
from prism_optax import accounting, lora  # noqa: E402

EPSILON, DELTA, SIZE = 2.0, 1e-4, 1200
RATES = (1e-2, 1.8e-2, 3e-2, 5.6e-2, 0.1, 0.18, 0.3, 0.56)
# What the program is compiled for, and what it is told.
STATIC = {'method': 'prism', 'rank': 4, 'batch': 100, 'steps': 96,
          'start': 'one_sided', 'debias': False,
          'bias_correction': True}  # fmt: skip
TRACED = {'clip': 1.0, 'b1': 0.9, 'b2': 0.999, 'floor_factor': 1.0,
          'max_condition_number': 1e4, 'decay': 1.0,
          'weight_decay': 0.0}  # fmt: skip
CHANGES = {
  'as it is': ({},),
  'method': (
    {'method': 'dp-adamw'},
    {'method': 'dp-adamw', 'start': 'balanced'},
    {'method': 'dp-adamw', 'b2': 0.99},
  ),
  'batch at fixed epochs': (
    {'batch': 25, 'steps': 384},
    {'batch': 50, 'steps': 192},
    {'batch': 200, 'steps': 48},
  ),
  'steps': ({'steps': 24}, {'steps': 48}, {'steps': 192}, {'steps': 384}),
  'clip': ({'clip': 0.1}, {'clip': 0.3}, {'clip': 3.0}, {'clip': 10.0}),
  'rank': ({'rank': 1}, {'rank': 2}, {'rank': 8}),
  'start': ({'start': 'balanced'},),
  'decay': ({'decay': 0.0},),
  'floor': ({'floor_factor': 0.1}, {'floor_factor': 4.0}),
  'debias': ({'debias': True},),
  'momentum only': ({'max_condition_number': 1.0},),
  'b1': ({'b1': 0.0}, {'b1': 0.5}, {'b1': 0.97}),
  'b1 elsewhere': (
    {'b1': 0.5, 'steps': 384},
    {'b1': 0.5, 'decay': 0.0},
    {'b1': 0.5, 'start': 'balanced'},
    {'b1': 0.5, 'method': 'dp-adamw', 'start': 'balanced'},
  ),
  'b2': ({'b2': 0.9}, {'b2': 0.99}),
  'weight decay': (
    {'weight_decay': 0.1},
    {'bias_correction': False},
    {'bias_correction': False, 'weight_decay': 0.1},
    {'bias_correction': False, 'weight_decay': 0.3},
    {'bias_correction': False, 'weight_decay': 1.0},
    {'bias_correction': False, 'weight_decay': 0.1, 'steps': 384},
    {'bias_correction': False, 'weight_decay': 0.3, 'steps': 384},
  ),
}


def starting_point(weights, rank, start):
  """Factors, and frozen weights from which their product is taken out."""
  params = {
    name: {
      'lora_a': jnp.zeros((w.shape[0], rank)),
      'lora_b': jnp.zeros((rank, w.shape[1])),
    }
    for name, w in weights.items()
  }
  params = lora.initialize(
    params, 0, method=start, size=1.0 if start == 'balanced' else None
  )
  frozen = {
    name: w - params[name]['lora_a'] @ params[name]['lora_b']
    for name, w in weights.items()
  }
  return params, frozen


def adam_on_factors(rate, clip, sigma, batch, key, b1, b2):
  """DP-AdamW: one clip of all factor gradients, white noise, Adam."""
  whole = functools.partial(
    prism_optax.per_matrix_clip,
    normalize_by=batch,
    weight_dimension_numbers=lambda tree: jax.tree.map(lambda _: None, tree),
  )(clip)

  def add_noise(updates, state, params=None, **_):
    del params
    state, key = jax.random.split(state)
    leaves, treedef = jax.tree.flatten(updates)
    keys = jax.random.split(key, len(leaves))
    stddev = sigma * clip / batch
    leaves = [
      x + stddev * jax.random.normal(k, x.shape)
      for k, x in zip(keys, leaves, strict=True)
    ]
    return jax.tree.unflatten(treedef, leaves), state

  return optax.chain(
    whole,
    optax.GradientTransformationExtraArgs(lambda _: key, add_noise),
    optax.adamw(rate, b1, b2, weight_decay=0.0),
  )


@functools.cache
def program(method, rank, batch, steps, start, debias, bias_correction):
  """``run(key, rate, sigma, traced) -> which pictures are right``, compiled."""
  public, (x, y), evaluation = digits.pictures()
  x, y = jnp.asarray(x), jnp.asarray(y)
  weights = digits.public_weights(*public)
  params, frozen = starting_point(weights, rank, start)
  # Room for any draw: at most 1 in 10^8 of them is larger.
  room = min(len(x), batch + 6 * int(batch**0.5) + 10)

  def run(key, rate, sigma, traced):
    keys = jax.random.split(key)
    half = (1 - jnp.cos(jnp.pi * jnp.arange(steps) / steps)) / 2
    rates = rate * (1 - traced['decay'] * half)

    def schedule(count):
      return rates[count]

    if method == 'dp-adamw':
      tx = adam_on_factors(
        schedule, traced['clip'], sigma, batch, keys[0],
        traced['b1'], traced['b2'],
      )  # fmt: skip
    else:
      tx = prism_optax.prism(
        schedule, l2_clip_norm=traced['clip'], noise_multiplier=sigma,
        expected_batch_size=batch, prng_key=keys[0], debias=debias,
        bias_correction=bias_correction,
        **{k: traced[k] for k in
           ('b1', 'b2', 'floor_factor', 'max_condition_number',
            'weight_decay')},
      )  # fmt: skip

    def step(carry, t):
      params, state = carry
      chosen = jax.random.bernoulli(
        jax.random.fold_in(keys[1], t), batch / SIZE, (SIZE,)
      )
      rows = jnp.nonzero(chosen, size=room, fill_value=0)[0]
      grads = jax.vmap(jax.grad(digits.loss), (None, None, 0, 0))(
        params, frozen, x[rows], y[rows]
      )
      updates, state = tx.update(
        grads, state, params,
        is_padding_example=jnp.arange(room) >= chosen.sum(),
      )  # fmt: skip
      return (optax.apply_updates(params, updates), state), None

    carry = params, tx.init(params)
    (last, _), _ = jax.lax.scan(step, carry, jnp.arange(steps))
    guess = jnp.argmax(digits.logits(last, frozen, evaluation[0]), -1)
    return guess == evaluation[1]

  return jax.jit(run)


def measure(change, seeds):
  """One row: accuracies of every rate, the best of them by the tuning part."""
  static = {k: change.get(k, v) for k, v in STATIC.items()}
  traced = {k: change.get(k, v) for k, v in TRACED.items()}
  sigma = accounting.calibrate_noise_multiplier(
    EPSILON, DELTA, static['batch'] / SIZE, static['steps']
  )
  run = program(**static)
  right = np.asarray(
    [
      [run(jax.random.key(seed), rate, sigma, traced) for seed in range(seeds)]
      for rate in RATES
    ]
  )
  tuning = right.shape[-1] // 3
  best = int(np.argmax(right[..., :tuning].mean((1, 2))))
  by_rate = right[..., tuning:].mean(-1)
  return {
    'noise multiplier': sigma,
    'stddev of the mean': sigma * traced['clip'] / static['batch'],
    'learning rate': RATES[best],
    'accuracy': float(by_rate[best].mean()),
    'standard deviation over seeds': float(by_rate[best].std(ddof=1)),
    'accuracies by rate': by_rate.mean(1).tolist(),
  }


def main():
  parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
  parser.add_argument('--seeds', type=int, default=10)
  parser.add_argument('--only', nargs='+', choices=tuple(CHANGES))
  args = parser.parse_args()
  path = timing.RESULTS / f'hyper_parameters_{jax.devices()[0].platform}.json'
  results = {
    'environment': timing.environment(), 'seeds': args.seeds,
    'learning rates': RATES, 'rows': [],
  }  # fmt: skip
  if path.exists():
    old = json.loads(path.read_text('utf-8'))
    if old['seeds'] == args.seeds:
      results['rows'] = old['rows']
  done = [(row['group'], row['change']) for row in results['rows']]
  for group in args.only or CHANGES:
    for change in CHANGES[group]:
      if (group, change) in done:
        continue
      row = {'group': group, 'change': change, **measure(change, args.seeds)}
      results['rows'].append(row)
      timing.save('hyper_parameters', results)
      shown = ', '.join(f'{k} {v}' for k, v in change.items()) or group
      rates = ' '.join(f'{x:.3f}' for x in row['accuracies by rate'])
      print(
        f'{shown:28} sigma {row["noise multiplier"]:5.2f}  best'
        f' {row["accuracy"]:.3f} +- {row["standard deviation over seeds"]:.3f}'
        f' at {row["learning rate"]:g}  ({rates})',
        flush=True,
      )


if __name__ == '__main__':
  main()
