"""Accuracy at equal privacy: PRISM and the alternatives on real text.

    python benchmarks/accuracy/utility.py --data FOLDER [--parts core ...]
        [--runs runs/utility]

Private LoRA fine-tuning of the top layer of all-MiniLM-L6-v2. Each method is
tuned on 3,000 rows set aside for it, over the same number of learning rates,
and reported on 6,000 other rows over several seeds. Every run is one small
file, written when it ends: an interrupted grid goes on where it was, and
several workers share it. About 40 seconds a run on one core.
``utility_report.py`` makes the tables and plots.
"""

import argparse
import dataclasses
import json
import pathlib
import sys
import time

ROOT = pathlib.Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / 'examples')]

from benchmarks.accuracy.private_runs import Run, execute  # noqa: E402
from benchmarks.common import results as storage  # noqa: E402

# Learning rates, half a decade apart. Where the best one is at an end, the next
# one on that side is tried too, until it is not.
RATES = {
  'prism': (1e-2, 3e-2, 1e-1),
  'prism, decayed': (3e-2, 1e-1, 3e-1),
  'prism, paper mode': (1e-2, 3e-2, 1e-1),
  'prism, muon': (1e-2, 3e-2, 1e-1),
  'prism, correlated noise': (1e-2, 3e-2, 1e-1),
  'dp-adamw': (1e-2, 3e-2, 1e-1),
  'dp-adamw, decayed': (1e-2, 3e-2, 1e-1),
  'lora+': (3e-3, 1e-2, 3e-2),
  'ffa': (1e-2, 3e-2, 1e-1),
  'linear probe': (1e-2, 3e-2, 1e-1),
  'lamb': (3e-3, 1e-2, 3e-2),
  'lora-rite': (1e-4, 3e-4, 1e-3),
  'lora-rite, spectral start': (1e-3, 3e-3, 1e-2),
  'dp-adambc': (3e-5, 1e-4, 3e-4),
  'dp-muon': (3e-4, 1e-3, 3e-3),
}
LADDER = [float(f'{x}e{e}') for e in range(-7, 2) for x in (1, 3)]
CORE = (
  'prism',
  'dp-adamw',
  'lora+',
  'prism, decayed',
  'dp-adamw, decayed',
  'prism, paper mode',
  'ffa',
  'linear probe',
)
REST = (
  'prism, correlated noise',
  'prism, muon',
  'lamb',
  'lora-rite',
  'lora-rite, spectral start',
  'dp-adambc',
  'dp-muon',
)
NEAREST = ('prism', 'linear probe', 'prism, paper mode', *CORE[1:5])
TUNING_SEED, SEEDS = 100, tuple(range(10))


class Results:
  """The files of finished runs.

  Args:
    folder: The folder of the files; made if it is not there.
  """

  def __init__(self, folder: pathlib.Path):
    self.folder = folder
    folder.mkdir(parents=True, exist_ok=True)

  def path(self, run: Run) -> pathlib.Path:
    return self.folder / f'{run.name}.json'

  def get(self, run: Run) -> dict | None:
    try:
      return json.loads(self.path(run).read_text('utf-8'))
    except FileNotFoundError:
      return None

  def claim(self, run: Run) -> bool:
    """Whether no other worker began it; a claim of an hour ago is void."""
    path = self.path(run).with_suffix('.claim')
    try:
      if path.exists() and time.time() - path.stat().st_mtime > 3600:
        path.unlink()
      path.touch(exist_ok=False)
    except FileExistsError:
      return False
    return True

  def put(self, run: Run, result: dict) -> None:
    storage.write_text(self.path(run), json.dumps(result))


def tuning_run(template: Run, rate: float) -> Run:
  """What decides on the rate of a run: never the public rows."""
  return dataclasses.replace(
    template, rate=rate, seed=TUNING_SEED, public_test=False
  )


def tune(results: Results, template: Run) -> tuple[list[Run], float | None]:
  """Runs that are still needed to choose a rate; the rate once there are none.

  The best on the tuning rows, with a neighbour on the ladder on both sides.
  """
  rates = list(RATES[template.method])
  while True:
    runs = {rate: tuning_run(template, rate) for rate in rates}
    found = {rate: results.get(run) for rate, run in runs.items()}
    missing = [run for rate, run in runs.items() if found[rate] is None]
    if missing:
      return missing, None
    best = max(rates, key=lambda rate: found[rate]['tuning accuracy'])
    at = LADDER.index(best)
    beside = [LADDER[at - 1], LADDER[at + 1]]
    if all(rate in rates for rate in beside):
      return [], best
    rates += [rate for rate in beside if rate not in rates]


# Correlated noise cancels in fixed coordinates: it needs a start of full rank.
# So does LoRA-RITE, which whitens with both factors.
STARTS = {
  'prism, correlated noise': {'initialization': 'balanced'},
  'lora-rite, spectral start': {'initialization': 'spectral'},
}


def tuned(results: Results, methods, template: Run, seeds) -> list[Run]:
  """The runs of a part that are missing and can be done now."""
  runs, chosen = [], []
  for method in methods:
    each = dataclasses.replace(
      template, method=method, **STARTS.get(method, {})
    )
    needed, rate = tune(results, each)
    runs += needed
    if rate is not None:
      chosen.append(dataclasses.replace(each, rate=rate))
  finals = [
    dataclasses.replace(each, seed=seed) for seed in seeds for each in chosen
  ]
  return runs + [run for run in finals if results.get(run) is None]


def changed(run: Run, change: dict) -> Run:
  """The run with a change; ``rungs`` moves its rate along the ladder."""
  change = dict(change)
  at = LADDER.index(run.rate) + change.pop('rungs', 0)
  return dataclasses.replace(run, rate=LADDER[at], **change)


def varied(results: Results, methods, template: Run, changes, seeds):
  """Runs with one change each, at the rate that is best without it."""
  runs = []
  for method in methods:
    each = dataclasses.replace(template, method=method)
    needed, rate = tune(results, each)
    runs += needed
    if rate is None:
      continue
    runs += [
      changed(dataclasses.replace(each, rate=rate, seed=seed), change)
      for seed in seeds
      for change in changes
    ]
  return [run for run in runs if results.get(run) is None]


BASE = Run('prism', 0.0, 3.0, 0)
# What should not matter: the same model and adapters, written otherwise.
NUISANCES = (
  {'gauge': 100.0},
  {'scale': 0.25},
  {'scale': 4.0},
  {'rank': 4},
  {'rank': 32},
  {'initialization': 'balanced'},
  {'initialization': 'spectral'},
)
# Whether the rate that is best for one model is good for another.
TRANSFER = tuple(
  {**change, 'rungs': rungs}
  for change in ({}, {'rank': 4}, {'rank': 32}, {'gauge': 100.0})
  for rungs in (-1, 0, 1)
)
# One factor at a time.
OPTIONS = (
  {'clip': 0.1},
  {'clip': 10.0},
  {'rank': 2},
  {'rank': 64},
  *(
    {'options': ((name, value),)}
    for name, value in (
      ('weight_decay', 0.0),
      ('weight_decay', 0.3),
      ('bias_correction', True),
      ('floor_factor', 0.1),
      ('floor_factor', 4.0),
      ('b1', 0.8),
      ('b1', 0.95),
      ('b2', 0.99),
    )
  ),
)
# A number of rows, an epsilon.
TUNED = {
  'core-3': (CORE, {}, SEEDS[:5]),
  'ten-seeds-3': (NEAREST, {}, SEEDS),
  'core-6': (CORE, {'epsilon': 6.0}, SEEDS[:3]),
  'ten-seeds-6': (NEAREST, {'epsilon': 6.0}, SEEDS),
  'rest-3': (REST, {}, SEEDS[:3]),
  'core-1': (CORE[:5], {'epsilon': 1.0}, SEEDS[:3]),
  'nonprivate': (CORE[:3], {'epsilon': None}, SEEDS[:3]),
  'trained-head': (CORE[:3], {'head': 'trained'}, SEEDS[:3]),
  'rows-10000': (CORE[:3], {'rows': 10_000}, SEEDS[:3]),
  'rows-2000': (CORE[:5], {'rows': 2_000}, SEEDS[:3]),
  'clinc150': (CORE[:5], {'task': 'clinc150', 'length': 16}, SEEDS[:3]),
  'banking77': (CORE[:5], {'task': 'banking77'}, SEEDS[:3]),
  'maths': (CORE[:3], {'task': 'maths', 'length': 64}, SEEDS[:3]),
  'public-test': (CORE[:2], {'public_test': True}, SEEDS[:3]),
}
VARIED = {
  'nuisances': (CORE[:5], NUISANCES, SEEDS[:1]),
  'transfer': (CORE[:2], TRANSFER, SEEDS[:1]),
  # One seed chose the rates: would another choice have changed the result?
  'lower-rate': (CORE[:2], ({'rungs': -1},), SEEDS[:5]),
  'options': (('prism',), OPTIONS, SEEDS[:3]),
}
# In the order in which they are run.
PARTS = (
  'core-3',
  'core-6',
  'ten-seeds-3',
  'ten-seeds-6',
  'nuisances',
  'options',
  'core-1',
  'rows-2000',
  'banking77',
  'clinc150',
  'nonprivate',
  'rest-3',
  'maths',
  'transfer',
  'lower-rate',
  'rows-10000',
  'trained-head',
  'public-test',
)


def missing_runs(results: Results, part: str) -> list[Run]:
  """What of a part is still to be run, as far as that can be said now."""
  if part in TUNED:
    methods, change, seeds = TUNED[part]
    return tuned(results, methods, dataclasses.replace(BASE, **change), seeds)
  methods, changes, seeds = VARIED[part]
  return varied(results, methods, BASE, changes, seeds)


def main():
  parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
  parser.add_argument('--data', type=pathlib.Path, required=True)
  parser.add_argument('--parts', nargs='+', default=PARTS, choices=PARTS)
  parser.add_argument('--runs', type=pathlib.Path, default='runs/utility')
  parser.add_argument('--cache', type=pathlib.Path, default='runs/encoded')
  args = parser.parse_args()
  results = Results(args.runs)
  for part in args.parts:
    done = False
    while not done:
      # Again after each pass: the first results say which runs come next.
      missing = missing_runs(results, part)
      done = not missing
      mine = next((run for run in missing if results.claim(run)), None)
      if missing and mine is None:
        time.sleep(5)  # Other workers are at them.
      elif mine is not None:
        run = mine
        result = execute(run, args.data, args.cache)
        results.put(run, result)
        print(
          f'{part}: {len(missing) - 1:4} left  {run.method:>18} epsilon'
          f' {run.epsilon} rate {run.rate:g} seed {run.seed}: tuning'
          f' {result["tuning accuracy"]:.4f}  {result["seconds"]:.0f} s',
          flush=True,
        )


if __name__ == '__main__':
  main()
