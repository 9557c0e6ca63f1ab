"""Accuracy of `prism` as one hyper-parameter at a time is changed.

    python benchmarks/accuracy/hyper_parameters.py [--seeds 10] [--only rank]

The digits of ``digits_network.py``: public training on turned pictures,
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
import dataclasses
import functools
import json
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax

ROOT = pathlib.Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / 'examples')]

from benchmarks.accuracy import digits_network as network  # noqa: E402
from benchmarks.common import baselines, methods, results  # noqa: E402
from prism_optax import accounting, contrib, lora  # noqa: E402

EPSILON, DELTA, SIZE = 2.0, 1e-4, network.SIZE
METRIC_NOISE = 10.0
RATES = (1e-2, 1.8e-2, 3e-2, 5.6e-2, 0.1, 0.18, 0.3, 0.56)
# What the program is compiled for, and what it is told.
STATIC = {'method': 'prism', 'rank': 4, 'batch': 100, 'steps': 96,
          'start': 'one_sided', 'bias_correction': True, 'metric': None,
          'scales_rows': False}  # fmt: skip
TRACED = {'clip': 1.0, 'b1': 0.9, 'b2': 0.999, 'floor_factor': 1.0,
          'max_condition_number': 1e4, 'decay': 1.0,
          'weight_decay': 0.0}  # fmt: skip
DEFAULTS = {'bias_correction': False, 'weight_decay': 0.1}
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
  'momentum only': ({'max_condition_number': 1.0},),
  'b1': ({'b1': 0.0}, {'b1': 0.5}, {'b1': 0.97}),
  'b1 elsewhere': (
    {'b1': 0.5, 'steps': 384},
    {'b1': 0.5, 'decay': 0.0},
    {'b1': 0.5, 'start': 'balanced'},
    {'b1': 0.5, 'method': 'dp-adamw', 'start': 'balanced'},
  ),
  'input metric': tuple(
    {'b1': b1, 'metric': metric, **other}
    for metric in ('mean', 'second_moment')
    for b1 in (0.5, 0.0)
    for other in (
      {},
      {'method': 'dp-adamw', 'start': 'balanced'},
      {'method': 'dp-adamw'},
    )
  ),
  'without input metric': (
    {'b1': 0.0, 'method': 'dp-adamw', 'start': 'balanced'},
    {'b1': 0.5, 'method': 'dp-adamw'},
    {'b1': 0.0, 'method': 'dp-adamw'},
  ),
  'row scales': (
    {'scales_rows': True},
    {'scales_rows': True, 'b1': 0.5},
    {'scales_rows': True, **DEFAULTS},
    {'scales_rows': True, 'b1': 0.5, **DEFAULTS},
    {'b1': 0.5, **DEFAULTS},
    {'scales_rows': True, 'b1': 0.5, 'metric': 'mean'},
  ),
  'b2': ({'b2': 0.9}, {'b2': 0.99}),
  'weight decay': (
    {'weight_decay': 0.1},
    {'bias_correction': False},
    DEFAULTS,
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


@functools.cache
def metrics(form, seeds):
  """The input metrics of some seeds, of one shape, or None."""
  if form is None:
    return [None] * seeds
  public, private, _ = network.pictures()
  weights = network.public_weights(*public)
  hidden = jax.nn.relu(private.x @ weights['first'])
  found = []
  for seed in range(seeds):
    metric = contrib.input_metric(
      [{'first': private.x, 'last': hidden}],
      noise_multiplier=METRIC_NOISE,
      dataset_size=SIZE,
      form=form,
      prng_key=jax.random.fold_in(jax.random.key(seed), 2),
    )
    # Directions of scale one, and no names: all seeds are one program.
    missing = {k: 64 - len(v) for k, v in metric.scales.items()}
    found.append(
      dataclasses.replace(
        metric,
        bases={
          k: jnp.pad(v, ((0, 0), (0, missing[k])))
          for k, v in metric.bases.items()
        },
        scales={
          k: jnp.pad(v, (0, missing[k]), constant_values=1.0)
          for k, v in metric.scales.items()
        },
        digest='',
        key_digest='',
      )
    )
  return found


@functools.cache
def program(
  method,
  rank,
  batch,
  steps,
  start,
  bias_correction,
  metric,
  scales_rows,
):
  """``run(key, rate, sigma, traced, metric)``, compiled.

  It returns which pictures are right.
  """
  public, (x, y), evaluation = network.pictures()
  x, y = jnp.asarray(x), jnp.asarray(y)
  weights = network.public_weights(*public)
  params, frozen = starting_point(weights, rank, start)
  # Room for any draw: at most 1 in 10^8 of them is larger.
  room = min(len(x), batch + 6 * int(batch**0.5) + 10)

  def adapters(coordinates, used):
    return coordinates if metric is None else used.to_params(coordinates)

  def run(key, rate, sigma, traced, used):
    keys = jax.random.split(key)
    half = (1 - jnp.cos(jnp.pi * jnp.arange(steps) / steps)) / 2
    rates = rate * (1 - traced['decay'] * half)

    def schedule(count):
      return rates[count]

    mechanism = {
      'l2_clip_norm': traced['clip'],
      'noise_multiplier': sigma,
      'expected_batch_size': batch,
    }
    if method == 'dp-adamw':
      tx = baselines.dp_adam(
        schedule, key=keys[0], b1=traced['b1'], b2=traced['b2'], **mechanism
      )
    else:
      changed = ('b1', 'b2', 'floor_factor', 'max_condition_number')
      tx = methods.prism_with(
        schedule,
        prng_key=keys[0],
        weight_decay=traced['weight_decay'],
        bias_correction=bias_correction,
        scales_rows=scales_rows,
        **mechanism,
        **{name: traced[name] for name in changed},
      )

    def step(carry, t):
      params, state = carry
      chosen = jax.random.bernoulli(
        jax.random.fold_in(keys[1], t), batch / SIZE, (SIZE,)
      )
      rows = jnp.nonzero(chosen, size=room, fill_value=0)[0]
      grads = jax.vmap(
        jax.grad(lambda p, *row: network.loss(adapters(p, used), frozen, *row)),
        (None, 0, 0),
      )(params, x[rows], y[rows])
      updates, state = tx.update(
        grads, state, params,
        is_padding_example=jnp.arange(room) >= chosen.sum(),
      )  # fmt: skip
      return (optax.apply_updates(params, updates), state), None

    carry = params, tx.init(params)
    (last, _), _ = jax.lax.scan(step, carry, jnp.arange(steps))
    last = adapters(last, used)
    guess = jnp.argmax(network.logits(last, frozen, evaluation.x), -1)
    return guess == evaluation.y

  return jax.jit(run)


def measure(change, seeds):
  """One row: accuracies of every rate, the best of them by the tuning part."""
  static = {k: change.get(k, v) for k, v in STATIC.items()}
  traced = {k: change.get(k, v) for k, v in TRACED.items()}
  used = metrics(static['metric'], seeds)
  sigma = accounting.calibrate_noise_multiplier(
    EPSILON,
    DELTA,
    static['batch'] / SIZE,
    static['steps'],
    prior_events=[used[0].event] if static['metric'] else [],
  )
  run = program(**static)
  right = np.asarray(
    [
      [
        run(jax.random.key(seed), rate, sigma, traced, used[seed])
        for seed in range(seeds)
      ]
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
  path = results.path_of('hyper_parameters')
  found = {
    'environment': results.environment(), 'seeds': args.seeds,
    'learning rates': RATES, 'rows': [],
  }  # fmt: skip
  if path.exists():
    old = json.loads(path.read_text('utf-8'))
    if old['seeds'] == args.seeds:
      found['rows'] = old['rows']
  done = [(row['group'], row['change']) for row in found['rows']]
  for group in args.only or CHANGES:
    for change in CHANGES[group]:
      if (group, change) in done:
        continue
      row = {'group': group, 'change': change, **measure(change, args.seeds)}
      found['rows'].append(row)
      results.save('hyper_parameters', found)
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
