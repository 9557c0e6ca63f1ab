"""Tables, tests and plots of what ``utility.py`` has run.

    python benchmarks/utility_report.py [--runs runs/utility]

Writes ``benchmarks/results/utility.md``, ``.json`` and plots. Methods are
compared on the same rows and seeds.
"""

import argparse
import dataclasses
import json
import pathlib
import statistics
import sys

import numpy as np
from scipy import stats

ROOT = pathlib.Path(__file__).parents[1]
for folder in (str(ROOT), str(ROOT / 'examples')):
  if folder not in sys.path:
    sys.path.insert(0, folder)

from benchmarks import (  # noqa: E402
  private_runs,
  timing,
  utility,
  utility_plots,
)
from benchmarks.private_runs import Run  # noqa: E402


def load(folder: pathlib.Path) -> dict[Run, dict]:
  """All finished runs."""
  out = {}
  for path in sorted(folder.glob('*.json')):
    result = json.loads(path.read_text('utf-8'))
    fields = dict(result['run'])
    fields['options'] = tuple(map(tuple, fields['options']))
    out[Run(**fields)] = result
  return out


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
      if run
      == dataclasses.replace(template, rate=run.rate, seed=utility.TUNING_SEED)
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
    rates = sorted(row.untuned)
    at = rates.index(row.rate)
    best = row.untuned[row.rate]
    cells = [
      f'{100 * (row.untuned[rate] - best):+.2f}'
      for rate in (rates[at - 1], rates[at + 1])
    ]
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


def varied(runs: dict[Run, dict], part: str, results) -> dict[str, dict]:
  """``{method: {change: accuracy - accuracy without it}}``, same seeds."""
  methods, changes, _ = utility.VARIED[part]
  out: dict[str, dict] = {}
  for method in methods:
    template = dataclasses.replace(utility.BASE, method=method)
    needed, rate = utility.tune(results, template)
    if needed:
      continue
    for change in changes:
      differences = []
      for seed in utility.SEEDS:
        plain = dataclasses.replace(template, rate=rate, seed=seed)
        other = utility.changed(plain, change)
        if plain in runs and other in runs:
          differences.append(
            runs[other]['test accuracy'] - runs[plain]['test accuracy']
          )
      if differences:
        mean = statistics.mean(differences)
        out.setdefault(method, {})[describe(change)] = mean
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
  for method in methods:
    template = dataclasses.replace(utility.BASE, method=method)
    needed, rate = utility.tune(results, template)
    if needed:
      continue
    for change in changes:
      plain = dataclasses.replace(template, rate=rate, seed=seeds[0])
      run = utility.changed(plain, change)
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


TITLES = {
  'core-3': 'SST-2, epsilon 3',
  'core-6': 'SST-2, epsilon 6',
  'core-1': 'SST-2, epsilon 1',
  'nonprivate': 'SST-2, not private',
  'rest-3': 'SST-2, epsilon 3, other methods',
  'trained-head': 'SST-2, epsilon 3, head trained too',
  'rows-10000': 'SST-2, 10,000 rows, epsilon 3',
  'rows-2000': 'SST-2, 2,000 rows, epsilon 3',
  'clinc150': 'clinc150 domains, epsilon 3',
  'banking77': 'banking77, epsilon 3',
  'maths': 'Next tokens of gsm8k and mawps, epsilon 3',
  'public-test': 'SST-2, epsilon 3, public validation rows (581)',
}
BY_EPSILON = ('core-1', 'core-3', 'core-6', 'nonprivate')
HEAD = """# Accuracy at equal privacy

Made by `benchmarks/utility_report.py` from {count} runs of
`benchmarks/utility.py` ({hours:.1f} hours of one core). Negative results stay
in.

**Set-up.** all-MiniLM-L6-v2, LoRA of rank 8 on all six matrices of the top
layer, sentence vectors of norm one, a random head that stays as it is (a task
that the adapters must solve; the linear probe trains the head on the frozen
vectors instead), 20 tokens a row, {steps} steps of expected batch {batch},
Poisson sampling, delta 1e-5, learning rate falling linearly to zero. 6,000 rows
cut from the training file are the test set, 3,000 others choose the learning
rate (half a decade apart, until the best has a neighbour on both sides), the
rest ({rows} rows where not said otherwise) is trained on. Means over seeds of
initial factors, batches and noise; each seed is the same for all methods. The
methods nearest to each other got ten, the others fewer.
Differences are tested on the same rows and seeds, with the variance of both.

Versions: {versions}; {device}, one thread a run.
"""


def main():
  parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
  parser.add_argument('--runs', type=pathlib.Path, default='runs/utility')
  parser.add_argument('--rows', type=int, default=58_349, help='trained on')
  args = parser.parse_args()
  runs, results = load(args.runs), utility.Results(args.runs)
  out = ROOT / 'benchmarks' / 'results'
  environment = timing.environment()
  text = [
    HEAD.format(
      count=len(runs),
      hours=sum(run['seconds'] for run in runs.values()) / 3600,
      steps=utility.BASE.steps,
      batch=utility.BASE.batch,
      rows=f'{args.rows:,}',
      versions=', '.join(
        f'{k} {v}' for k, v in environment['versions'].items()
      ),
      device=environment['processor'],
    )
  ]
  found = {
    part: rows
    # More seeds of some methods of a part are shown with it.
    for part in TITLES
    if (rows := rows_of(runs, part, results))
  }
  for part, rows in found.items():
    missing = len(utility.missing_runs(results, part))
    text.append(f'## {TITLES[part]}\n')
    if missing:
      text.append(f'Not finished: at least {missing} runs of this part lack.\n')
    text += [*table(rows), '']
  absent = [part for part in TITLES if part not in found]
  utility_plots.accuracies(
    {TITLES[part]: rows for part, rows in found.items()},
    out / 'utility_accuracy.png',
  )
  text += ['![Accuracies](utility_accuracy.png)', '']
  if len(by_epsilon := [found[x] for x in BY_EPSILON if x in found]) > 1:
    utility_plots.epsilons(by_epsilon, out / 'utility_epsilon.png')
    text += ['![Accuracy against epsilon](utility_epsilon.png)', '']
  if 'core-3' in found:
    utility_plots.rates(found['core-3'], out / 'utility_rates.png')
    utility_plots.curves(
      [r for r in found['core-3'] if r.method != 'linear probe'],
      private_runs.CURVE_STEPS,
      out / 'utility_curves.png',
    )
    text += [
      '![Learning rates](utility_rates.png)', '',
      '![Loss and signal to noise](utility_curves.png)', '',
      '## A learning rate that is not the best\n',
      'Points of accuracy on the test rows at epsilon 3 with the seed of the'
      ' tuning, a range of ten in all. `prism` has weight decay 0.1 and'
      ' `dp-adamw` 1e-4, their defaults; `decayed` is both with weight decay 1,'
      ' and AdamW with a warm-up of ten steps, which is built into PRISM.\n',
      *rates_table(found['core-3']), '',
    ]  # fmt: skip
  for part, title in (
    ('nuisances', 'What should not matter'),
    ('options', 'One option of PRISM at a time'),
  ):
    changes = varied(runs, part, results)
    if not changes:
      absent.append(part)
      continue
    utility_plots.changes(changes, out / f'utility_{part}.png')
    text += [
      f'## {title}\n',
      'Points of accuracy gained or lost at epsilon 3, at the learning rate'
      ' that is best without the change (no new tuning).\n',
      f'{len(utility.missing_runs(results, part))} runs of this part lack.\n',
      *varied_table(changes), '', f'![{title}](utility_{part}.png)', '',
    ]  # fmt: skip
  text += [
    '## The best rate of one model on another\n',
    'Accuracy on the test rows at epsilon 3, one seed, at a third of the rate'
    ' that was best as tuned / at that rate / at three times it. The gauge has'
    ' condition 100.\n',
    f'{len(utility.missing_runs(results, "transfer"))} runs of this part'
    ' lack.\n',
    *transfer_table(runs, results), '',
  ]  # fmt: skip
  if absent:
    names = ', '.join(f'`{part}`' for part in absent)
    text += [f'Not run yet: {names}.', '']
  (out / 'utility.md').write_text('\n'.join(text), 'utf-8')
  summary = []
  for run, result in runs.items():
    summary.append(
      {
        **{
          f.name: getattr(run, f.name)
          for f in dataclasses.fields(run)
          if getattr(run, f.name) != f.default
        },
        **{
          name: round(result[name], 4)
          for name in ('noise multiplier', 'tuning accuracy', 'test accuracy')
        },
      }
    )
  (out / 'utility.json').write_text(
    json.dumps({'environment': environment, 'runs': summary}) + '\n', 'utf-8'
  )
  print(f'Written to {out / "utility.md"}')


if __name__ == '__main__':
  main()
