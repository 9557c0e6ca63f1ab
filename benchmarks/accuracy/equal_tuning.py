"""The table: every method with the same tuning, heads trained, all charged.

    python benchmarks/accuracy/equal_tuning.py --data FOLDER [--tasks sst2 ...]
        [--methods prism ...] [--minutes 60]
    python benchmarks/accuracy/equal_tuning.py --table

Private LoRA fine-tuning of the top layer of all-MiniLM-L6-v2 and a head that
starts from a private release, at one epsilon for everything that reads
private rows. Each method is tuned on rows set aside for it, one option after
the other, over the same values: rate (half a decade apart, until the best has a
neighbour on both sides), b1, weight decay, start, average of the iterates.
Then some seeds are scored on other rows. Every run is added to
``benchmarks/results/equal_tuning.json`` when it ends; an interrupted table goes
on where it was. About a minute a run on one core.
"""

import argparse
import dataclasses
import json
import pathlib
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

ROOT = pathlib.Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / 'examples')]

from benchmarks.accuracy import (  # noqa: E402
  recipe_runs,
  recipes,
  utility_tables,
)
from benchmarks.accuracy.recipes import Recipe  # noqa: E402
from benchmarks.common import results as storage  # noqa: E402

LADDER = [float(f'{x}e{e}') for e in range(-6, 2) for x in (1, 3)]
FIRST_RATES = {'prism': 3e-2, 'published_prism': 3e-2, 'lora-rite': 3e-4,
               'dp-adambc': 1e-4, 'lora+': 1e-2}  # fmt: skip
SEEDS = tuple(range(5))
TASKS = tuple(recipe_runs.LENGTH)
# A row of the table: a method, perhaps in the coordinates of a metric.
ROWS: dict[str, dict[str, Any]] = {
  'prism': {},
  'dp-adamw': {},
  'prism, row scales': {'scales_rows': True},
  'prism, input metric': {'metric': 'second_moment'},
  'prism, row scales, input metric': {
    'scales_rows': True,
    'metric': 'second_moment',
  },
  'dp-adamw, input metric': {'metric': 'second_moment'},
  'head alone': {},
  'prism, ridge head': {'head': 'ridge'},
  'dp-adamw, ridge head': {'head': 'ridge'},
  'head alone, ridge': {'head': 'ridge'},
  'linear probe': {},
  'lora+': {},
  'ffa': {},
  'published_prism': {},
  'lora-rite': {},
  'dp-adambc': {},
}


def options(method: str) -> list[tuple[str, tuple]]:
  """What is tried after the rate, one after the other."""
  found: list[tuple[str, tuple]] = [('b1', (0.0, 0.9))]
  if method not in ('published_prism', 'linear probe'):
    found.append(('decay', (0.3, 1.0)))
    found.append(('start', ('balanced',)))
  if method not in recipes.MANIFOLD:
    found.append(('average', (True,)))
  return found


class Results:
  """The finished runs, in one file that workers share."""

  def __init__(self, path: pathlib.Path):
    self.path = path

  def read(self) -> dict[str, dict]:
    if not self.path.exists():
      return {}
    return json.loads(self.path.read_text('utf-8'))['runs']

  def put(self, recipe: Recipe, report: bool, result: dict) -> None:
    with storage.locked(self.path):
      runs = self.read() | {key(recipe, report): result}
      text = ',\n'.join(
        f'{json.dumps(k)}: {json.dumps(v)}' for k, v in sorted(runs.items())
      )
      environment = json.dumps(storage.environment())
      storage.write_text(
        self.path, f'{{"environment": {environment},\n"runs": {{\n{text}\n}}}}'
      )


def key(recipe: Recipe, report: bool) -> str:
  return f'{recipe.name}{"" if report else "-tuning"}'


class Missing(Exception):
  """What a choice waits for."""

  def __init__(self, recipe: Recipe):
    super().__init__(recipe)
    self.recipe = recipe


def tuned(runs: dict[str, dict], recipe: Recipe) -> Recipe:
  """The best options of a row, by the rows set aside for that.

  Raises:
    Missing: A run that has to be done first.
  """
  if recipe.method == 'head alone':
    return recipe

  def score(each: Recipe) -> float:
    found = runs.get(key(each, False))
    if found is None:
      raise Missing(each)
    return found['accuracy']

  def best_rate(each: Recipe) -> Recipe:
    while True:
      at = LADDER.index(each.rate)
      beside = [
        dataclasses.replace(each, rate=LADDER[i]) for i in (at, at - 1, at + 1)
      ]
      best = max(beside, key=score)
      if best == each:
        return each
      each = best

  found = best_rate(
    dataclasses.replace(recipe, rate=FIRST_RATES.get(recipe.method, 1e-2))
  )
  for name, values in options(recipe.method):
    others = [dataclasses.replace(found, **{name: x}) for x in values]
    found = max([found, *others], key=score)
  # Other options may want another rate.
  return best_rate(found)


def wanted(
  runs: dict[str, dict], rows: list[str], tasks: list[str], seeds
) -> Iterator[tuple[Recipe, bool]]:
  """What can be run now, in the order of the table."""
  for task in tasks:
    for row in rows:
      method = row.partition(',')[0]
      try:
        best = tuned(runs, Recipe(method, task, **ROWS[row]))
      except Missing as missing:
        yield missing.recipe, False
        continue
      for seed in seeds:
        final = dataclasses.replace(best, seed=seed)
        if key(final, True) not in runs:
          yield final, True


def run_all(
  results: Results,
  todo: list[Recipe],
  data: pathlib.Path,
  cache: pathlib.Path,
  end: float,
) -> None:
  """Runs on tuning rows that are not stored yet, until a time."""
  for i, recipe in enumerate(todo):
    if time.monotonic() > end:
      break
    if key(recipe, False) not in results.read():
      result = recipe_runs.execute(recipe, data, cache, report=False)
      results.put(recipe, False, result)
      print(
        f'{len(todo) - i - 1:3} left; {recipe} {result["accuracy"]:.4f}',
        flush=True,
      )


def table(runs: dict[str, dict], tasks: list[str]) -> str:
  """Markdown: accuracies, and differences from the first row."""
  lines = [
    '| task | method | b1, decay, start, average, rate | accuracy'
    ' | less `prism` | p |',
    '| --- | --- | --- | --- | --- | --- |',
  ]
  for task in tasks:
    first = None
    for row, change in ROWS.items():
      try:
        best = tuned(runs, Recipe(row.partition(',')[0], task, **change))
      except Missing:
        continue
      found = [
        runs.get(key(dataclasses.replace(best, seed=seed), True))
        for seed in SEEDS
      ]
      done = [x for x in found if x is not None]
      if len(done) < len(SEEDS):
        continue
      right = [
        np.unpackbits(np.frombuffer(bytes.fromhex(x['right']), np.uint8))[
          : x['rows']
        ].astype(float)
        for x in done
      ]
      first = right if row == 'prism' else first
      mean = statistics.mean(x['accuracy'] for x in done)
      compared = ('', '')
      if first is not None and right is not first:
        pair = utility_tables.paired(right, first)
        compared = (
          f'{pair["difference"]:+.4f} ± {pair["standard error"]:.4f}',
          f'{pair["p"]:.2g}',
        )
      chosen = (
        f'{best.b1:g}, {best.decay:g}, {best.start}, '
        f'{"yes" if best.average else "no"}, {best.rate:g}'
      )
      lines.append(
        f'| {task} | {row} | {chosen} | {mean:.4f} | {" | ".join(compared)} |'
      )
  return '\n'.join(lines)


def parser_of(
  description: str, tasks: Sequence[str] = TASKS
) -> argparse.ArgumentParser:
  """The options of all scripts that add to these results."""
  parser = argparse.ArgumentParser(description=description)
  parser.add_argument('--data', type=pathlib.Path)
  parser.add_argument('--tasks', nargs='+', choices=TASKS, default=list(tasks))
  parser.add_argument('--cache', type=pathlib.Path, default='runs/encoded')
  parser.add_argument('--minutes', type=float, default=float('inf'))
  parser.add_argument('--table', action='store_true', help='run nothing')
  return parser


def options_of(
  parser: argparse.ArgumentParser,
) -> tuple[argparse.Namespace, float]:
  """What was asked for, and when to end."""
  args = parser.parse_args()
  if args.data is None and not args.table:
    parser.error('--data is needed: the folder of the data sets.')
  return args, time.monotonic() + 60 * args.minutes


def main() -> None:
  parser = parser_of(__doc__.split('\n')[0])
  parser.add_argument('--methods', nargs='+', choices=ROWS, default=list(ROWS))
  args, end = options_of(parser)
  results = Results(storage.path_of('equal_tuning'))
  if args.table:
    print(table(results.read(), args.tasks))
    return
  while time.monotonic() < end:
    runs = results.read()
    todo = list(wanted(runs, args.methods, args.tasks, SEEDS))
    if not todo:
      break
    recipe, report = todo[0]
    result = recipe_runs.execute(recipe, args.data, args.cache, report)
    results.put(recipe, report, result)
    print(
      f'{len(todo) - 1:3} known to be left; {recipe} {result["accuracy"]:.4f}'
      f'{"" if report else " on tuning rows"}, {result["seconds"]:.0f} s',
      flush=True,
    )


if __name__ == '__main__':
  main()
