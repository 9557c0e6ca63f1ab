"""What else may give points, each a short paired experiment.

    python benchmarks/accuracy/short_experiments.py --data FOLDER [--tasks ...]
    python benchmarks/accuracy/short_experiments.py --table

Around the setting that ``equal_tuning.py`` found for ``prism`` on clinc150, on
rows that are never those of a table: larger batches with fewer steps at the
same number of gradients, a slower or faster head, a clip of its own for the
head, scales of inputs and outputs from the released gradients
(``scale_by_row_moments``), a start along the frozen matrices with and without
an input metric. Each has three rates, and the best of them is compared with the
best of the setting as it is, on the same rows and seeds. Runs are stored with
those of ``equal_tuning.py``; half a minute a run on one core.
"""

import dataclasses
import pathlib
import statistics
import sys
from typing import Any

ROOT = pathlib.Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / 'examples')]

from benchmarks.accuracy import equal_tuning  # noqa: E402
from benchmarks.accuracy.recipes import Recipe  # noqa: E402
from benchmarks.common import results as storage  # noqa: E402

BASE = {'method': 'prism', 'b1': 0.0, 'decay': 0.3}
RATES = (1e-2, 3e-2, 1e-1)
SEEDS = (100, 101, 102)
METRIC = {'metric': 'second_moment'}
CHANGES: dict[str, dict[str, Any]] = {
  'as it is': {},
  'batch 128, 120 steps': {'batch': 128, 'steps': 120},
  'batch 512, 30 steps': {'batch': 512, 'steps': 30},
  'batch 1024, 15 steps': {'batch': 1024, 'steps': 15},
  'head three times slower': {'head_rate': 0.3},
  'head three times faster': {'head_rate': 3.0},
  'a third of the clip for the head': {'head_share': 1 / 3},
  'two thirds of the clip for the head': {'head_share': 2 / 3},
  'scales of rows from released gradients': {'scales_rows': True},
  'spectral start': {'start': 'spectral'},
  'input metric': METRIC,
  'input metric, spectral start': {**METRIC, 'start': 'spectral'},
}


def recipes_of(task: str, change: str) -> dict[float, list[Recipe]]:
  """By rate, one recipe a seed."""
  first = Recipe(task=task, **(BASE | CHANGES[change]))
  return {
    rate: [dataclasses.replace(first, rate=rate, seed=seed) for seed in SEEDS]
    for rate in RATES
  }


def accuracies(
  runs: dict[str, dict], task: str, change: str
) -> tuple[float, list[float]] | None:
  """Of the best rate, by seed; None before all runs are there."""
  found = {}
  for rate, recipes in recipes_of(task, change).items():
    keys = [equal_tuning.key(each, False) for each in recipes]
    if not all(key in runs for key in keys):
      return None
    found[rate] = [runs[key]['accuracy'] for key in keys]
  best = max(found, key=lambda rate: statistics.mean(found[rate]))
  return best, found[best]


def table(runs: dict[str, dict], tasks: list[str]) -> str:
  """Markdown, with the standard error of differences over the seeds."""
  lines = ['| task | change | rate | accuracy | points |', '| --- ' * 5 + '|']
  for task in tasks:
    base = accuracies(runs, task, 'as it is')
    for change in CHANGES:
      found = accuracies(runs, task, change)
      if base is None or found is None:
        continue
      rate, scores = found
      pairs = zip(scores, base[1], strict=True)
      gains = [100 * (one - other) for one, other in pairs]
      error = statistics.stdev(gains) / len(gains) ** 0.5
      points = f'{statistics.mean(gains):+.1f} ± {error:.1f}'
      lines.append(
        f'| {task} | {change} | {rate:g} | {statistics.mean(scores):.4f}'
        f' | {"" if change == "as it is" else points} |'
      )
  return '\n'.join(lines)


def main() -> None:
  args, end = equal_tuning.options_of(
    equal_tuning.parser_of(__doc__.split('\n')[0], ['clinc150'])
  )
  results = equal_tuning.Results(storage.path_of('equal_tuning'))
  if args.table:
    print(table(results.read(), args.tasks))
    return
  todo = [
    recipe
    for task in args.tasks
    for change in CHANGES
    for recipes in recipes_of(task, change).values()
    for recipe in recipes
  ]
  equal_tuning.run_all(results, todo, args.data, args.cache, end)


if __name__ == '__main__':
  main()
