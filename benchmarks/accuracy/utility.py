"""Accuracy at equal privacy: PRISM and the alternatives on real text.

    python -m benchmarks.accuracy.utility --data FOLDER [--only core-3 ...]
    python -m benchmarks.accuracy.utility --table

Private LoRA fine-tuning of the top layer of all-MiniLM-L6-v2 by `make_private`
(``sentences.py``). Parts, named by ``--only``:

``core-3`` and the like: each method in its usual setting, tuned on rows set
aside over learning rates half a decade apart, until the best has a neighbour on
both sides, and reported on other rows over several seeds.

``nuisances``, ``transfer``, ``lower-rate``, ``options``: one change each, at
the rate that is best without it.

``plan-30`` and the like: a linear probe at equal cost, by the number of steps.

Runs are rows of ``benchmarks/results/accuracy.json``, about a minute each on
one core. ``--table`` compares them, on the same rows and seeds, and draws.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from benchmarks.accuracy import sentences, utility_plots, utility_tables
from benchmarks.accuracy.sentences import Setting
from benchmarks.common import runner

# The first rates, where they are not these.
RATES = {
  'prism, decayed': (3e-2, 1e-1, 3e-1),
  'lora+': (3e-3, 1e-2, 3e-2),
  'lamb': (3e-3, 1e-2, 3e-2),
  'lora-rite': (1e-4, 3e-4, 1e-3),
  'lora-rite, spectral start': (1e-3, 3e-3, 1e-2),
  'dp-adambc': (3e-5, 1e-4, 3e-4),
  'dp-muon': (3e-4, 1e-3, 3e-3),
}
USUAL_RATES = (1e-2, 3e-2, 1e-1)
CORE = (
  'prism', 'dp-adamw', 'lora+', 'prism, decayed', 'dp-adamw, decayed',
  'prism, paper mode', 'ffa', 'linear probe',
)  # fmt: skip
REST = (
  'prism, muon', 'lamb', 'lora-rite', 'lora-rite, spectral start',
  'dp-adambc', 'dp-muon',
)  # fmt: skip
NEAREST = ('prism', 'linear probe', 'prism, paper mode', *CORE[1:5])
TUNING_SEED, SEEDS = 100, tuple(range(10))
# LoRA-RITE whitens with both factors: it needs a start of full rank.
STARTS = {'lora-rite, spectral start': 'spectral'}
# What should not matter: the same model and adapters, written otherwise.
NUISANCES: tuple[dict[str, Any], ...] = (
  {'gauge': 100.0}, {'scale': 0.25}, {'scale': 4.0}, {'rank': 4}, {'rank': 32},
  {'start': 'balanced'}, {'start': 'spectral'},
)  # fmt: skip
# Whether the rate that is best for one model is good for another.
TRANSFER = tuple(
  {**change, 'rungs': rungs}
  for change in ({}, {'rank': 4}, {'rank': 32}, {'gauge': 100.0})
  for rungs in (-1, 0, 1)
)
# One factor at a time.
OPTIONS: tuple[dict[str, Any], ...] = (
  {'clip': 0.1}, {'clip': 10.0}, {'rank': 2}, {'rank': 64},
  *(
    {'options': (option,)}
    for option in (
      ('weight_decay', 0.0), ('weight_decay', 0.3), ('bias_correction', True),
      ('floor_factor', 0.1), ('floor_factor', 4.0), ('b1', 0.8), ('b1', 0.95),
      ('b2', 0.99),
    )
  ),
)  # fmt: skip
# Methods, what differs from the usual setting, seeds.
TUNED: dict[str, tuple[Sequence[str], dict[str, Any], Sequence[int]]] = {
  'core-3': (CORE, {}, SEEDS[:5]),
  'core-6': (CORE, {'epsilon': 6.0}, SEEDS[:3]),
  'ten-seeds-3': (NEAREST, {}, SEEDS),
  'ten-seeds-6': (NEAREST, {'epsilon': 6.0}, SEEDS),
  'core-1': (CORE[:5], {'epsilon': 1.0}, SEEDS[:3]),
  'rows-2000': (CORE[:5], {'rows': 2_000}, SEEDS[:3]),
  'banking77': (CORE[:5], {'task': 'banking77'}, SEEDS[:3]),
  'clinc150': (CORE[:5], {'task': 'clinc150'}, SEEDS[:3]),
  'nonprivate': (CORE[:3], {'epsilon': None}, SEEDS[:3]),
  'rest-3': (REST, {}, SEEDS[:3]),
  'maths': (CORE[:3], {'task': 'maths'}, SEEDS[:3]),
  'rows-10000': (CORE[:3], {'rows': 10_000}, SEEDS[:3]),
  'public-test': (CORE[:2], {'public': True}, SEEDS[:3]),
  **{
    f'plan-{steps}': (
      ('linear probe',),
      {'task': 'clinc150', 'steps': steps, 'batch': 61_440 // steps},
      SEEDS[:5],
    )
    for steps in (30, 60, 120, 240, 480)
  },
}
# One seed chose the rates: `lower-rate` asks whether it was luck.
VARIED: dict[str, tuple[Sequence[str], Sequence[dict], Sequence[int]]] = {
  'nuisances': (CORE[:5], NUISANCES, SEEDS[:1]),
  'options': (('prism',), OPTIONS, SEEDS[:3]),
  'transfer': (CORE[:2], TRANSFER, SEEDS[:1]),
  'lower-rate': (CORE[:2], ({'rungs': -1},), SEEDS[:5]),
}
Score = Callable[[Setting], float | None]


def score_of(find: runner.Find) -> Score:
  """Accuracy on the tuning rows, None for a setting that was not run."""

  def score(setting: Setting) -> float | None:
    row = find(dataclasses.asdict(setting))
    return None if row is None else row['tuning accuracy']

  return score


def usual(method: str, change: dict[str, Any]) -> Setting:
  """The setting of a method in a part, without a rate."""
  start = STARTS.get(method, 'default')
  return Setting(**{'method': method, 'start': start, **change})


def tuned(score: Score, method: str, change: dict[str, Any]) -> Setting:
  """The same at its best rate.

  The public rows choose nothing.

  Raises:
    runner.Missing: If a run has to be done first.
  """
  setting = usual(method, change | {'public': False})
  rates = RATES.get(method, USUAL_RATES)
  found = runner.best_rate(setting, rates, score)
  return dataclasses.replace(found, public=change.get('public', False))


def changed(setting: Setting, change: dict[str, Any]) -> Setting:
  """The setting with a change; ``rungs`` moves its rate along the ladder."""
  change = dict(change)
  at = runner.LADDER.index(setting.rate) + change.pop('rungs', 0)
  return dataclasses.replace(setting, rate=runner.LADDER[at], **change)


def wanted(find: runner.Find, part: str) -> Iterator[Setting]:
  """What is known to belong to a part: runs that choose, then seeds."""
  score, chosen = score_of(find), []
  if part in TUNED:
    names, change, seeds = TUNED[part]
    choices = [functools.partial(tuned, score, x, change) for x in names]
    changes: Sequence[dict[str, Any]] = ({},)
  else:
    names, changes, seeds = VARIED[part]
    choices = [functools.partial(tuned, score, x, {}) for x in names]
  for choose in choices:
    try:
      chosen.append(choose())
    except runner.Missing as missing:
      yield from missing.settings
  for seed in seeds:
    for setting in chosen:
      for change in changes:
        moved = setting
        if change:
          moved = changed(setting, change)
        yield dataclasses.replace(moved, seed=seed)


PARTS = (*TUNED, *VARIED)


def plan(find: runner.Find, parts: Iterable[str]) -> Iterator[dict[str, Any]]:
  """What of some parts is to be run, part after part."""
  for part in parts:
    for setting in wanted(find, part):
      yield dataclasses.asdict(setting)


def smoke_settings() -> list[Setting]:
  """One step of each kind of run."""
  few: dict[str, Any] = {
    'task': 'banking77', 'steps': 2, 'batch': 32, 'rows': 500, 'rate': 1e-2,
  }  # fmt: skip
  return [
    Setting(**few),
    Setting(method='ffa', **few),
  ]


def main() -> None:
  parser = runner.add_data(runner.parser_of(__doc__))
  args = parser.parse_args()
  store = runner.store_of(
    args, 'accuracy', by_device=False, defaults=sentences.DEFAULTS
  )
  if args.table:
    utility_tables.renew(store, args.output / 'accuracy_compared.json')
    utility_plots.draw(store.find, args.output)
    return
  if args.data is None:
    parser.error('--data is needed: the folder of the data sets.')
  folders = sentences.Folders(args.data, args.cache)
  parts = [x for x in PARTS if not args.only or x in args.only]
  chosen = functools.partial(plan, parts=parts)
  if args.smoke:
    chosen = runner.fixed(map(dataclasses.asdict, smoke_settings()))

  def measure(setting):
    return sentences.execute(Setting(**setting), folders, smoke=args.smoke)

  runner.run(store, chosen, measure, args.minutes)


if __name__ == '__main__':
  main()
