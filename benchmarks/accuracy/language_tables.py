"""The runs of ``language_model.py`` as tables."""

import collections
from typing import Any

import numpy as np

from benchmarks.accuracy import utility_tables
from benchmarks.accuracy.language_runs import DEFAULTS, PRIVATE
from benchmarks.common import runner

NAMES = {
  'zero-shot': 'the model as it was',
  'prism': '`prism`',
  'dp-adamw': 'DP-AdamW',
  'adamw': 'AdamW, not private',
}
TASKS = {'sst2': 'SST-2', 'banking77': 'banking77', 'mawps': 'mawps',
         'gsm8k': 'gsm8k'}  # fmt: skip
Row = dict[str, Any]


def losses(row: Row) -> np.ndarray:
  """Nats of each row of the table, as if all had the same number of tokens."""
  found = np.frombuffer(bytes.fromhex(row['losses']), np.float16)
  return found.astype(np.float64) * len(found) / row['tokens']


def exact(row: Row) -> np.ndarray:
  return np.array([int(x) for x in row['exact']], np.float64)


def _of(row: Row, *names: str) -> tuple[Any, ...]:
  """Fields of its setting."""
  return tuple(row[n] if n in row else DEFAULTS[n] for n in names)


def tuned(rows: list[Row]) -> list[Row]:
  """Runs of the table with the options that are best on the tuning rows.

  With more trials others may have become the best.
  """
  numbers = 'rate', 'b1', 'weight_decay', 'warm_up'

  def family(row):
    return _of(row, 'task', 'method', 'steps', 'batch', 'layers')

  best: dict[tuple, Row] = {}
  for row in rows:
    old = best.setdefault(family(row), row)
    if 'is_tuning' in row and (
      'is_tuning' not in old
      or row['tuning perplexity'] < old['tuning perplexity']
    ):
      best[family(row)] = row
  return [
    row
    for row in rows
    if 'is_tuning' not in row
    and _of(row, *numbers) == _of(best[family(row)], *numbers)
  ]


def groups(rows: list[Row]) -> dict[tuple, dict[str, list[Row]]]:
  """Runs of the table by ``(task, steps, batch, layers, epsilon)`` and method.

  What is not private stands beside each epsilon.
  """
  finals = tuned(rows)

  def setting(row):
    return _of(row, 'task', 'steps', 'batch', 'layers')

  found: dict[tuple, dict[str, list[Row]]] = {}
  for row in finals:
    if row['epsilon'] is not None:
      found.setdefault((*setting(row), row['epsilon']), {})
  for key, methods in found.items():
    for row in sorted(finals, key=lambda row: row['seed']):
      if setting(row) == key[:4] and row['epsilon'] in (None, key[4]):
        methods.setdefault(row['method'], []).append(row)
  return found


def compared(methods: dict[str, list[Row]], values) -> dict | None:
  """PRISM minus DP-AdamW on the seeds that both have; None below two."""
  by_seed = [
    {row['seed']: values(row) for row in methods.get(method, [])}
    for method in PRIVATE
  ]
  seeds = sorted(by_seed[0].keys() & by_seed[1].keys())
  if len(seeds) < 2:
    return None
  first, second = ([found[s] for s in seeds] for found in by_seed)
  return utility_tables.paired(first, second)


def of_method(rows: list[Row]) -> tuple[str, str]:
  """Perplexity and share of right answers, with errors over the rows."""
  nats = np.mean([losses(row) for row in rows], axis=0)
  right = np.mean([exact(row) for row in rows], axis=0)
  perplexity = float(np.exp(nats.mean()))
  error = perplexity * nats.std(ddof=1) / len(nats) ** 0.5
  share = right.std(ddof=1) / len(right) ** 0.5
  digits = 0 if perplexity > 100 else 3
  return (
    f'{perplexity:,.{digits}f} ± {error:,.{digits}f}',
    f'{right.mean():.3f} ± {share:.3f}' if right.any() else '0',
  )


def _difference(methods: dict[str, list[Row]]) -> tuple[str, str] | None:
  nats, right = (compared(methods, x) for x in (losses, exact))
  if nats is None or right is None:
    return None
  return (
    f'{nats["difference"]:+.3f} ± {nats["standard error"]:.3f} nats',
    f'{right["difference"]:+.3f} ± {right["standard error"]:.3f}',
  )


def table(rows: list[Row], *, finished_only: bool = False) -> str:
  """For each task the model as it was, each epsilon, and without privacy.

  With ``finished_only`` an epsilon is left out that lacks one of ``PRIVATE``.
  Where not all have as many steps they are named.
  """
  lines: list[tuple[str, ...]] = []

  def add(task: str, method: str, epsilon: str, cells: Any) -> None:
    lines.append((task, method, epsilon, *cells))

  by_task: dict[tuple, dict[float, dict[str, list[Row]]]] = {}
  for (*setting, epsilon), methods in groups(rows).items():
    if finished_only and not methods.keys() >= set(PRIVATE):
      continue
    by_task.setdefault(tuple(setting), {})[epsilon] = methods
  order = list(TASKS)
  for setting in sorted(by_task, key=lambda x: (order.index(x[0]), x[1:])):
    found = by_task[setting]
    others = next(iter(found.values()))

    def cells(each: list[Row]) -> tuple[str, ...]:
      return (str(len(each)), *of_method(each))

    task = TASKS[setting[0]]
    if len({steps for _, steps, *_ in by_task}) > 1:
      task += f', {setting[1]} steps'
    if 'zero-shot' in others:
      add(task, NAMES['zero-shot'], '', ('', *of_method(others['zero-shot'])))
    for epsilon in sorted(found, reverse=True):
      methods = found[epsilon]
      for method in PRIVATE:
        if method in methods:
          add('', NAMES[method], f'{epsilon:g}', cells(methods[method]))
      if difference := _difference(methods):
        add('', '`prism` minus DP-AdamW', f'{epsilon:g}', ('', *difference))
    if 'adamw' in others:
      add('', NAMES['adamw'], '', cells(others['adamw']))
  head = ['task', 'method', 'epsilon', 'seeds', 'perplexity', 'right']
  return runner.markdown(head, lines)


def chosen(rows: list[Row]) -> str:
  """What tuning chose, and how far the tuning runs are apart."""
  by = collections.defaultdict(list)
  for row in rows:
    if 'is_tuning' in row:
      by[_of(row, 'task', 'steps', 'method')].append(row)
  lines = []
  for (task, steps, method), found in by.items():
    found.sort(key=lambda row: row['tuning perplexity'])
    rate, b1, decay, warm_up = _of(
      found[0], 'rate', 'b1', 'weight_decay', 'warm_up'
    )
    others = ', '.join(f'{row["tuning perplexity"]:.3f}' for row in found)
    warm_up = 'yes' if warm_up else 'no'
    lines.append([task, steps, NAMES[method], rate, b1, decay, warm_up, others])
  head = ['task', 'steps', 'method', 'rate', 'b1', 'decay', 'warm-up',
          'tuning perplexity, best and others']  # fmt: skip
  return runner.markdown(head, lines)
