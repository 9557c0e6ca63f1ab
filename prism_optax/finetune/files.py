"""Rows of a file: JSON lines, CSV, Parquet, or what ``datasets`` saved.

One row that cannot be read is a row all the same: whether that is an error
depends on whether the file is public, which the caller knows. A record of a CSV
file is what the reader takes for one: a quote that is not closed makes one
record of all that follows.

A folder that the library ``datasets`` saved has Arrow streams and
``state.json``, which names them. ``pyarrow`` reads these; ``datasets`` would
bring pandas, httpx and more than a dozen others.
"""

import contextlib
import csv
import json
import pathlib
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

Entries = Mapping[str, Any]
T = TypeVar('T')


class Row(NamedTuple):
  """One row of a file.

  Attributes:
    entries: Its columns, None where it is no row of columns.
    problem: What is wrong with it, if something is.
  """

  entries: Entries | None
  problem: str = ''

  def parsed(self, parse: Callable[[Entries], T]) -> T:
    """What ``parse`` makes of it; what is no row is refused, too."""
    if self.entries is None:
      raise ValueError(self.problem)
    return parse(self.entries)


def read(path: str, option: str) -> list[Row]:
  """All rows that are not empty, in order.

  Args:
    path: JSON lines with one object a line; comma-separated values whose
      first line has the names, if the name ends in ``.csv``; a table, if it
      ends in ``.parquet``; or a folder, see :func:`_dataset`.
    option: How the caller's option is called, for the messages.

  Raises:
    ValueError: If there is no such file, or it is no whole table.
  """
  where = pathlib.Path(path)
  if where.is_dir():
    return _dataset(where, option)
  if not where.is_file():
    raise ValueError(
      f'{option}: there is no file {path}.'
      + (where.suffix == '')
      * ' For a data set of the hub, give the folder of '
      'datasets.load_dataset(NAME, split=...).save_to_disk(FOLDER).'
    )
  if where.suffix.lower() == '.csv':
    return _csv(where, option)
  if where.suffix.lower() == '.parquet':
    return _rows(_table(where, option))
  # `errors='replace'`: a stray byte in one record must not stop the run. Not
  # `splitlines`, which would also cut at separators inside of a text.
  text = where.read_text('utf-8-sig', errors='replace')
  if _is_array(text):
    raise ValueError(
      f'{option} {path} is one JSON array, but each line has to be an object: '
      f"jq -c '.[]' {path} > {where.stem}_lines.jsonl"
    )
  return [_json(line) for line in text.split('\n') if line.strip()]


def read_public(
  path: str, parse: Callable[[Entries], T], option: str = '--eval'
) -> list[T]:
  """What ``parse`` makes of each row of a file that is no secret.

  Says how many rows are not read as they are.

  Args:
    path: See :func:`read`.
    parse: Raises ValueError for what it refuses, without a full stop.
    option: How the caller's option is called, for the messages.

  Raises:
    ValueError: If the file is absent or empty, or a row is refused or no JSON
      object; with the number of the row.
  """
  rows, found = read(path, option), []
  if not rows:
    raise ValueError(f'{option} {path}: the file has no rows.')
  if count := undecoded(rows):
    print(
      f'{option} {path}: {count} rows hold bytes that are no UTF-8, read as '
      '\ufffd. Save the file as UTF-8.',
      file=sys.stderr,
    )
  for number, row in enumerate(rows, 1):
    try:
      found.append(row.parsed(parse))
    except ValueError as error:
      message = f'{option} {path}, row {number}: {error}.{_hint(path, rows)}'
      raise ValueError(message) from error
  return found


def read_private(
  path: str, parse: Callable[[Entries], T], expected: str
) -> Sequence[T | None]:
  """What ``parse`` makes of each row of ``--data``; None where it refuses.

  The file is private: an error (or a warning, or a number of columns) that
  depends on one record would release something about it outside of the
  mechanism. So this is a total function: a row that cannot be used keeps its
  place and counts as a record with a zero gradient, silently. Only what holds
  for the file as a whole raises.

  Args:
    path: See :func:`read`.
    parse: As of :func:`read_public`.
    expected: What a row has to have, for the message.

  Raises:
    ValueError: If the file is absent, or not a single row can be used.
  """
  rows = read(path, '--data')
  found: list[T | None] = []
  for row in rows:
    try:
      found.append(row.parsed(parse))
    except (ValueError, RecursionError):
      found.append(None)
  if all(x is None for x in found):
    hint = _hint(path, rows)
    raise ValueError(f'--data {path}: no row has {expected}.{hint}')
  return found


def entry(row: Entries, column: str, options: str, *types: type) -> str:
  """The text in a column.

  Args:
    row: Of a file.
    column: Its name.
    options: Those that name columns, for the message.
    *types: ``str`` and ``int``, of which it may be; ``str`` if there are none.

  Raises:
    ValueError: If the column is missing or holds something else.
  """
  if column not in row:
    raise ValueError(f'no column {column!r}, only {sorted(row)}; see {options}')
  value, names = row[column], {str: 'a string', int: 'an integer'}
  if type(value) not in (types or (str,)):  # A bool is no integer here.
    expected = ' or '.join(names[x] for x in types or (str,))
    raise ValueError(f'{column!r} must be {expected}, got {value!r}')
  return str(value)


def _hint(path: str, rows: list[Row]) -> str:
  """What may be wrong with a file of which no row could be used."""
  if not rows:
    return ' The file has no rows.'
  if all(row.entries is None for row in rows):
    return (
      ' No line of it is a JSON object. Is it a CSV or Parquet file? Then its '
      'name has to end in .csv or .parquet.'
    )
  if pathlib.Path(path).suffix.lower() == '.csv':
    return ' The first line of a CSV file has to hold the names of the columns.'
  return ''


def _is_array(text: str) -> bool:
  """Whether the file as a whole is JSON: no single line of several makes it."""
  try:
    return text.lstrip()[:1] == '[' and isinstance(json.loads(text), list)
  except (ValueError, RecursionError):
    return False


def _json(line: str) -> Row:
  try:
    row = json.loads(line)
  except (ValueError, RecursionError) as error:
    return Row(None, f'no JSON ({error})')
  if not isinstance(row, dict):
    return Row(None, f'expected a JSON object, got {line[:60]!r}')
  return Row(row)


def _csv(path: pathlib.Path, option: str) -> list[Row]:
  # A long text is no error, and must not be one in a private file.
  csv.field_size_limit(0x7FFF_FFFF)  # The most that Windows takes.
  with path.open(encoding='utf-8-sig', errors='replace', newline='') as file:
    reader = csv.DictReader(file)
    head, *more = reader.fieldnames or ['']
    separators = sorted({';', '\t'} & set(head))
    if separators and not more:
      raise ValueError(
        f'{option} {path}: expected commas between the columns, got '
        f'{separators[0]!r} in {head!r}.'
      )
    rows = list(reader)
  return [
    # The surplus of a row that is too long has no name; what is missing in one
    # that is too short is None.
    Row({k: v for k, v in row.items() if k is not None and v is not None})
    for row in rows
  ]


def _dataset(folder: pathlib.Path, option: str) -> list[Row]:
  """The rows of a folder of ``Dataset.save_to_disk``.

  Args:
    folder: Of a ``Dataset``; of a ``DatasetDict`` only if it has one split:
      which rows are private is not guessed.
    option: How the caller's option is called, for the messages.

  Raises:
    ValueError: If it is no such folder, has several splits, is broken or has
      a mapping of indices, as old versions wrote it.
  """
  if (folder / 'dataset_dict.json').is_file():
    entries = read_json(folder / 'dataset_dict.json')
    splits = [
      pathlib.Path(str(name)).name for name in entries.get('splits', ())
    ]
    if len(splits) != 1:
      raise ValueError(
        f'{option} {folder} has the splits {splits}: name one, such as '
        f'{folder / (splits or ["train"])[0]}.'
      )
    folder = folder / splits[0]
  if not (folder / 'state.json').is_file():
    raise ValueError(
      f'{option} {folder}: expected a file, or a folder that the library '
      'datasets has saved (with a state.json).'
    )
  state = read_json(folder / 'state.json')
  # Rows that were selected or shuffled without being moved.
  if any(value for name, value in state.items() if name.startswith('_indices')):
    raise ValueError(
      f'{option} {folder} has a mapping of indices: call flatten_indices() and '
      'save_to_disk() again.'
    )
  # Names only: a folder must not lead out of itself.
  names = [
    pathlib.Path(str(entry['filename'])).name
    for entry in state.get('_data_files') or ()
  ]
  tables = (_table(folder / name, option) for name in names)
  return [row for table in tables for row in _rows(table)]


def _table(path: pathlib.Path, option: str) -> Any:
  """A Parquet file, or an Arrow stream."""
  import pyarrow.parquet

  try:
    if path.suffix.lower() == '.parquet':
      return pyarrow.parquet.read_table(path)
    with pyarrow.memory_map(str(path)) as source:
      return pyarrow.ipc.open_stream(source).read_all()
  # A damaged file is an error of the user's. Besides errors of its own Arrow
  # raises OSError, and Python ValueError for names that are no UTF-8.
  except (pyarrow.ArrowException, OSError, ValueError) as error:
    raise ValueError(f'{option}: {path} cannot be read: {error}') from error


def _rows(table: Any) -> list[Row]:
  """All rows, in order. What is null in a row is absent here."""
  try:
    rows = table.to_pylist()
  # A string that is no UTF-8, a date that Python has not: one record must not
  # stop the reading of the others.
  except Exception as error:
    count = table.num_rows
    if count < 2:
      return [Row(None, f'no row ({error})')] * count
    halves = table.slice(0, count // 2), table.slice(count // 2)
    return [row for half in halves for row in _rows(half)]
  return [Row({k: v for k, v in row.items() if v is not None}) for row in rows]


def read_json(path: pathlib.Path) -> dict[str, Any]:
  """The object in a file.

  Raises:
    ValueError: If it is absent or holds anything else.
  """
  try:
    stored = json.loads(path.read_text('utf-8'))
  except OSError as error:
    raise ValueError(f'{path}: cannot be read: {error.strerror}.') from error
  except (ValueError, RecursionError) as error:
    raise ValueError(f'{path}: no JSON ({error}).') from error
  if not isinstance(stored, dict):
    raise ValueError(f'{path}: expected a JSON object.')
  return stored


@contextlib.contextmanager
def replacing(path: pathlib.Path) -> Iterator[pathlib.Path]:
  """A file to write; it gets the name ``path`` when it is whole, or goes.

  Whoever wrote it, its permissions are those of a new file: safetensors would
  let nobody but its owner read one.
  """
  path.parent.mkdir(parents=True, exist_ok=True)
  temporary = path.with_name(path.name + '.tmp')
  # One of a run that was stopped would keep its permissions.
  temporary.unlink(missing_ok=True)
  temporary.touch()
  mode = temporary.stat().st_mode
  try:
    yield temporary
    temporary.chmod(mode)
    temporary.replace(path)
  except BaseException:
    temporary.unlink(missing_ok=True)
    raise


def write(path: pathlib.Path, text: str) -> None:
  with replacing(path) as temporary:
    temporary.write_text(text, 'utf-8')


def write_json(path: pathlib.Path, value: Mapping[str, Any]) -> None:
  write(path, json.dumps(value, indent=2) + '\n')


def undecoded(rows: Sequence[Row]) -> int:
  """How many rows hold U+FFFD, which stands for bytes that are no UTF-8."""
  return sum('\ufffd' in repr(row.entries) for row in rows)


def require_new(folder: pathlib.Path, or_what: str = '') -> None:
  """As :func:`require_writable`; and refuses a folder that is not empty."""
  if folder.exists() and any(folder.iterdir()):
    raise ValueError(
      f'--output {folder} is not empty: choose another folder{or_what}.'
    )
  require_writable(folder)


def require_writable(folder: pathlib.Path) -> None:
  """Says before minutes are spent that ``--output`` cannot be written.

  Raises:
    ValueError: If it is no folder, or cannot be made or written.
  """
  there = next(x for x in (folder, *folder.absolute().parents) if x.exists())
  try:
    with tempfile.TemporaryFile(dir=there):
      pass
  except OSError as error:
    raise ValueError(
      f'--output {folder} cannot be written: {there}: {error.strerror}.'
    ) from error
