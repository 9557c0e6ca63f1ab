"""Accuracy at equal privacy on a language model: PRISM and DP-AdamW.

    python benchmarks/accuracy/language_model.py --data FOLDER
        [--parts mawps-8 ...] [--methods prism ...] [--steps 24] [--batch 256]
        [--options-of 24] [--rate-of 96] [--seeds 2]
    python benchmarks/accuracy/language_model.py --table

SmolLM2-135M-Instruct (or ``--model FOLDER``) with adapters of rank 4 in its top
layers, on SST-2, banking77 and the domains of clinc150 as instructions and on
the problems of mawps and gsm8k. Each private method has as many tuning runs for
each task, at epsilon 8: four learning rates (and more where the best is at an
end of them), then another momentum, more decay and no warm-up, each kept if the
perplexity of 100 to 200 tuning rows is lower; or the first ``--trials`` of
these. Long runs may take the options of shorter ones (``--options-of``): then
only the rate is tried again, from that of the short ones on; or not even the
rate (``--rate-of``). Then runs over several seeds, the same batches for all
methods, measured on other rows: perplexity of the responses, and the share of
answers that are right. Each run is added to
``benchmarks/results/language_model.json`` when it ends, and not run twice.
What enters the top layers is computed once for each task. On an idle CPU
core with bfloat16 units that is three minutes, compiling a method one, and a
run of SST-2 some twenty seconds; ten minutes and some four for gsm8k.
"""

import argparse
import dataclasses
import json
import pathlib
import sys
from collections.abc import Iterable
from typing import Any

ROOT = pathlib.Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / 'examples')]

from benchmarks.accuracy import language_tables  # noqa: E402
from benchmarks.accuracy.language_runs import Run, execute  # noqa: E402
from benchmarks.common import results as common  # noqa: E402

LADDER = [float(f'{x}e{e}') for e in range(-5, 2) for x in (1, 3)]
# Half a decade apart, the likeliest first: `--trials` may end before the last.
RATES = {
  'prism': (1e-1, 3e-2, 3e-1, 1e-2),
  'dp-adamw': (3e-2, 1e-2, 1e-1, 3e-3),
  'adamw': (3e-3, 1e-2, 1e-3),
}
METHODS = (
  *RATES, 'prism+rows', 'prism+metric', 'prism+metric+rows', 'dp-adamw+metric',
)  # fmt: skip
# One after the other, each kept if it helps on the tuning rows.
CHANGES: tuple[dict[str, Any], ...] = (
  {'b1': 0.5},
  {'weight_decay': 1.0},
  {'warm_up': False},
)
TRIALS = len(RATES['prism']) + len(CHANGES)
TUNING_SEED = 100
# Task, epsilon, seeds.
PARTS = {
  'sst2-8': ('sst2', 8.0, 2),
  'mawps-8': ('mawps', 8.0, 2),
  'banking77-8': ('banking77', 8.0, 2),
  'sst2-3': ('sst2', 3.0, 2),
  'mawps-3': ('mawps', 3.0, 2),
  'gsm8k-8': ('gsm8k', 8.0, 2),
  'banking77-3': ('banking77', 3.0, 2),
  'gsm8k-3': ('gsm8k', 3.0, 2),
  'clinc150-8': ('clinc150', 8.0, 5),
  'clinc150-3': ('clinc150', 3.0, 5),
}
TUNING_EPSILON = 8.0


class Results:
  """The file of finished runs.

  Args:
    path: JSON with a list of ``'rows'``, each with its ``'run'``.
  """

  def __init__(self, path: pathlib.Path):
    self.path = path

  def rows(self) -> list[dict[str, Any]]:
    if not self.path.exists():
      return []
    return json.loads(self.path.read_text('utf-8'))['rows']

  def get(self, run: Run) -> dict[str, Any] | None:
    wanted = dataclasses.asdict(run)
    return next((x for x in self.rows() if x['run'] == wanted), None)

  def put(self, result: dict[str, Any]) -> None:
    with common.locked(self.path):
      if any(row['run'] == result['run'] for row in self.rows()):
        return  # Of another worker.
      found = {
        'environment': common.environment(),
        'rows': [*self.rows(), result],
      }
      common.write(self.path, found)


def tune(
  results: Results,
  template: Run,
  trials: int,
  options_of: int | None = None,
  rate_of: int | None = None,
) -> tuple[Run | None, Run | None]:
  """The next tuning run that is needed, or the best one once there is none.

  There are so many trials for a private method. With ``options_of`` what runs
  of so many steps choose is taken, but for the rate, which is looked for anew;
  with ``rate_of`` all that runs of so many steps choose, in this way.
  """
  if rate_of is not None:
    shorter = dataclasses.replace(template, steps=rate_of)
    needed, best = tune(results, shorter, trials, options_of)
    if needed is not None:
      return needed, None
    return None, dataclasses.replace(best, steps=template.steps)
  if options_of is not None:
    short = dataclasses.replace(template, steps=options_of)
    needed, best = tune(results, short, trials)
    if needed is not None:
      return needed, None
    return _best_rate(results, dataclasses.replace(best, steps=template.steps))
  template = dataclasses.replace(
    template,
    seed=TUNING_SEED,
    is_tuning=True,
    epsilon=None if template.epsilon is None else TUNING_EPSILON,
  )

  def perplexity(run):
    return results.get(run)['tuning perplexity']

  runs = [
    dataclasses.replace(template, rate=rate)
    for rate in RATES[template.parts[0]][:trials]
  ]
  for run in runs:
    if results.get(run) is None:
      return run, None
  best = min(runs, key=perplexity)
  changes = CHANGES[: max(0, trials - len(runs))]
  # A rate at an end of those that were tried may not be the best.
  while trials >= len(RATES[template.parts[0]]):
    tried = [run.rate for run in runs]
    if min(tried) < best.rate < max(tried):
      break
    at = LADDER.index(best.rate) + (1 if best.rate == max(tried) else -1)
    run = dataclasses.replace(template, rate=LADDER[at])
    if results.get(run) is None:
      return run, None
    runs.append(run)
    best = min(best, run, key=perplexity)
  for change in changes if template.epsilon is not None else ():
    changed = dataclasses.replace(best, **change)
    if results.get(changed) is None:
      return changed, None
    best = min(best, changed, key=perplexity)
  return None, best


def _best_rate(results: Results, run: Run) -> tuple[Run | None, Run | None]:
  """From a run's rate on until the best has a neighbour on both sides."""

  def perplexity(run):
    return results.get(run)['tuning perplexity']

  while True:
    at = LADDER.index(run.rate)
    beside = [
      dataclasses.replace(run, rate=LADDER[i]) for i in (at, at - 1, at + 1)
    ]
    for each in beside:
      if results.get(each) is None:
        return each, None
    best = min(beside, key=perplexity)
    if best == run:
      return None, best
    run = best


def next_run(
  results: Results,
  part: str,
  template: Run,
  trials: int = TRIALS,
  methods: Iterable[str] = tuple(RATES),
  options_of: int | None = None,
  rate_of: int | None = None,
  seeds: int | None = None,
) -> Run | None:
  """What of a part is to be run next; None if all of it is there.

  Workers that begin with other methods do most of a part side by side.
  """
  task, epsilon, usual = PARTS[part]
  template = dataclasses.replace(template, task=task)
  zero_shot = dataclasses.replace(
    template, method='zero-shot', epsilon=None, seed=0
  )
  finals = [zero_shot]
  chosen = []
  for method in methods:
    each = dataclasses.replace(
      template, method=method, epsilon=None if method == 'adamw' else epsilon
    )
    needed, best = tune(results, each, trials, options_of, rate_of)
    if needed is not None:
      return needed
    chosen.append(
      dataclasses.replace(best, is_tuning=False, epsilon=each.epsilon)
    )
  finals += [
    dataclasses.replace(each, seed=seed)
    for seed in range(usual if seeds is None else seeds)
    for each in chosen
  ]
  return next((run for run in finals if results.get(run) is None), None)


def main():
  parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
  parser.add_argument('--data', type=pathlib.Path)
  parser.add_argument('--parts', nargs='+', default=list(PARTS), choices=PARTS)
  parser.add_argument('--model', default='smollm2')
  parser.add_argument('--steps', type=int, default=Run.steps)
  parser.add_argument('--batch', type=int, default=Run.batch)
  parser.add_argument('--layers', type=int, default=Run.layers)
  parser.add_argument(
    '--cache', type=pathlib.Path, default='runs/language_states'
  )
  parser.add_argument(
    '--results',
    type=pathlib.Path,
    default=common.FOLDER / 'language_model.json',
  )
  parser.add_argument(
    '--trials', type=int, default=TRIALS, help='of each private method'
  )
  parser.add_argument(
    '--methods', nargs='+', choices=METHODS, default=list(RATES)
  )
  parser.add_argument(
    '--options-of', type=int, metavar='STEPS', help='of runs of so many steps'
  )
  parser.add_argument(
    '--rate-of', type=int, metavar='STEPS', help='and the rate of these'
  )
  parser.add_argument('--seeds', type=int, help='2, of clinc150 5')
  parser.add_argument('--table', action='store_true', help='run nothing')
  args = parser.parse_args()
  results = Results(args.results)
  if args.table:
    print(language_tables.table(results.rows()), end='\n\n')
    print(language_tables.chosen(results.rows()))
    return
  if args.data is None:
    parser.error('--data is needed, the folder of the data sets.')
  template = Run(
    '', '', None, 0, steps=args.steps, batch=args.batch, layers=args.layers
  )
  for part in args.parts:
    while run := next_run(
      results, part, template, args.trials, args.methods, args.options_of,
      args.rate_of, args.seeds,
    ):  # fmt: skip
      result = execute(run, args.model, args.data, args.cache)
      results.put(result)
      print(
        f'{part} {run.method:>9} epsilon {run.epsilon} seed {run.seed} rate '
        f'{run.rate:g} b1 {run.b1:g} decay {run.weight_decay:g} warm-up '
        f'{run.warm_up:d}: tuning perplexity '
        f'{result["tuning perplexity"]:.4f}, exact '
        f'{result["tuning exact"]:.3f}, {result["seconds"]:.0f} s',
        flush=True,
      )


if __name__ == '__main__':
  main()
