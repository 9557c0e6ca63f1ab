"""Comparisons of the runs of ``utility.py``, and their tables.

A comparison needs the score of every row, a difference of two methods on the
same rows and seeds. It is kept as a row of ``accuracy_compared.json``: of a
part and a method (``accuracy`` and how far ``prism`` is above it), or of a
part, a method and a change (``points``).
"""

import dataclasses
import json
import pathlib
import re
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from scipy import stats

from benchmarks.accuracy import sentences, utility
from benchmarks.common import plots, runner

TITLES = {
  'core-3': 'SST-2, epsilon 3',
  'core-6': 'SST-2, epsilon 6',
  'core-1': 'SST-2, epsilon 1',
  'nonprivate': 'SST-2, not private',
  'rest-3': 'SST-2, epsilon 3, other methods',
  'rows-10000': 'SST-2, 10,000 rows, epsilon 3',
  'rows-2000': 'SST-2, 2,000 rows, epsilon 3',
  'clinc150': 'clinc150 domains, epsilon 3',
  'banking77': 'banking77, epsilon 3',
  'maths': 'Next tokens of gsm8k and mawps, epsilon 3',
  'public-test': 'SST-2, epsilon 3, public validation rows (581)',
}


def shown(method: str) -> str:
  """The name of a method in Markdown."""
  code = r'^(prism|published_prism|contrib\.prism_muon|dp_muon)\b'
  return re.sub(code, r'`\1`', plots.name(method))


def paired(first: list[np.ndarray], second: list[np.ndarray]) -> dict:
  """Difference of two methods on the same rows and seeds.

  Rows and seeds (initial factors, batches, noise) are two crossed samples: the
  difference on row i with seed s is ``mean + a_i + b_s + e_is``, and the
  variance of its mean ``var(a) / rows + var(b) / seeds + var(e) / (rows
  seeds)``. The spread of row means estimates the first and the last term, that
  of seed means the second and the last. Degrees of freedom by Satterthwaite's
  formula.
  """
  difference = np.stack(first) - np.stack(second)
  seeds, rows = difference.shape
  of_rows, of_seeds = difference.mean(0), difference.mean(1)
  by_rows, by_seeds = of_rows.var(ddof=1) / rows, of_seeds.var(ddof=1) / seeds
  mean = difference.mean()
  rest = difference - of_rows - of_seeds[:, None] + mean
  both = np.sum(rest**2) / ((rows - 1) * (seeds - 1)) / (rows * seeds)
  variance = max(by_rows + by_seeds - both, by_rows, by_seeds)
  freedom = variance**2 / (by_rows**2 / (rows - 1) + by_seeds**2 / (seeds - 1))
  error = variance**0.5
  return {
    'difference': float(mean),
    'standard error': float(error),
    'p': float(2 * stats.t.sf(abs(mean) / error, freedom)),
  }


@dataclasses.dataclass
class Row:
  """One method in one part.

  Attributes:
    method: Its name.
    rate: The learning rate that tuning chose.
    runs: Rows of the store by seed.
    tuning: Accuracy on the tuning rows by learning rate.
    untuned: Accuracy on the test rows by learning rate, of the same runs.
  """

  method: str
  rate: float
  runs: dict[int, runner.Row]
  tuning: dict[float, float]
  untuned: dict[float, float]

  @property
  def accuracies(self) -> list[float]:
    return [run['test accuracy'] for run in self.runs.values()]

  @property
  def flat(self) -> float:
    """Ratio of the rates within one point of the best, without a gap."""
    rates = sorted(self.tuning)
    best = self.tuning[self.rate]
    low = high = rates.index(self.rate)
    while low and self.tuning[rates[low - 1]] > best - 0.01:
      low -= 1
    while high + 1 < len(rates) and self.tuning[rates[high + 1]] > best - 0.01:
      high += 1
    return rates[high] / rates[low]

  @property
  def beside(self) -> dict[str, float]:
    """What a rate half a decade off adds to the accuracy on the test rows."""
    rates = sorted(self.untuned)
    at = rates.index(self.rate)
    low, best, high = (self.untuned[x] for x in rates[at - 1 : at + 2])
    return {'rate / 3': low - best, 'rate * 3': high - best}

  def compared(self, ours: 'Row | None') -> dict[str, Any]:
    """Its row of comparisons; ``ours`` is that of ``prism``."""
    values = self.accuracies
    found = {
      'method': self.method,
      'rate': self.rate,
      'accuracy': statistics.mean(values),
      'seeds': len(values),
      'spread': statistics.stdev(values) if len(values) > 1 else None,
      'flat': self.flat,
    }
    if ours is None or ours is self:
      return found
    shared = sorted(ours.runs.keys() & self.runs.keys())
    if len(shared) < 2:
      return found
    scores = (
      [sentences.unpacked(each.runs[s]['scores']) for s in shared]
      for each in (ours, self)
    )
    return found | paired(*scores)


def of_seeds(
  find: runner.Find, setting: sentences.Setting
) -> dict[int, runner.Row]:
  """The rows of a setting by seed, without those that chose."""
  each = {
    seed: find(dataclasses.asdict(dataclasses.replace(setting, seed=seed)))
    for seed in utility.SEEDS
  }
  return {seed: row for seed, row in each.items() if row is not None}


def rows_of(find: runner.Find, part: str) -> list[Row]:
  """The methods of a part whose tuning is finished, best first."""
  names, change, _ = utility.TUNED[part]
  out = []
  for method in names:
    try:
      best = utility.tuned(utility.score_of(find), method, change)
    except runner.Missing:
      continue
    tried = {}
    for rate in runner.LADDER:
      other = dataclasses.replace(
        best, rate=rate, seed=utility.TUNING_SEED, public=False
      )
      if row := find(dataclasses.asdict(other)):
        tried[rate] = row
    tuning, untuned = (
      {rate: row[f'{kind} accuracy'] for rate, row in tried.items()}
      for kind in ('tuning', 'test')
    )
    if final := of_seeds(find, best):
      out.append(Row(method, best.rate, final, tuning, untuned))
  return sorted(out, key=lambda row: -statistics.mean(row.accuracies))


def describe(change: dict[str, Any]) -> str:
  """The change in a few characters, whatever its rate."""
  change = {k: v for k, v in change.items() if k != 'rungs'}
  if not change:
    return 'as tuned'
  ((name, value),) = change.items()
  return '{}={}'.format(*value[0]) if name == 'options' else f'{name}={value}'


def varied(find: runner.Find, part: str) -> Iterator[dict[str, Any]]:
  """A row for each change and method, on the same seeds as without it."""
  names, changes, _ = utility.VARIED[part]
  for method in names:
    try:
      best = utility.tuned(utility.score_of(find), method, {})
    except runner.Missing:
      continue
    plain = of_seeds(find, best)
    for change in changes:
      found = of_seeds(find, utility.changed(best, change))
      seeds = found.keys() & plain.keys()
      if seeds:
        points = statistics.mean(
          found[s]['test accuracy'] - plain[s]['test accuracy'] for s in seeds
        )
        yield {
          'method': method,
          'change': describe(change),
          'rungs': change.get('rungs', 0),
          'points': 100 * points,
          'accuracy': statistics.mean(found[s]['test accuracy'] for s in seeds),
        }


def comparisons(find: runner.Find) -> Iterator[dict[str, Any]]:
  """Comparisons of all parts whose runs have their scores."""
  for part in TITLES:
    rows = rows_of(find, part)
    if not all('scores' in run for x in rows for run in x.runs.values()):
      continue
    ours = next((row for row in rows if row.method == 'prism'), None)
    for row in rows:
      yield {'part': part, **row.compared(ours)}
    if part == 'core-3':
      for row in rows:
        others = ['other-rates']
        if row.method in utility.VARIED['nuisances'][0]:
          others.append('nuisances')
        for change, points in row.beside.items():
          found = {'method': row.method, 'change': change}
          for each in others:
            yield {'part': each, **found, 'points': 100 * points}
  for part in ('nuisances', 'options', 'transfer', 'lower-rate'):
    for found in varied(find, part):
      yield {'part': part, **found}


def renew(store: runner.Store, path: pathlib.Path) -> None:
  """Compares again what can be compared, and prints the tables."""
  old = json.loads(path.read_text('utf-8'))['rows'] if path.exists() else []
  keys = ('part', 'method', 'change', 'rungs')
  found = {tuple(map(row.get, keys)): row for row in old}
  if any('scores' in row for row in store.rows):
    # Runs without scores are older, and were compared when they had them.
    has_scores = {row.get('part') for row in comparisons(_scored(store.find))}
    found = {k: x for k, x in found.items() if x['part'] not in has_scores}
    for row in comparisons(_scored(store.find)):
      found[tuple(map(row.get, keys))] = row
    runner.write(path, list(found.values()))
  print(f'\n{table(list(found.values()), TITLES)}')


def _scored(find: runner.Find) -> runner.Find:
  """Only rows with scores."""

  def scored(setting: runner.Setting) -> runner.Row | None:
    row = find(setting)
    return row if row is not None and 'scores' in row else None

  return scored


def table(rows: list[dict[str, Any]], titles: dict[str, str]) -> str:
  """Parts in Markdown, each method tested against ``prism``."""
  lines: list[list[object]] = []
  for part in titles:
    lines += [
      [titles[part] if i == 0 else '', *cells]
      for i, cells in enumerate(_of_part(rows, part))
    ]
  head = ['', 'method', 'rate', 'accuracy', 'spread', 'seeds',
          'rates within a point', '`prism` minus it']  # fmt: skip
  return runner.markdown(head, lines)


def _of_part(rows: list[dict[str, Any]], part: str) -> Iterator[list[object]]:
  for row in rows:
    if row['part'] != part:
      continue
    against = ''
    if 'difference' in row:
      against = (
        f'{row["difference"]:+.4f} ± {row["standard error"]:.4f}'
        f' (p = {row["p"]:.2g})'
      )
    spread = '' if row['spread'] is None else f'{row["spread"]:.4f}'
    yield [
      shown(row['method']), f'{row["rate"]:g}', f'{row["accuracy"]:.4f}',
      spread, row['seeds'], f'{row["flat"]:.3g}x', against,
    ]  # fmt: skip


def by_change(
  rows: list[dict[str, Any]], part: str, cell: Callable[[list[dict]], str]
) -> str:
  """Changes down, methods across; ``cell`` of the rows of one entry."""
  found: dict[str, dict[str, list[dict]]] = {}
  for row in rows:
    if row['part'] == part:
      entry = found.setdefault(row['change'], {})
      entry.setdefault(row['method'], []).append(row)
  names = list(dict.fromkeys(x for row in found.values() for x in row))
  return runner.markdown(
    ['change', *map(shown, names)],
    [
      [f'`{change}`', *(cell(row[x]) if x in row else '-' for x in names)]
      for change, row in found.items()
    ],
  )
