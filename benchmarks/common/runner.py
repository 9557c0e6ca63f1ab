"""One way to run a benchmark: settings in, rows of a file of JSON out.

A file of results is ``{"environment": ..., "rows": [...]}``. A row is flat: the
fields of its setting, less those that have their default, and what was found.
A row is written when it is found, and a setting that has a row is not run
again, so an interrupted benchmark goes on where it was. Settings are run in the
order of the plan; plans put methods inside of seeds, so that an unfinished
table has all methods.

Every script has these options: ``--only WORD ...`` runs settings with one of
the words, ``--minutes N`` begins no run after that, ``--table`` runs nothing
and shows what is stored, tables and plots, ``--smoke`` makes runs of few steps
whose results go to a temporary folder, ``--output FOLDER`` stores elsewhere.
Scripts of fixed settings have ``--again``, which forgets their rows first.
"""

import argparse
import contextlib
import dataclasses
import fcntl
import json
import os
import pathlib
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import metadata
from typing import Any

import jax
import numpy as np

ROOT = pathlib.Path(__file__).parents[2]
FOLDER = ROOT / 'benchmarks' / 'results'
Setting = Mapping[str, Any]
Row = dict[str, Any]
# Learning rates that are tried, half a decade apart.
LADDER = [float(f'{x}e{e}') for e in range(-7, 2) for x in (1, 3)]
Find = Callable[[Setting], Row | None]


class Store:
  """The rows of a file, which several processes may share.

  Args:
    path: JSON; made when the first row is put.
    defaults: Values of fields that are left out of rows where they have them.
  """

  def __init__(self, path: pathlib.Path, defaults: Setting | None = None):
    self.path, self.defaults = path, dict(defaults or {})
    self._index: dict[tuple[str, ...], dict[str, Row]] = {}
    self.rows = self._read()

  def _read(self) -> list[Row]:
    if not self.path.exists():
      return []
    rows: list[Row] = json.loads(self.path.read_text('utf-8'))['rows']
    return rows

  def find(self, setting: Setting) -> Row | None:
    """The row of a setting, or None."""
    names = tuple(sorted({*self.defaults, *setting}))

    def key(x: Setting) -> str:
      return json.dumps([x.get(n, self.defaults.get(n)) for n in names])

    if names not in self._index:
      self._index[names] = {key(row): row for row in self.rows}
    return self._index[names].get(key(setting))

  def is_told(self, name: str, value: Any) -> bool:
    """Whether a row has this field, because it has no default or another."""
    return name not in self.defaults or value != self.defaults[name]

  def forget(self, settings: Iterable[Setting]) -> None:
    """Removes the rows of settings."""
    for setting in settings:
      while (row := self.find(setting)) is not None:
        self.rows.remove(row)
        self._index = {}
    write(self.path, self.rows)

  def put(self, setting: Setting, found: Row | list[Row]) -> None:
    """Adds rows, unless another process has added them."""
    self.path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(self.path):
      self.rows, self._index = self._read(), {}
      if self.find(setting) is None:
        changed = {k: v for k, v in setting.items() if self.is_told(k, v)}
        several = found if isinstance(found, list) else [found]
        if any(
          setting.get(k, v) != v for row in several for k, v in row.items()
        ):
          # No row would be found for the setting, which would run for ever.
          raise ValueError(f'A row changes its setting {dict(setting)}.')
        self.rows += [{**changed, **row} for row in several]
        self._index = {}
        write(self.path, self.rows)


def write(path: pathlib.Path, rows: list[Row]) -> None:
  """Writes rows at once: an interrupted process leaves the old file."""
  lines = ',\n'.join(map(json.dumps, rows))
  text = (
    f'{{"environment": {json.dumps(environment())},\n"rows": [\n{lines}\n]}}\n'
  )
  path.parent.mkdir(parents=True, exist_ok=True)
  partial = path.with_suffix(f'.{os.getpid()}')
  partial.write_text(text, 'utf-8')
  partial.replace(path)


@contextlib.contextmanager
def _locked(path: pathlib.Path) -> Iterator[None]:
  with path.with_suffix('.lock').open('w') as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)
    yield


def environment() -> dict[str, Any]:
  """Versions and device."""
  device = jax.devices()[0]
  versions = {}
  for name in ('jax', 'jaxlib', 'optax', 'flax', 'jax-privacy', 'numpy'):
    try:
      versions[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
      versions[name] = None
  return {
    'platform': device.platform,
    'device': device.device_kind,
    'processor': platform.machine(),
    'cores': len(os.sched_getaffinity(0)),
    'XLA_FLAGS': os.environ.get('XLA_FLAGS', ''),
    'python': platform.python_version(),
    'versions': versions,
  }


def run(
  store: Store,
  plan: Callable[[Find], Iterable[Setting]],
  measure: Callable[[Setting], Row | list[Row]],
  minutes: float = float('inf'),
) -> None:
  """Measures what the plan wants and the store lacks.

  Args:
    store: Where rows are.
    plan: ``plan(find)``, the settings that are known to be wanted. It is asked
      again after each row, because a row may decide what comes next.
    measure: From a setting to what is found, one row or several.
    minutes: No run begins after that.
  """
  end = time.monotonic() + 60 * minutes
  while time.monotonic() < end:
    missing = [x for x in plan(store.find) if store.find(x) is None]
    if not missing:
      break
    setting, began = missing[0], time.monotonic()
    found = measure(setting)
    store.put(setting, found)
    print(
      f'{len(missing) - 1} left, {time.monotonic() - began:.0f} s:',
      *(f'{k} {v}' for k, v in setting.items() if store.is_told(k, v)),
      flush=True,
    )
    for row in found if isinstance(found, list) else [found]:
      print(
        ' ',
        *(f'{k} {v:.4g}' if isinstance(v, float) else f'{k} {v}'
          for k, v in row.items() if isinstance(v, (int, float, str))
          and len(str(v)) < 40),
        sep='  ',
        flush=True,
      )  # fmt: skip


class Missing(Exception):
  """A choice waits for settings that have no row yet."""

  def __init__(self, settings: list[Any]):
    super().__init__(settings)
    self.settings = settings


def best(settings: Sequence[Any], score: Callable[[Any], float | None]) -> Any:
  """The setting with the largest score, the first of several.

  Raises:
    Missing: If some have no score.
  """
  scores = [score(x) for x in settings]
  missing = [x for x, y in zip(settings, scores, strict=True) if y is None]
  if missing:
    raise Missing(missing)
  return settings[int(np.argmax(scores))]


def best_rate(
  setting: Any, rates: Sequence[float], score: Callable[[Any], float | None]
) -> Any:
  """The best of some rates, and of ``LADDER`` until it has two neighbours.

  Args:
    setting: A dataclass with a field ``rate``.
    rates: Those that are tried first.
    score: Of a setting; None where it has no row.

  Raises:
    Missing: If some have no score.
  """
  tried = list(rates)
  while True:
    found = best([dataclasses.replace(setting, rate=x) for x in tried], score)
    at = LADDER.index(found.rate)
    beside = [LADDER[at - 1], LADDER[at + 1]]
    if set(beside) <= set(tried):
      return found
    tried += [x for x in beside if x not in tried]


def fixed(settings: Iterable[Setting]) -> Callable[[Find], Iterable[Setting]]:
  """The plan of settings that do not depend on any row."""
  settings = list(settings)
  return lambda find: settings


def parser_of(description: str) -> argparse.ArgumentParser:
  """The options that all benchmarks share."""
  parser = argparse.ArgumentParser(description=description.split('\n')[0])
  parser.add_argument('--only', nargs='+', metavar='WORD', default=[])
  parser.add_argument('--minutes', type=float, default=float('inf'))
  parser.add_argument('--table', action='store_true', help='run nothing')
  parser.add_argument('--smoke', action='store_true', help='some seconds')
  parser.add_argument('--output', type=pathlib.Path, default=FOLDER)
  return parser


def add_data(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
  """The options of benchmarks that read text."""
  parser.add_argument('--data', type=pathlib.Path, help='folder of data sets')
  parser.add_argument('--cache', type=pathlib.Path, default='runs/encoded')
  return parser


@dataclasses.dataclass(frozen=True)
class Folders:
  """Where data sets are, and what is computed once."""

  data: pathlib.Path
  cache: pathlib.Path


def store_of(
  args: argparse.Namespace,
  name: str,
  *,
  by_device: bool = True,
  defaults: Setting | None = None,
) -> Store:
  """The file of results of this name, on this kind of device.

  With ``--smoke`` a new one, in a temporary folder.
  """
  if args.smoke:
    args.output = pathlib.Path(tempfile.mkdtemp(prefix=f'{name}_'))
  suffix = f'_{jax.default_backend()}' if by_device else ''
  return Store(args.output / f'{name}{suffix}.json', defaults)


def is_wanted(setting: Setting, only: Sequence[str]) -> bool:
  """Whether one of the words is a value of the setting, or none was given."""
  values = [str(x) for x in setting.values()]
  return not only or any(word in values for word in only)


def main(
  description: str,
  name: str,
  settings: Iterable[Setting],
  measure: Callable[..., Row | list[Row]],
  *,
  smoke: Setting | None = None,
  show: Callable[[list[Row]], str] | None = None,
  plot: Callable[[list[Row], pathlib.Path], None] | None = None,
  by_device: bool = True,
  reads_text: bool = False,
) -> None:
  """A benchmark of fixed settings, from its options to its table and plot.

  Args:
    description: Docstring of the script.
    name: Of the file of results.
    settings: What is measured.
    measure: ``measure(**setting)``; with ``--smoke`` on the first and the last
      setting, as they are changed by ``smoke``.
    smoke: Changes that make a run of seconds of a setting.
    show: From rows to text. The default is a table of all numbers.
    plot: ``plot(rows, path)``, of a PNG beside the rows.
    by_device: Whether each kind of device has a file of its own.
    reads_text: Whether ``measure`` takes ``folders=``.
  """
  parser = parser_of(description)
  add_data(parser)
  parser.add_argument('--again', action='store_true', help='forget rows')
  args = parser.parse_args()
  store = store_of(args, name, by_device=by_device)
  settings = [x for x in settings if is_wanted(x, args.only)]
  if args.smoke:
    settings = [{**x, **(smoke or {})} for x in (settings[0], settings[-1])]
  if args.again:
    store.forget(settings)
  if not args.table:
    given = {'folders': Folders(args.data, args.cache)} if reads_text else {}
    run(store, fixed(settings), lambda x: measure(**given, **x), args.minutes)
  print((show or table)(store.rows))
  if plot is not None and not args.smoke:
    plot(store.rows, store.path.with_suffix('.png'))
  print(f'Rows are in {store.path}', file=sys.stderr)


def markdown(head: Iterable[object], rows: Iterable[Iterable[object]]) -> str:
  """A table in Markdown."""
  head = list(head)
  body = [head, ['---'] * len(head), *rows]
  lines = ['| ' + ' | '.join(map(str, row)) + ' |' for row in body]
  return '\n'.join(
    x.replace('|  |', '| |').replace('|  |', '| |') for x in lines
  )


def table(rows: list[Row]) -> str:
  """All entries of rows that are no lists, in Markdown."""
  names = list(
    dict.fromkeys(
      k
      for row in rows
      for k, v in row.items()
      if not isinstance(v, (list, dict))
    )
  )

  def cell(value: Any) -> str:
    return f'{value:.4g}' if isinstance(value, float) else str(value)

  return markdown(
    names, ([cell(row.get(k, '')) for k in names] for row in rows)
  )
