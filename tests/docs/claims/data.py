"""Stored results, and how the documentation prints them."""

import dataclasses
import functools
import json
import math
import pathlib
import re
import statistics
from typing import Any

ROOT = pathlib.Path(__file__).parents[3]
RESULTS = ROOT / 'benchmarks' / 'results'
exp = math.exp


@functools.cache
def stored(name: str) -> Any:
  return json.loads((RESULTS / f'{name}.json').read_text('utf-8'))


def short(x: float, digits: int) -> str:
  """.836 for 0.836."""
  return f'{x:.{digits}f}'.replace('0.', '.', 1)


@dataclasses.dataclass
class Row:
  """A row of ``benchmarks/results/utility.md``; ``None``: not compared."""

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


_AGAINST = re.compile(r'([-+][\d.]+) ± ([\d.]+) \(p = ([\d.e-]+)\)')


@functools.cache
def utility(title: str) -> dict[str, Row]:
  """The table under a heading of the report, by method."""
  text = (RESULTS / 'utility.md').read_text('utf-8')
  part = text.split(f'\n## {title}\n', 1)[1].split('\n## ', 1)[0]
  out = {}
  for line in part.split('\n'):
    cells = [x.strip() for x in line.strip('|').split(' | ')]
    if line.startswith('| ') and cells[0] not in ('method', '---'):
      found = _AGAINST.fullmatch(cells[6])
      rest = map(float, found.groups()) if found else ()
      out[cells[0]] = Row(
        float(cells[2]), int(cells[4]), float(cells[1]), *rest
      )
  return out


def varied(title: str) -> dict[str, dict[str, float]]:
  """Points by change and method, from a table of changes of the report."""
  text = (RESULTS / 'utility.md').read_text('utf-8')
  part = text.split(f'\n## {title}\n', 1)[1].split('\n## ', 1)[0]
  rows = [
    [x.strip(' `*') for x in line.strip('|').split(' | ')]
    for line in part.split('\n')
    if line.startswith('| ')
  ]
  head, _, *body = rows
  return {
    row[0]: dict(zip(head[1:], map(float, row[1:]), strict=True))
    for row in body
  }


def accuracies(method: str, **fields: Any) -> dict[int, float]:
  """Test accuracy by seed of the runs with these fields and no others."""
  ignored = 'seed', 'noise multiplier', 'tuning accuracy', 'test accuracy'
  wanted = {'method': method, **fields}
  return {
    run['seed']: run['test accuracy']
    for run in stored('utility')['runs']
    if {k: v for k, v in run.items() if k not in ignored} == wanted
  }


def lost_in_a_gauge_when_tuned_again() -> float:
  """Points that DP-AdamW loses in a gauge of condition 100, each rate tuned.

  The rate is that of the best tuning accuracy among the stored runs.
  """

  def best(**fields: Any) -> float:
    runs = [
      run
      for run in stored('utility')['runs']
      if run['method'] == 'dp-adamw'
      and run['epsilon'] == 3.0
      and run['seed'] == 0
      and run.get('gauge') == fields.get('gauge')
      and not set(run) & {'task', 'options', 'scale', 'rank', 'clip', 'length'}
      and not set(run) & {'initialization', 'rows', 'public_test'}
    ]
    chosen: float = max(runs, key=lambda x: x['tuning accuracy'])[
      'test accuracy'
    ]
    return chosen

  return 100 * (best() - best(gauge=100.0))


def error_of_an_option() -> float:
  """Standard error of what an option adds, in points; median of options."""
  base = accuracies('prism', epsilon=3.0, rate=0.1)
  tried = {
    tuple(map(tuple, run['options']))
    for run in stored('utility')['runs']
    if run['method'] == 'prism' and 'options' in run
  }
  errors = []
  for options in tried:
    found = accuracies(
      'prism', epsilon=3.0, rate=0.1, options=list(map(list, options))
    )
    differences = [100 * (found[seed] - base[seed]) for seed in found]
    if len(differences) > 2:
      errors.append(statistics.stdev(differences) / len(differences) ** 0.5)
  return statistics.median(errors)


def low_bits(route: str) -> list[dict]:
  """1,000 entries alone and with others, 100,000 alone and with others."""
  rows = stored('low_bits')['rows']
  return [
    rows[f'{route}, {entries} entries, {others} others, {runs} runs']
    for entries, runs in ((1000, 10_000), (100_000, 1000))
    for others in (0, 31)
  ]


def clipping(rule, norm, users, method, epsilon) -> dict:
  (found,) = (
    row
    for row in stored('clipping')['rows']
    if (
      row['rule'], row['clip norm'], row['records of a user'],
      row['method'], row['epsilon'],
    ) == (rule, norm, users, method, epsilon)
  )  # fmt: skip
  return found


def mean(values) -> float:
  return statistics.mean(values)
