"""Rows of Parquet files and of folders that the library ``datasets`` saves.

Such a folder has Arrow streams and ``state.json``, which names them.
``pyarrow`` reads these and needs nothing else; ``datasets`` would bring pandas,
httpx and more than a dozen others.
"""

import importlib
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

from .models import pretrained

# Columns, or None and why there are none.
Entries = tuple[Mapping[str, Any] | None, str]


def parquet(path: pathlib.Path, option: str) -> list[Entries]:
  """The rows of a file.

  Raises:
    ValueError: If it is no Parquet file, or without ``pyarrow``.
  """
  module = _pyarrow('pyarrow.parquet', path, option)
  return _rows(_read(module.read_table, path, option))


def dataset(folder: pathlib.Path, option: str) -> list[Entries]:
  """The rows of a folder of ``Dataset.save_to_disk``.

  Args:
    folder: Of a ``Dataset``; of a ``DatasetDict`` only if it has one split:
      which rows are private is not guessed.
    option: How the caller's option is called, for the messages.

  Raises:
    ValueError: If it is no such folder, has several splits, is broken or has
      a mapping of indices, as old versions wrote it. Also without ``pyarrow``.
  """
  if (folder / 'dataset_dict.json').is_file():
    entries = pretrained.read_json(folder / 'dataset_dict.json')
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
  state = pretrained.read_json(folder / 'state.json')
  # Rows that were selected or shuffled without being moved.
  if any(value for name, value in state.items() if name.startswith('_indices')):
    raise ValueError(
      f'{option} {folder} has a mapping of indices: call flatten_indices() and '
      'save_to_disk() again.'
    )
  module = _pyarrow('pyarrow', folder, option)

  def stream(path: pathlib.Path) -> Any:
    with module.memory_map(str(path)) as source:
      return module.ipc.open_stream(source).read_all()

  # Names only: a folder must not lead out of itself.
  names = [
    pathlib.Path(str(entry['filename'])).name
    for entry in state.get('_data_files') or ()
  ]
  return [
    row for name in names for row in _rows(_read(stream, folder / name, option))
  ]


def _pyarrow(name: str, path: pathlib.Path, option: str) -> Any:
  try:
    return importlib.import_module(name)
  except ImportError as error:
    raise ValueError(
      f'{option} {path} needs pyarrow: pip install pyarrow (or '
      "'prism-optax[examples-data]')."
    ) from error


def _read(read: Callable, path: pathlib.Path, option: str) -> Any:
  try:
    return read(path)
  # Those of Arrow are of these two classes, or NotImplementedError.
  except (ValueError, OSError, NotImplementedError) as error:
    raise ValueError(f'{option}: {path} cannot be read: {error}') from error


def _rows(table: Any) -> list[Entries]:
  """All rows, in order. What is null in a row is absent here."""
  try:
    rows = table.to_pylist()
  # A string that is no UTF-8, a date that Python has not: one record must not
  # stop the reading of the others.
  except Exception as error:
    count = table.num_rows
    if count < 2:
      return [(None, f'no row ({error})')] * count
    halves = table.slice(0, count // 2), table.slice(count // 2)
    return [row for half in halves for row in _rows(half)]
  return [({k: v for k, v in row.items() if v is not None}, '') for row in rows]
