"""Accuracy at equal privacy on a language model: PRISM and DP-AdamW.

    python -m benchmarks.accuracy.language_model --data FOLDER
        [--only mawps-8 ...] [--methods prism ...] [--steps 24] [--batch 256]
        [--options-of 24] [--seeds 2]
    python -m benchmarks.accuracy.language_model --table

SmolLM2-135M-Instruct (or ``--model FOLDER``) with adapters of rank 4 in its top
layers, on SST-2 and banking77 as instructions and on
the problems of mawps and gsm8k. Each private method has as many tuning runs for
each task, at epsilon 8: four learning rates (and more where the best is at an
end of them), then another momentum, more decay and no warm-up, each kept if the
perplexity of 100 to 200 tuning rows is lower. Long runs may take the options of
shorter ones (``--options-of``): then only the rate is tried again, from that of
the short ones on. Then runs over several seeds, the same batches for all
methods, measured on other rows: perplexity of the responses, and the share of
answers that are right. Each run is added to
``benchmarks/results/language_model.json`` when it ends, and not run twice.
What enters the top layers is computed once for each task. On an idle CPU
core with bfloat16 units that is three minutes, compiling a method one, and a
run of SST-2 some twenty seconds; ten minutes and some four for gsm8k.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Iterator
from typing import Any

from benchmarks.accuracy import (
  language_plots,
  language_rows,
  language_runs,
  language_tables,
)
from benchmarks.accuracy.language_runs import Setting
from benchmarks.common import runner

# Half a decade apart.
RATES = {
  'prism': (1e-1, 3e-2, 3e-1, 1e-2),
  'dp-adamw': (3e-2, 1e-2, 1e-1, 3e-3),
  'adamw': (3e-3, 1e-2, 1e-3),
}
# One after the other, each kept if it helps on the tuning rows.
CHANGES: tuple[dict[str, Any], ...] = (
  {'b1': 0.5},
  {'weight_decay': 1.0},
  {'warm_up': False},
)
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
}
TUNING_EPSILON = 8.0


def tuned(
  find: runner.Find, template: Setting, options_of: int | None
) -> Setting:
  """The template with the best options, on the tuning rows.

  Args:
    find: From a setting to its row.
    template: Task, method and length.
    options_of: Steps of the runs whose options are taken; None tunes anew.

  Raises:
    runner.Missing: If a run has to be done first.
  """

  def score(setting: Setting) -> float | None:
    row = find(dataclasses.asdict(setting))
    return None if row is None else -row['tuning perplexity']

  steps = template.steps
  if options_of is not None:
    short = dataclasses.replace(template, steps=options_of)
    best = dataclasses.replace(tuned(find, short, None), steps=steps)
    return runner.best_rate(best, (best.rate,), score)
  template = dataclasses.replace(
    template,
    seed=TUNING_SEED,
    is_tuning=True,
    epsilon=None if template.epsilon is None else TUNING_EPSILON,
  )
  best = runner.best_rate(template, RATES[template.method], score)
  if template.epsilon is not None:
    for change in CHANGES:
      best = runner.best([best, dataclasses.replace(best, **change)], score)
  return best


def plan(
  find: runner.Find,
  parts: list[str],
  template: Setting,
  methods: list[str],
  options_of: int | None,
  seeds: int | None,
) -> Iterator[dict[str, Any]]:
  """What of some parts is known to be wanted, part after part."""
  for part in parts:
    task, epsilon, usual = PARTS[part]
    template = dataclasses.replace(template, task=task)
    yield dataclasses.asdict(dataclasses.replace(template, method='zero-shot'))
    chosen = []
    for method in methods:
      each = dataclasses.replace(
        template, method=method, epsilon=None if method == 'adamw' else epsilon
      )
      try:
        best = tuned(find, each, options_of)
      except runner.Missing as missing:
        yield from map(dataclasses.asdict, missing.settings)
        continue
      chosen.append(
        dataclasses.replace(best, is_tuning=False, epsilon=each.epsilon)
      )
    for seed in range(usual if seeds is None else seeds):
      for each in chosen:
        yield dataclasses.asdict(dataclasses.replace(each, seed=seed))


def main() -> None:
  parser = runner.add_data(runner.parser_of(__doc__))
  parser.set_defaults(cache=pathlib.Path('runs/language_states'))
  parser.add_argument('--model', default='smollm2')
  parser.add_argument('--steps', type=int, default=Setting.steps)
  parser.add_argument('--batch', type=int, default=Setting.batch)
  parser.add_argument('--layers', type=int, default=Setting.layers)
  parser.add_argument(
    '--methods', nargs='+', choices=RATES, default=list(RATES)
  )
  parser.add_argument(
    '--options-of', type=int, metavar='STEPS', help='of runs of so many steps'
  )
  parser.add_argument('--seeds', type=int, help='2 if not given')
  args = parser.parse_args()
  store = runner.store_of(
    args, 'language_model', by_device=False, defaults=language_runs.DEFAULTS
  )
  if args.table:
    print(language_tables.table(store.rows), end='\n\n')
    print(language_tables.chosen(store.rows))
    language_plots.draw(store.rows, store.path.with_suffix('.png'))
    return
  if args.data is None:
    parser.error('--data is needed, the folder of the data sets.')
  source = language_runs.Source(args.model, args.data, args.cache)
  template = Setting(steps=args.steps, batch=args.batch, layers=args.layers)
  parts = [x for x in PARTS if not args.only or x in args.only]
  wanted = functools.partial(
    plan, parts=parts, template=template, methods=args.methods,
    options_of=args.options_of, seeds=args.seeds,
  )  # fmt: skip
  if args.smoke:
    few = Setting('sst2', 'prism', 8.0, rate=0.1, steps=2, batch=32)
    language_rows.TASKS['sst2'] = dataclasses.replace(
      language_rows.TASKS['sst2'],
      private_rows=64, tuning_rows=32, table_rows=32,
    )  # fmt: skip
    wanted = runner.fixed([dataclasses.asdict(few)])

  def measure(setting):
    return language_runs.execute(Setting(**setting), source, smoke=args.smoke)

  runner.run(store, wanted, measure, args.minutes)


if __name__ == '__main__':
  main()
