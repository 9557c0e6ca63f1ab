"""Rows of a file: JSON lines, or CSV or Parquet where the name ends so.

One row that cannot be read is a row all the same: whether that is an error
depends on whether the file is public, which the caller knows. A record of a CSV
file is what the reader takes for one: a quote that is not closed makes one
record of all that follows.
"""

import csv
import json
import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from . import arrow


class Row(NamedTuple):
  """One row of a file.

  Attributes:
    entries: Its columns, None where it is no row of columns.
    problem: What is wrong with it, if something is.
  """

  entries: Mapping[str, Any] | None
  problem: str = ''


def read(path: str, option: str) -> list[Row]:
  """All rows that are not empty, in order.

  Args:
    path: JSON lines with one object a line; comma-separated values whose
      first line has the names, if the name ends in ``.csv``; a table, if it
      ends in ``.parquet``; or a folder, see ``arrow.dataset``.
    option: How the caller's option is called, for the messages.

  Raises:
    ValueError: If there is no such file, or it is no whole table.
  """
  where = pathlib.Path(path)
  if where.is_dir():
    return [Row(*entries) for entries in arrow.dataset(where, option)]
  if not where.is_file():
    raise ValueError(f'{option}: there is no file {path}.')
  if where.suffix.lower() == '.csv':
    return _csv(where)
  if where.suffix.lower() == '.parquet':
    return [Row(*entries) for entries in arrow.parquet(where, option)]
  # `errors='replace'`: a stray byte in one record must not stop the run. Not
  # `splitlines`, which would also cut at separators inside of a text.
  text = where.read_text('utf-8', errors='replace')
  return [_json(line) for line in text.split('\n') if line.strip()]


def _json(line: str) -> Row:
  try:
    row = json.loads(line)
  except (ValueError, RecursionError) as error:
    return Row(None, f'no JSON ({error})')
  if not isinstance(row, dict):
    return Row(None, f'expected a JSON object, got {line[:60]!r}')
  return Row(row)


def _csv(path: pathlib.Path) -> list[Row]:
  # A long text is no error, and must not be one in a private file.
  csv.field_size_limit(2**31 - 1)
  with path.open(encoding='utf-8-sig', errors='replace', newline='') as file:
    rows = list(csv.DictReader(file))
  return [
    # The surplus of a row that is too long has no name; what is missing in one
    # that is too short is None.
    Row({k: v for k, v in row.items() if k is not None and v is not None})
    for row in rows
  ]


def hint(path: str, rows: list[Row]) -> str:
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
