"""Stored results, and how the documentation prints them."""

import dataclasses
import functools
import json
import pathlib
import statistics
from typing import Any

from benchmarks.accuracy import utility_tables
from benchmarks.accuracy.digits import DEFAULTS

ROOT = pathlib.Path(__file__).parents[3]
RESULTS = ROOT / 'benchmarks' / 'results'
SPREAD = 'largest minus smallest'


@functools.cache
def stored(name: str) -> list[dict[str, Any]]:
  """The rows of a file of results."""
  text = (RESULTS / f'{name}.json').read_text('utf-8')
  rows: list[dict[str, Any]] = json.loads(text)['rows']
  return rows


def rows(name: str, **fields: Any) -> list[dict[str, Any]]:
  """The rows with these fields; ``None`` is a field that a row has not.

  A space in the name of a field is written as ``_``.
  """
  wanted = {k.replace('_', ' '): v for k, v in fields.items()}
  return [
    x for x in stored(name) if all(x.get(k) == v for k, v in wanted.items())
  ]


def row(name: str, **fields: Any) -> dict[str, Any]:
  """The only row with these fields."""
  (found,) = rows(name, **fields)
  return found


def short(x: float, digits: int) -> str:
  """.836 for 0.836."""
  return f'{x:.{digits}f}'.replace('0.', '.', 1)


@dataclasses.dataclass
class Row:
  """A method of a part of ``accuracy_compared``; ``None``: not compared."""

  accuracy: float
  seeds: int
  rate: float
  difference: float | None = None
  error: float | None = None
  p: float | None = None

  def against(self) -> str:
    """.0054 ± .0015 (p = .004), or nothing for `prism` itself."""
    if self.difference is None:
      return ''
    difference, error = (short(x, 4) for x in (self.difference, self.error))
    return f'{difference} ± {error} ({self.chance})'

  @property
  def chance(self) -> str:
    if self.p < 0.0005:
      return 'p < .001'
    return f'p = {short(self.p, 3 if self.p < 0.0995 else 2)}'

  def beside(self) -> str:
    """.5377 (.061 ± .021, p = .095)."""
    if self.difference is None:
      return short(self.accuracy, 4)
    difference, error = (short(x, 3) for x in (self.difference, self.error))
    return f'{short(self.accuracy, 4)} ({difference} ± {error}, {self.chance})'


PARTS = {title: part for part, title in utility_tables.TITLES.items()}


@functools.cache
def utility(title: str) -> dict[str, Row]:
  """The comparisons of a part, by method."""
  return {
    x['method']: Row(
      x['accuracy'], x['seeds'], x['rate'],
      *map(x.get, ('difference', 'standard error', 'p')),
    )
    for x in rows('accuracy_compared', part=PARTS.get(title, title))
  }  # fmt: skip


def varied(part: str) -> dict[str, dict[str, float]]:
  """Points by change and method, and the range of each method."""
  out: dict[str, dict[str, float]] = {}
  for x in rows('accuracy_compared', part=part):
    out.setdefault(x['change'], {})[x['method']] = x['points']
  spread = {}
  for method in dict.fromkeys(x for found in out.values() for x in found):
    points = [0, *(found[method] for found in out.values() if method in found)]
    spread[method] = max(points) - min(points)
  return {**out, SPREAD: spread}


def accuracies(method: str, **fields: Any) -> dict[int, float]:
  """Test accuracy by seed of the runs with these fields and no others."""
  found = {'noise multiplier', 'tuning accuracy', 'test accuracy', 'scores',
           'seconds', 'seed'}  # fmt: skip
  defaults = {'method': 'prism', 'epsilon': 3.0}
  wanted = {'method': method, **fields}
  wanted = {k: v for k, v in wanted.items() if defaults.get(k) != v}
  return {
    run.get('seed', 100): run['test accuracy']
    for run in stored('accuracy')
    if {k: v for k, v in run.items() if k not in found} == wanted
  }


def lost_in_a_gauge_when_tuned_again() -> float:
  """Points that DP-AdamW loses in a gauge of condition 100, each rate tuned.

  The rate is that of the best tuning accuracy among the stored runs.
  """

  def best(**fields: Any) -> float:
    runs = [
      run
      for run in rows('accuracy', method='dp-adamw', seed=0)
      if run.get('gauge') == fields.get('gauge')
      and not set(run) & {'task', 'options', 'scale', 'rank', 'clip', 'head'}
      and not set(run) & {'start', 'rows', 'public', 'epsilon'}
    ]
    chosen: float = max(runs, key=lambda x: x['tuning accuracy'])[
      'test accuracy'
    ]
    return chosen

  return 100 * (best() - best(gauge=100.0))


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


def digits(**change: Any) -> dict[str, Any]:
  """The row of the digits with this change and no other."""
  (found,) = (
    x
    for x in stored('digits_cpu')
    if {k: v for k, v in x.items() if k in DEFAULTS}
    == {k: v for k, v in change.items() if DEFAULTS[k] != v}
  )
  return found


def low_bits(route: str) -> list[dict]:
  """1,000 entries alone and with others, 100,000 alone and with others."""
  return [
    x
    for runs in (10_000, 1000)
    for others in (0, 31)
    for x in rows('low_bits', route=route, others=others, runs=runs)
  ]


def mean(values) -> float:
  return statistics.mean(values)
