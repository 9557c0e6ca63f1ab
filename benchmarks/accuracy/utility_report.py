"""Tables, tests and plots of what ``utility.py`` has run.

    python benchmarks/accuracy/utility_report.py [--runs runs/utility]
        [--plot-only]

Writes ``benchmarks/results/utility.md``, ``.json`` and plots. Methods are
compared on the same rows and seeds. ``--plot-only`` draws from the stored
``utility.json`` what needs no more than it has: all plots but the curves.
"""

import argparse
import dataclasses
import json
import pathlib
import sys

ROOT = pathlib.Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / 'examples')]

from benchmarks.accuracy import (  # noqa: E402
  private_runs,
  small_decoder,
  utility,
  utility_plots,
  utility_tables,
)
from benchmarks.accuracy.private_runs import Run  # noqa: E402
from benchmarks.common import results as storage  # noqa: E402


def load(folder: pathlib.Path) -> dict[Run, dict]:
  """All finished runs."""
  out = {}
  for path in sorted(folder.glob('*.json')):
    result = json.loads(path.read_text('utf-8'))
    fields = dict(result['run'])
    fields['options'] = tuple(map(tuple, fields['options']))
    out[Run(**fields)] = result
  return out


class Stored:
  """The runs of ``utility.json``, in the place of ``utility.Results``."""

  def __init__(self, path: pathlib.Path):
    fields = {f.name: f.default for f in dataclasses.fields(Run)}
    self.runs = {}
    for row in json.loads(path.read_text('utf-8'))['runs']:
      described = {name: row.get(name, x) for name, x in fields.items()}
      described['options'] = tuple(map(tuple, described['options']))
      self.runs[Run(**described)] = row | {'run': described}

  def get(self, run: Run) -> dict | None:
    return self.runs.get(run)


def draw(found: dict, out: pathlib.Path) -> None:
  """The plots of accuracies; ``found`` has the rows of each part."""
  utility_plots.accuracies(
    {TITLES[part]: rows for part, rows in found.items()},
    out / 'utility_accuracy.png',
  )
  if len(by_epsilon := [found[x] for x in BY_EPSILON if x in found]) > 1:
    utility_plots.epsilons(by_epsilon, out / 'utility_epsilon.png')
  if 'core-3' in found:
    utility_plots.rates(found['core-3'], out / 'utility_rates.png')


def changes_of(runs, part: str, results, found: dict) -> dict[str, dict]:
  """What each change of a part makes; the rates beside the best are some."""
  changes = utility_tables.varied(runs, part, results)
  if part == 'nuisances':
    beside = {row.method: row.beside for row in found.get('core-3', [])}
    changes = {name: x | beside.get(name, {}) for name, x in changes.items()}
  return changes


def draw_again(out: pathlib.Path) -> None:
  """The plots from ``utility.json``."""
  stored = Stored(out / 'utility.json')
  found = {
    part: rows
    for part in TITLES
    if (rows := utility_tables.rows_of(stored.runs, part, stored))
  }
  draw(found, out)
  for part in ('nuisances', 'options'):
    if changes := changes_of(stored.runs, part, stored, found):
      utility_plots.changes(changes, out / f'utility_{part}.png')


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

Made by `benchmarks/accuracy/utility_report.py` from {count} runs of
`benchmarks/accuracy/utility.py` ({hours:.1f} hours of one core). Negative
results stay in.

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

The other tasks are cut likewise (a fifth for the test, a tenth for the tuning,
where that is less). clinc150: the domain of a command, 16 tokens. banking77:
one of 77 intents. gsm8k and mawps: the next token of a question and its worked
answer, 64 byte pairs, by a decoder of two layers of width 128 that was trained
for {public} steps on SST-2, clinc150 and banking77 as public text; accuracy is
the share of tokens.

Versions: {versions}; {device}, one thread a run.
"""


def main():
  parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
  parser.add_argument('--runs', type=pathlib.Path, default='runs/utility')
  parser.add_argument('--rows', type=int, default=58_349, help='trained on')
  parser.add_argument('--plot-only', action='store_true')
  args = parser.parse_args()
  if args.plot_only:
    draw_again(storage.FOLDER)
    return
  runs, results = load(args.runs), utility.Results(args.runs)
  out = storage.FOLDER
  environment = storage.environment()
  text = [
    HEAD.format(
      count=len(runs),
      hours=sum(run['seconds'] for run in runs.values()) / 3600,
      steps=utility.BASE.steps,
      batch=utility.BASE.batch,
      public=small_decoder.PUBLIC_STEPS,
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
    if (rows := utility_tables.rows_of(runs, part, results))
  }
  for part, rows in found.items():
    missing = len(utility.missing_runs(results, part))
    text.append(f'## {TITLES[part]}\n')
    if missing:
      text.append(f'Not finished: at least {missing} runs of this part lack.\n')
    text += [*utility_tables.table(rows), '']
  absent = [part for part in TITLES if part not in found]
  draw(found, out)
  text += ['![Accuracies](utility_accuracy.png)', '']
  if len([x for x in BY_EPSILON if x in found]) > 1:
    text += ['![Accuracy against epsilon](utility_epsilon.png)', '']
  if 'core-3' in found:
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
      *utility_tables.rates_table(found['core-3']), '',
    ]  # fmt: skip
  for part, title in (
    ('nuisances', 'What should not matter'),
    ('options', 'One option of PRISM at a time'),
  ):
    changes = changes_of(runs, part, results, found)
    if not changes:
      absent.append(part)
      continue
    utility_plots.changes(changes, out / f'utility_{part}.png')
    text += [
      f'## {title}\n',
      'Points of accuracy gained or lost at epsilon 3, at the learning rate'
      ' that is best without the change (no new tuning), means over the seeds'
      ' that were run (one to three).\n',
      f'{len(utility.missing_runs(results, part))} runs of this part lack.\n',
      *utility_tables.varied_table(changes), '',
      f'![{title}](utility_{part}.png)', '',
    ]  # fmt: skip
  text += [
    '## The best rate of one model on another\n',
    'Accuracy on the test rows at epsilon 3, one seed, at a third of the rate'
    ' that was best as tuned / at that rate / at three times it. The gauge has'
    ' condition 100.\n',
    f'{len(utility.missing_runs(results, "transfer"))} runs of this part'
    ' lack.\n',
    *utility_tables.transfer_table(runs, results), '',
  ]  # fmt: skip
  text += [
    '## A third of the rate that was chosen\n',
    'One seed chose the rates. Here are the two nearest methods at a third of'
    f' theirs. {len(utility.missing_runs(results, "lower-rate"))} runs of this'
    ' part lack.\n',
    *utility_tables.table(
      utility_tables.at_other_rates(runs, 'lower-rate', results)
    ), '',
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
