"""The names that comments of pages use (``figures.py``): stored results."""

import functools
import json
import math
import pathlib
import statistics
import sys
from collections.abc import Callable, Iterator
from typing import Any

ROOT = pathlib.Path(__file__).parents[2]
RESULTS = ROOT / 'benchmarks' / 'results'
# Benchmarks use the models of the examples.
sys.path.insert(0, str(ROOT / 'examples'))

from benchmarks.accuracy import (  # noqa: E402
  language_tables,
  regret,
  utility_tables,
)
from benchmarks.accuracy.digits import DEFAULTS, EXPERIMENTS  # noqa: E402
from benchmarks.accuracy.sentences import DEFAULTS as TEXTS  # noqa: E402
from benchmarks.common import runner  # noqa: E402

Row = dict[str, Any]
METHODS = ('prism', 'dp-adamw', 'lora+', 'prism, paper mode', 'linear probe',
           'ffa', 'prism, decayed', 'dp-adamw, decayed')  # fmt: skip


@functools.cache
def stored(name: str) -> list[Row]:
  """The rows of a file of results."""
  return json.loads((RESULTS / f'{name}.json').read_text('utf-8'))['rows']


def rows(name: str, **fields: Any) -> list[Row]:
  """Those with these fields; ``_`` is a space, ``None`` no such field."""
  wanted = {k.replace('_', ' '): v for k, v in fields.items()}
  return [
    x for x in stored(name) if all(x.get(k) == v for k, v in wanted.items())
  ]


def row(name: str, **fields: Any) -> Row:
  """The only one."""
  (found,) = rows(name, **fields)
  return found


# Accuracy on texts.


def compared(part: str, method: str) -> list[float]:
  """Accuracy; then ``prism`` less it, the standard error, and p."""
  keys = 'accuracy', 'difference', 'standard error', 'p'
  return [
    x[key]
    for x in rows('accuracy_compared', part=part, method=method)
    for key in keys
    if key in x
  ]


def points(part: str, method: str) -> tuple[float, float]:
  """By how many points ``prism`` is ahead of a method, and p."""
  _, difference, _, p = compared(part, method)
  return 100 * difference, p


def varied(part: str) -> dict[str, dict[str, float]]:
  """Points by change and method, and the range of each method."""
  out: dict[str, dict[str, float]] = {}
  for x in rows('accuracy_compared', part=part):
    out.setdefault(x['change'], {})[x['method']] = x['points']
  spread = {}
  for method in dict.fromkeys(x for found in out.values() for x in found):
    of_method = [0, *(x[method] for x in out.values() if method in x)]
    spread[method] = max(of_method) - min(of_method)
  return {**out, 'largest minus smallest': spread}


def accuracy_table() -> str:
  titles = {
    **utility_tables.TITLES,
    'lower-rate': 'SST-2, epsilon 3, a third of the chosen rate',
  }
  return utility_tables.table(stored('accuracy_compared'), titles)


def changes(part: str) -> str:
  """A table of :func:`varied`."""
  return utility_tables.by_change(
    stored('accuracy_compared'), part, lambda x: f'{x[0]["points"]:+.2f}'
  )


def transfer() -> str:
  return utility_tables.by_change(
    stored('accuracy_compared'),
    'transfer',
    lambda found: ' / '.join(f'{x["accuracy"]:.3f}' for x in found),
  )


@functools.cache
def of_texts() -> runner.Find:
  return runner.Store(RESULTS / 'regret.json', TEXTS).find


@functools.cache
def cells_of_regret() -> list[regret.Cell]:
  return regret.cells(of_texts())


def gained_by_share() -> float:
  """Points of a larger share for the head, on rows that choose."""
  each = [
    regret.by_share(task, epsilon)
    for task, epsilon, pooled in regret.CELLS
    if pooled and task in regret.TEXTS
  ]
  scores = [[regret.score(of_texts(), x) for x in pair] for pair in each]
  return 100 * statistics.mean(ours - half for half, ours in scores)


def regrets_of_texts(method: str, pooled: bool = False) -> list[float]:
  """Points by which a recipe of other texts is behind the best, by task."""
  return [
    x.regrets[method]
    for x in cells_of_regret()
    if x.is_counted and x.pooled == pooled
  ]


def on_digits() -> list[regret.Cell]:
  """From the smallest epsilon to the largest."""
  return [x for x in cells_of_regret() if x.task == regret.DIGITS]


def changed_on_digits(
  change: Callable[[float], list[regret.Setting]],
) -> list[list[float]]:
  """Accuracies by epsilon, without a change of ``regret.py`` and with it."""
  pairs = zip(*map(change, sorted(regret.EPSILONS)), strict=True)
  return [
    [statistics.mean(regret.accuracies(of_texts(), x)) for x in each]
    for each in pairs
  ]


def means_of_regret(method: str) -> float:
  """Mean of the points, at all epsilons, if texts are means of their tokens."""
  return statistics.mean(regrets_of_texts(method, pooled=True))


def rows_of_regret(method: str, **fields: Any) -> float:
  """Mean accuracy over the seeds that are reported."""
  found = rows('regret', method=method, **fields)
  return statistics.mean(
    x['test accuracy'] for x in found if x.get('seed', 100) in regret.SEEDS
  )


def recipes(method: str) -> list[tuple[float, float, str]]:
  """Rate, decay and head, chosen without these texts; without none, last."""
  unseen = (*regret.TEXTS.values(), regret.DIGITS)
  return [regret.recipe(of_texts(), method, x) for x in dict.fromkeys(unseen)]


def accuracies(method: str, **fields: Any) -> dict[int, float]:
  """Test accuracy by seed of the runs with these fields and no others."""
  measured = {'noise multiplier', 'tuning accuracy', 'test accuracy', 'scores',
              'seconds', 'seed'}  # fmt: skip
  wanted = {k: v for k, v in {'method': method, **fields}.items()
            if {'method': 'prism', 'epsilon': 3.0}.get(k) != v}  # fmt: skip
  return {
    run.get('seed', 100): run['test accuracy']
    for run in stored('accuracy')
    if {k: v for k, v in run.items() if k not in measured} == wanted
  }


def three_seeds(method: str, **fields: Any) -> float:
  found = accuracies(method, **fields)
  return statistics.mean(found[seed] for seed in range(3))


def probes(steps: int) -> list[float]:
  """Mean accuracy of probes by ``utility.py --only plan-STEPS``, its error."""
  found = [
    x['test accuracy']
    for x in rows('accuracy', method='linear probe', task='clinc150')
    if x.get('seed', 100) < 5
    and (x.get('steps', 120), x.get('batch', 256)) == (steps, 61_440 // steps)
  ]
  return [statistics.mean(found), statistics.stdev(found) / len(found) ** 0.5]


def error_of_an_option() -> float:
  """Standard error of what an option adds, in points; median of options."""
  base = accuracies('prism', rate=0.1)
  tried = {
    tuple(map(tuple, run['options']))
    for run in stored('accuracy')
    if 'method' not in run and 'options' in run and 'head' not in run
  }
  errors = []
  for options in tried:
    found = accuracies('prism', rate=0.1, options=list(map(list, options)))
    differences = [100 * (found[seed] - base[seed]) for seed in found]
    if len(differences) > 2:
      errors.append(statistics.stdev(differences) / len(differences) ** 0.5)
  return statistics.median(errors)


# Language models.


def language_runs(*, short: bool) -> list[Row]:
  return [x for x in stored('language_model')
          if (x.get('steps', 24) <= 24) == short]  # fmt: skip


def language_table(*, short: bool) -> str:
  return language_tables.table(language_runs(short=short), finished_only=True)


def _language(task: str, steps: int, epsilon: float) -> dict[str, list[Row]]:
  groups = language_tables.groups(language_runs(short=steps <= 24))
  (found,) = (
    x
    for key, x in groups.items()
    if (*key[:2], key[4]) == (task, steps, epsilon)
  )
  return found


def ahead(task: str, steps: int, epsilon: float = 8.0) -> tuple[float, ...]:
  """``prism``, of DP-AdamW: nats, p, right answers in a hundred rows, p."""
  methods = _language(task, steps, epsilon)
  nats, right = (
    language_tables.compared(methods, values)
    for values in (language_tables.losses, language_tables.exact)
  )
  return -nats['difference'], nats['p'], 100 * right['difference'], right['p']


def right(task: str, steps: int, method: str) -> float:
  """Percent, at epsilon 8."""
  runs = _language(task, steps, 8.0)[method]
  return statistics.mean(100 * language_tables.exact(x).mean() for x in runs)


# Digits.


def digits(**change: Any) -> Row:
  """The row with this change and no other."""
  wanted = {k: v for k, v in change.items() if DEFAULTS[k] != v}
  (found,) = (
    x
    for x in stored('digits_cpu')
    if {k: v for k, v in x.items() if k in DEFAULTS} == wanted
  )
  return found


def acc(**change: Any) -> float | None:
  """Accuracy on digits, or None if it was not measured."""
  try:
    return digits(**change)['accuracy']
  except ValueError:
    return None


OURS = {'bias_correction': False, 'weight_decay': 0.1}
BALANCED = {'start': 'balanced'}
ADAM = {'method': 'dp-adamw'}


def options() -> list[Row]:
  """The rows of the experiment on options."""
  return [digits(**change) for change in EXPERIMENTS['options']()]


def spreads(found: list[Row]) -> list[float]:
  """The smallest, the median and the largest deviation over seeds."""
  values = [x['standard deviation over seeds'] for x in found]
  return [min(values), statistics.median(values), max(values)]


def best_adam(*, metric: bool) -> float:
  return max(
    x['accuracy']
    for x in options()
    if x.get('method') == 'dp-adamw'
    and (x.get('metric') in ('mean', 'second_moment')) is metric
  )


def clipping(
  rule: str, norm: float, method: str, epsilon: float, users: int = 1
) -> Row:
  return digits(
    **{
      'rule': rule, 'clip': norm, 'records of a user': users, 'batch': 96,
      'method': method, 'epsilon': epsilon, 'start': 'balanced', 'b1': 0.5,
      'bias_correction': False,
    }
  )  # fmt: skip


CASES = [(m, e) for m in ('prism', 'dp-adamw') for e in (2.0, 8.0)]


def chosen_clip(case: tuple[str, float]) -> Row:
  """The flat clip that tuning rows choose."""
  found = (clipping('flat', c, *case) for c in (0.1, 0.3, 1.0, 3.0, 10.0))
  return max(found, key=lambda x: x['tuning accuracy'])


def less(one: Row, other: Row) -> tuple[float, float]:
  """A difference on the same seeds in points, and its standard error."""
  pairs = zip(
    one['accuracies of the seeds'], other['accuracies of the seeds'],
    strict=True,
  )  # fmt: skip
  found = [100 * (a - b) for a, b in pairs]
  return statistics.mean(found), statistics.stdev(found) / len(found) ** 0.5


def muon(method: str, epsilon: float) -> Row:
  return row('digits_cpu', seeds=6, method=method, epsilon=epsilon)


def muon_less(one: str, other: str) -> list[float]:
  """Points at epsilon 1 and 3."""
  return [
    100 * (muon(one, e)['accuracy'] - muon(other, e)['accuracy'])
    for e in (1.0, 3.0)
  ]


def noises(noise: str, epsilon: float) -> Row:
  return digits(noise=noise, epsilon=epsilon, decay=0.0, bias_correction=False,
                start='balanced')  # fmt: skip


# Geometry.


def apart(
  arithmetic: str, method: str, condition: float, scale: float
) -> float:
  """How far trajectories in two gauges are apart, in two digits above ten."""
  found = row('gauge_invariance_cpu', arithmetic=arithmetic, method=method,
              condition=condition, scale=scale)  # fmt: skip
  value = found['difference']
  return value if value < 10 else float(f'{value:.1e}')


def curve_end(method: str, condition: float) -> float:
  return row('three_gauges', method=method, condition=condition)['curve'][-1]


def preconditioned(method: str) -> list[float]:
  """Norm of the noise in Z, by noise multiplier."""
  found = rows('paper_diagnostics', issue='preconditioned', method=method)
  return [x['out'] for x in found]


# Privacy.

AUDIT = 'claim', 'bound', 'bound with half the noise'


def low_bits(route: str) -> tuple[list[float], list[list[float]], float]:
  """Floats, from and to; 1,000 entries alone, with others, 100,000; ratio."""
  four = [
    x
    for runs in (10_000, 1000)
    for others in (0, 31)
    for x in rows('low_bits', route=route, others=others, runs=runs)
  ]
  floats = sorted({round(x['floats'][0], 3) for x in four})
  ratio = four[0]['now, likelihood ratio'][0]
  return floats[:: max(len(floats) - 1, 1)], [x['now'] for x in four], ratio


def low_bits_found(runs: int | None = None) -> Iterator[list[float]]:
  """Advantage and error of all but the repetition, or with so many runs."""
  for x in stored('low_bits'):
    if x['runs'] == runs or (runs is None and x['runs'] < 40_000):
      yield x['now']


def largest_of_low_bits() -> tuple[int, float, float]:
  """Of how many; in standard errors; one in so many benchmarks."""
  found = list(low_bits_found())
  largest = max(abs(mean) / error for mean, error in found if error)
  chance = len(found) * math.erfc(largest / 2**0.5)
  return len(found), largest, 1 / chance


# Times.


def update(method: str, *, huge_pages: bool = False) -> list[Row]:
  """Small modules on one and two cores, then large ones."""
  return [
    row('update_time_cpu', workload=workload, threads=threads, method=method,
        chain=None, huge_pages=huge_pages)
    for workload in ('small', 'large')
    for threads in (1, 2)
  ]  # fmt: skip


def scaling(threads: int, axis: str, method: str) -> list[Row]:
  """By modules or rank."""
  return rows('update_time_cpu', threads=threads, axis=axis, method=method)


def ratios(threads: int, axis: str) -> list[float]:
  """Time of ``prism`` over that of noise and AdamW."""
  pairs = zip(scaling(threads, axis, 'prism'),
              scaling(threads, axis, 'noise + adamw'), strict=True)  # fmt: skip
  return [a['median'] / b['median'] for a, b in pairs]


def large_model(model: str, rank: int) -> list[Row]:
  """By micro-batch."""
  found = rows('language_model_memory_table', model=model, rank=rank)
  return sorted(found, key=lambda x: x['micro-batch'])


def at_scale() -> list[Row]:
  """The rows of sizes that all methods were compiled for."""
  found = stored('at_scale')
  sizes = [(x['model'], x['chips']) for x in found]
  return [x for x in found if sizes.count((x['model'], x['chips'])) == 2]
