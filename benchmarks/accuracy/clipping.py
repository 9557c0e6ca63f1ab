"""Accuracy by the rule that bounds a record, and by the unit of privacy.

    python benchmarks/accuracy/clipping.py [--seeds 5] [--only quantile]

The digits of ``digits_network.py``: public training on turned pictures, private
LoRA of rank 4 on the upright ones by ``make_private``, expected batch 96, 96
steps, a balanced start, epsilon 2 and 8 at delta 1e-4. ``prism`` and DP-AdamW
on the factors, both without weight decay and with ``b1=0.5``, with a flat clip,
an automatic one, one for each module, and one that follows a quantile. Then
users with 1, 2, 4 and 8 records each, in as many batches of as many records:
epsilon is of users. Every row has four learning rates; the best is chosen on a
third of the held-out pictures, reported on the rest. Rows are added to
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

ROOT = pathlib.Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / 'examples')]

import prism_optax  # noqa: E402
from benchmarks.accuracy import digits_network as network  # noqa: E402
from benchmarks.accuracy import hyper_parameters  # noqa: E402
from benchmarks.common import results  # noqa: E402
from prism_optax import accounting, training  # noqa: E402

EPSILONS, DELTA, RANK, BATCH, STEPS = (2.0, 8.0), 1e-4, 4, 96, 96
RATES = {
  'prism': (0.1, 0.18, 0.3, 0.56),
  'dp-adamw': (0.03, 0.056, 0.1, 0.18),
}
RULES = {
  'flat': None,
  'automatic': training.AutomaticClipping(),
  'by module': training.GroupClipping(
    {name: name for name in ('first', 'last')}, {'first': 1.0, 'last': 1.0}
  ),
  'quantile': training.QuantileClipping(),
}


def settings() -> list[dict]:
  """Rule, clip norm (for a quantile the first one), and records of a user."""
  rows = [('flat', norm, 1) for norm in (1.0, 10.0, 0.1)]
  rows += [('quantile', norm, 1) for norm in (10.0, 0.1, 1.0)]
  rows += [('flat', 1.0, records) for records in (8, 4, 2)]
  rows += [('automatic', 1.0, 1), ('by module', 1.0, 1)]
  rows += [('flat', 0.3, 1), ('flat', 3.0, 1)]
  return [
    {
      'epsilon': epsilon, 'method': method, 'rule': rule, 'clip norm': norm,
      'records of a user': records,
    }
    for epsilon in EPSILONS
    for rule, norm, records in rows
    for method in RATES
  ]  # fmt: skip


@functools.cache
def problem():
  """``(params, frozen, training rows, held-out rows)``."""
  public, rows, evaluation = network.pictures()
  weights = network.public_weights(*public)
  params, frozen = hyper_parameters.starting_point(weights, RANK, 'balanced')
  return params, frozen, rows, evaluation


@functools.cache
def noise_multiplier(epsilon):
  """The same for users: their share of a batch is the same."""
  return accounting.calibrate_noise_multiplier(
    epsilon, DELTA, BATCH / network.SIZE, STEPS
  )


def optimizer(method, rate):
  schedule = optax.cosine_decay_schedule(1.0, STEPS)
  shared = {
    'learning_rate': lambda count: rate * schedule(count),
    'b1': 0.5,
    'weight_decay': 0.0,
  }
  if method == 'prism':
    return functools.partial(prism_optax.prism, **shared)
  return optax.adamw(**shared)


def private_training(setting, rate, norm, key):
  """The clip norm is one, and the loss is divided by the norm that is meant.

  To an optimizer that does not notice the scale of gradients this is the same,
  and all norms share one program.
  """
  params, _, rows, _ = problem()
  records = setting['records of a user']
  return training.make_private(
    lambda params, frozen, x, y: network.loss(params, frozen, x, y) / norm,
    params,
    optimizer=optimizer(setting['method'], rate),
    clipping=RULES[setting['rule']],
    l2_clip_norm=1.0,
    noise_multiplier=noise_multiplier(setting['epsilon']),
    expected_batch_size=BATCH // records,
    dataset_size=len(rows.x) // records,
    steps=STEPS,
    delta=DELTA,
    examples_per_user=None if records == 1 else records,
    prng_key=key,
  )


def batches(setting, seed):
  """All batches of a run, stacked; the shapes do not depend on the seed."""
  params, _, rows, _ = problem()
  private = private_training(setting, 0.1, 1.0, seed)
  records = setting['records of a user']
  users = None
  if records > 1:  # Users with records of any kind: they differ by chance.
    users = np.arange(len(rows.x)) // records
  found = private.batches(private.init(params), tuple(rows), users=users)
  stacked = [(x.examples, x.is_padding_example, x.is_present) for x in found]
  return jax.tree.map(lambda *x: np.stack(x), *stacked)


@functools.cache
def program(**setting):
  """``run(key, rate, norm, batches) -> which pictures are right``, compiled.

  The step of `PrivateTraining`, in a loop that XLA sees, so that all rates,
  norms and seeds share one program.
  """
  params, frozen, _, evaluation = problem()

  def run(key, rate, norm, drawn):
    private = private_training(setting, rate, norm, key)

    def step(carry, batch):
      return private._step(*carry, frozen, *batch), None

    carry = params, private.parts.transformation.init(params)
    (last, _), _ = jax.lax.scan(step, carry, drawn)
    guess = jnp.argmax(network.logits(last, frozen, evaluation.x), -1)
    return guess == evaluation.y

  return jax.jit(run)


def measure(setting, seeds):
  """One row: accuracies of every rate, the best of them by the tuning part."""
  shared = {k: v for k, v in setting.items() if k != 'clip norm'}
  run, norm = program(**shared), setting['clip norm']
  drawn = [batches(setting, seed) for seed in range(seeds)]
  rates = RATES[setting['method']]
  right = np.asarray(
    [
      [run(jax.random.key(i), rate, norm, x) for i, x in enumerate(drawn)]
      for rate in rates
    ]
  )
  tuning = right.shape[-1] // 3
  best = int(np.argmax(right[..., :tuning].mean((1, 2))))
  by_rate = right[..., tuning:].mean(-1)
  return {
    'noise multiplier': noise_multiplier(setting['epsilon']),
    'learning rate': rates[best],
    'tuning accuracy': float(right[best, :, :tuning].mean()),
    'accuracy': float(by_rate[best].mean()),
    'standard deviation over seeds': float(by_rate[best].std(ddof=1)),
    'accuracies of the seeds': by_rate[best].tolist(),
    'accuracies by rate': by_rate.mean(1).tolist(),
  }


def table(rows):
  """Accuracies as Markdown: settings down, methods and epsilons across."""
  columns = [(e, m) for e in EPSILONS for m in RATES]
  heads = [f'{m}, epsilon {e:g}' for e, m in columns]
  print('| clip | norm | records of a user |', ' | '.join(heads), '|')
  print('| --- ' * (3 + len(columns)) + '|')
  cells: dict[tuple, dict] = {}
  for row in rows:
    key = row['rule'], row['clip norm'], row['records of a user']
    cells.setdefault(key, {})[row['epsilon'], row['method']] = (
      f'{row["accuracy"]:.3f} ± {row["standard deviation over seeds"]:.3f}'
    )
  for key, found in cells.items():
    print('|', ' | '.join(map(str, key)), end=' | ')
    print(*(found.get(column, '') for column in columns), sep=' | ', end=' |\n')


def main():
  parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
  parser.add_argument('--seeds', type=int, default=5)
  parser.add_argument('--only', choices=tuple(RULES))
  parser.add_argument(
    '--table', action='store_true', help='of what is there, run nothing'
  )
  args = parser.parse_args()
  path = results.FOLDER / 'clipping.json'
  found = {
    'environment': results.environment(), 'seeds': args.seeds,
    'learning rates': RATES, 'rows': [],
  }  # fmt: skip
  if path.exists():
    old = json.loads(path.read_text('utf-8'))
    if args.table or old['seeds'] == args.seeds:
      found['rows'] = old['rows']
  if args.table:
    table(found['rows'])
    return
  done = [{k: row[k] for k in settings()[0]} for row in found['rows']]
  for setting in settings():
    if setting in done or (args.only and setting['rule'] != args.only):
      continue
    row = {**setting, **measure(setting, args.seeds)}
    found['rows'].append(row)
    results.write(path, found)
    rates = ' '.join(f'{x:.3f}' for x in row['accuracies by rate'])
    print(
      *setting.values(),
      f'{row["accuracy"]:.3f} +- {row["standard deviation over seeds"]:.3f}'
      f' at {row["learning rate"]:g}  ({rates})',
      flush=True,
    )


if __name__ == '__main__':
  main()
