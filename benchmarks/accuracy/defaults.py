"""Which defaults of ``prism`` are best over tasks.

    python benchmarks/accuracy/defaults.py --data FOLDER [--minutes 60]
    python benchmarks/accuracy/defaults.py --table

The text tasks of ``equal_tuning.py`` with a head of private class means, at
epsilon 3: every ``b1`` with every weight decay, each at the best of three rates
by the mean over seeds, on rows that are never those of a table. Points are less
those of the best setting of the task. Runs are stored with those of
``equal_tuning.py``; half a minute a run on one core.
"""

import itertools
import pathlib
import statistics
import sys
from collections.abc import Sequence

ROOT = pathlib.Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / 'examples')]

from benchmarks.accuracy import equal_tuning  # noqa: E402
from benchmarks.accuracy.recipes import Recipe  # noqa: E402
from benchmarks.common import results as storage  # noqa: E402

B1, DECAYS, RATES = (0.0, 0.5, 0.9), (0.1, 0.3), (1e-2, 3e-2, 1e-1)
SEEDS = (100, 101)
Setting = tuple[float, float]
SETTINGS: tuple[Setting, ...] = tuple(itertools.product(B1, DECAYS))


def recipe(task: str, setting: Setting, rate: float, seed: int) -> Recipe:
  b1, decay = setting
  return Recipe('prism', task, rate=rate, b1=b1, decay=decay, seed=seed)


def wanted(tasks: Sequence[str]) -> list[Recipe]:
  """All runs, the first seed of every setting first."""
  return [
    recipe(task, setting, rate, seed)
    for seed in SEEDS
    for task in tasks
    for setting in SETTINGS
    for rate in (3e-2, 1e-2, 1e-1)
  ]


def points(runs: dict[str, dict], task: str) -> dict[Setting, tuple]:
  """For each setting of a finished task its accuracy and its best rate."""
  found = {}
  for setting in SETTINGS:
    by_rate = {}
    for rate in RATES:
      keys = [
        equal_tuning.key(recipe(task, setting, rate, seed), False)
        for seed in SEEDS
      ]
      if not all(key in runs for key in keys):
        return {}
      by_rate[rate] = statistics.mean(runs[key]['accuracy'] for key in keys)
    best = max(by_rate, key=by_rate.__getitem__)
    found[setting] = (by_rate[best], best)
  return found


def table(runs: dict[str, dict], tasks: Sequence[str]) -> str:
  """Markdown: points below the best setting of each task, and their mean."""
  by_task = {task: points(runs, task) for task in tasks}
  tasks = [task for task, found in by_task.items() if found]
  lines = [
    f'| b1 | decay | {" | ".join(tasks)} | mean |',
    '| --- ' * (3 + len(tasks)) + '|',
  ]
  for setting in SETTINGS:
    cells, lost = [f'{x:g}' for x in setting], []
    for task in tasks:
      accuracy, rate = by_task[task][setting]
      best = max(x for x, _ in by_task[task].values())
      lost.append(100 * (accuracy - best))
      cells.append(f'{lost[-1]:.1f} (rate {rate:g})')
    mean = f'{statistics.mean(lost):.1f}' if lost else ''
    lines.append(f'| {" | ".join([*cells, mean])} |')
  return '\n'.join(lines)


def main() -> None:
  args, end = equal_tuning.options_of(
    equal_tuning.parser_of(__doc__.split('\n')[0])
  )
  results = equal_tuning.Results(storage.path_of('equal_tuning'))
  if args.table:
    print(table(results.read(), args.tasks))
    return
  equal_tuning.run_all(results, wanted(args.tasks), args.data, args.cache, end)


if __name__ == '__main__':
  main()
