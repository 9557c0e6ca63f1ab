"""Rows, tables and tests of the utility benchmark."""

import dataclasses
import statistics

import numpy as np
from scipy import stats

from benchmarks.accuracy import utility
from benchmarks.accuracy.private_runs import Run


def scores(result: dict) -> np.ndarray:
  """Score of each test row: whether it is right, or how many tokens of it."""
  stored = bytes.fromhex(result['test scores'])
  return np.frombuffer(stored, np.float16).astype(float)


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
    'seeds': seeds,
  }


@dataclasses.dataclass
class Row:
  """One method in one part.

  Attributes:
    method: Its name.
    rate: The learning rate that tuning chose.
    runs: Results by seed.
    tuning: Accuracy on the tuning rows by learning rate.
    untuned: Accuracy on the test rows by learning rate, of the same runs.
  """

  method: str
  rate: float
  runs: dict[int, dict]
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


def rows_of(runs: dict[Run, dict], part: str, results) -> list[Row]:
  """The methods of a part whose tuning is finished, best first."""
  methods, change, _ = utility.TUNED[part]
  out = []
  for method in methods:
    template = dataclasses.replace(
      utility.BASE,
      method=method,
      **{**change, **utility.STARTS.get(method, {})},
    )
    needed, rate = utility.tune(results, template)
    if needed:
      continue
    final = {
      seed: runs[run]
      for seed in utility.SEEDS
      if (run := dataclasses.replace(template, rate=rate, seed=seed)) in runs
    }
    tried = {
      run.rate: result
      for run, result in runs.items()
      if run == utility.tuning_run(template, run.rate)
    }
    tuning, untuned = (
      {each: result[f'{kind} accuracy'] for each, result in tried.items()}
      for kind in ('tuning', 'test')
    )
    if final:
      out.append(Row(method, rate, final, tuning, untuned))
  return sorted(out, key=lambda row: -statistics.mean(row.accuracies))


def table(rows: list[Row]) -> list[str]:
  """A table in Markdown, each method tested against PRISM's default."""
  out = [
    '| method | rate | accuracy | spread over seeds | seeds |'
    ' rates within a point | PRISM minus it |',
    '| --- | --- | --- | --- | --- | --- | --- |',
  ]
  ours = next((row for row in rows if row.method == 'prism'), None)
  for row in rows:
    values = row.accuracies
    spread = f'{statistics.stdev(values):.4f}' if len(values) > 1 else '-'
    against = '-'
    if ours and row is not ours:
      shared = sorted(ours.runs.keys() & row.runs.keys())
      if len(shared) > 1:
        found = paired(
          *([scores(each.runs[s]) for s in shared] for each in (ours, row))
        )
        against = (
          f'{found["difference"]:+.4f} ± {found["standard error"]:.4f}'
          f' (p = {found["p"]:.2g})'
        )
    out.append(
      f'| {row.method} | {row.rate:g} | {statistics.mean(values):.4f} |'
      f' {spread} | {len(values)} | {row.flat:.3g}x | {against} |'
    )
  return out


def rates_table(rows: list[Row]) -> list[str]:
  """What a rate that is wrong by half a decade costs, in points."""
  out = [
    '| method | best rate | a third of it | three times it |',
    '| --- | --- | --- | --- |',
  ]
  for row in rows:
    cells = [f'{100 * x:+.2f}' for x in row.beside.values()]
    out.append(f'| {row.method} | {row.rate:g} | ' + ' | '.join(cells) + ' |')
  return out


def describe(change: dict) -> str:
  """The change in a few characters, whatever its rate."""
  if 'rungs' in change:
    change = {name: x for name, x in change.items() if name != 'rungs'}
  if not change:
    return 'as tuned'
  (name, value), *_ = change.items()
  return '{}={}'.format(*value[0]) if name == 'options' else f'{name}={value}'


def at_best_rate(results, methods) -> dict[str, Run]:
  """The run of each method whose tuning is finished, without a seed."""
  out = {}
  for method in methods:
    template = dataclasses.replace(utility.BASE, method=method)
    needed, rate = utility.tune(results, template)
    if not needed:
      out[method] = dataclasses.replace(template, rate=rate)
  return out


def varied(runs: dict[Run, dict], part: str, results) -> dict[str, dict]:
  """``{method: {change: accuracy - accuracy without it}}``, same seeds."""
  methods, changes, _ = utility.VARIED[part]
  out: dict[str, dict] = {}
  for method, best in at_best_rate(results, methods).items():
    for change in changes:
      differences = []
      for seed in utility.SEEDS:
        plain = dataclasses.replace(best, seed=seed)
        other = utility.changed(plain, change)
        if plain in runs and other in runs:
          differences.append(
            runs[other]['test accuracy'] - runs[plain]['test accuracy']
          )
      if differences:
        mean = statistics.mean(differences)
        out.setdefault(method, {})[describe(change)] = mean
  return out


def at_other_rates(runs: dict[Run, dict], part: str, results) -> list[Row]:
  """The methods of a part that changes the rate, as if that had been chosen."""
  methods, changes, seeds = utility.VARIED[part]
  out = []
  for method, best in at_best_rate(results, methods).items():
    for change in changes:
      other = utility.changed(best, change)
      final = {
        seed: runs[run]
        for seed in seeds
        if (run := dataclasses.replace(other, seed=seed)) in runs
      }
      if final:
        out.append(Row(method, other.rate, final, {other.rate: 0.0}, {}))
  return out


def varied_table(found: dict[str, dict]) -> list[str]:
  """Points gained or lost by each change, and the spread over all of them."""
  changes = list(dict.fromkeys(c for row in found.values() for c in row))
  out = [
    '| change | ' + ' | '.join(found) + ' |',
    '| --- |' + ' --- |' * len(found),
  ]
  for change in changes:
    cells = [
      f'{100 * row[change]:+.2f}' if change in row else '-'
      for row in found.values()
    ]
    out.append(f'| `{change}` | ' + ' | '.join(cells) + ' |')
  spreads = [
    f'{100 * (max([0, *row.values()]) - min([0, *row.values()])):.2f}'
    for row in found.values()
  ]
  out.append('| **largest minus smallest** | ' + ' | '.join(spreads) + ' |')
  return out


def transfer_table(runs: dict[Run, dict], results) -> list[str]:
  """Accuracies at three rates, on the model of the tuning and on others."""
  methods, changes, seeds = utility.VARIED['transfer']
  cells: dict[str, dict[str, list[str]]] = {}
  for method, best in at_best_rate(results, methods).items():
    for change in changes:
      run = utility.changed(dataclasses.replace(best, seed=seeds[0]), change)
      cell = f'{runs[run]["test accuracy"]:.3f}' if run in runs else '-'
      cells.setdefault(describe(change), {}).setdefault(method, []).append(cell)
  out = [
    '| change | ' + ' | '.join(methods) + ' |',
    '| --- |' + ' --- |' * len(methods),
  ]
  for change, row in cells.items():
    each = (' / '.join(row.get(method, ['-'])) for method in methods)
    out.append(f'| `{change}` | ' + ' | '.join(each) + ' |')
  return out
