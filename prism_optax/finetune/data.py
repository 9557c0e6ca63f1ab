"""Text classification files, read strictly or totally.

The evaluation file is declared public: whatever is wrong in it raises, with
the line. The training file is private: an error (or a warning, or a number of
columns) that depends on one record would release something about it outside
of the mechanism. So reading it is a total function: a row that cannot be used
keeps its place and counts as a record with a zero gradient, silently. Only
what holds for the file as a whole, such as no row having the columns, raises.
"""

import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from . import files

BLANK = -1  # The label of a record that contributes nothing.


class Examples(NamedTuple):
  """Rows of one file, ready for the model.

  Attributes:
    inputs: ``(rows, ...)``, what the model takes.
    labels: ``(rows,)`` int32, an index into the label set or ``BLANK``; of a
      language model ``(rows, length)``, the token after each one, ``BLANK``
      where it is no part of the response.
  """

  inputs: np.ndarray
  labels: np.ndarray


class TextFile(NamedTuple):
  """Rows of a file; an unusable row is ``('', None)``."""

  texts: list[str]
  labels: Sequence[str | None]


def label_name(value: Any) -> str | None:
  """The name of a label: strings and integers have one, nothing else has."""
  if isinstance(value, str):
    return value
  if isinstance(value, int) and not isinstance(value, bool):
    return str(value)
  return None


def read_public(
  path: str, text_column: str, label_column: str, option: str = '--eval'
) -> TextFile:
  """Reads a file declared public.

  Args:
    path: See ``files.read``.
    text_column: Key of the text, a string.
    label_column: Key of the label, a string or an integer.
    option: How the caller's option is called, for the messages.

  Returns:
    All rows, every label present.

  Raises:
    ValueError: If the file is absent or empty, or a row is no JSON object,
      lacks a column or has a value of another type; with the line.
  """
  texts, labels = [], []
  rows = files.read_public(path, option)
  for number, (row, problem) in enumerate(rows, 1):
    where = f'{option} {path}, row {number}'
    if row is None:
      raise ValueError(f'{where}: {problem}.{files.hint(path, rows)}')
    for column in (text_column, label_column):
      if column not in row:
        raise ValueError(
          f'{where}: no column {column!r}, only {sorted(row)}; see '
          f'--text-column and --label-column.'
        )
    text, label = row[text_column], label_name(row[label_column])
    if not isinstance(text, str):
      raise ValueError(
        f'{where}: {text_column!r} must be a string, got {text!r}.'
      )
    if label is None:
      raise ValueError(
        f'{where}: {label_column!r} must be a string or an integer, got '
        f'{row[label_column]!r}.'
      )
    texts.append(text)
    labels.append(label)
  if not texts:
    raise ValueError(f'{option} {path}: the file has no rows.')
  return TextFile(texts, labels)


def read_private(path: str, text_column: str, label_column: str) -> TextFile:
  """Reads a file of private records; see the module's docstring.

  Args:
    path: See ``files.read``.
    text_column: Key of the text.
    label_column: Key of the label.

  Returns:
    As many rows as the file has lines that are not empty. A row that is no
    JSON object, lacks a column or has a value of another type is blank.

  Raises:
    ValueError: If the file is absent, or not a single row has the columns.
  """
  texts, labels = [], []
  rows = files.read(path, '--data')
  for row, _ in rows:
    text, label = '', None
    if row is not None and isinstance(row.get(text_column), str):
      text, label = row[text_column], label_name(row.get(label_column))
    texts.append(text)
    labels.append(label)
  if all(label is None for label in labels):
    raise ValueError(
      f'--data {path}: no row has the columns {text_column!r} (a string) and '
      f'{label_column!r} (a string or an integer); see --text-column and '
      f'--label-column.{files.hint(path, rows)}'
    )
  return TextFile(texts, labels)


def require_other_rows(
  private: Sequence[Any], public: Sequence[Any], options: Any
) -> None:
  """Refuses the private file as evaluation, also renamed, sorted or converted.

  Only whole files are compared. Whether some rows are in both depends on single
  private records: no run tells it, ``check-data`` does. An audit, which trains
  on the public file itself, names one file twice, as no run can.

  Raises:
    ValueError: If the rows are the same, in whatever order.
  """
  same = options.data != options.eval and len(private) == len(public)
  if same and sorted(map(repr, private)) == sorted(map(repr, public)):
    raise ValueError(
      f'--eval {options.eval} has the rows of --data, but it is declared '
      'public, and what is measured on it is published: give public rows that '
      'the model does not learn.'
    )


def chosen(rows: Examples, count: int | None) -> Examples:
  """At most ``count`` public rows, always the same: a file may be sorted."""
  order = np.random.default_rng(0).permutation(len(rows.labels))
  places = np.sort(order[:count])
  return Examples(rows.inputs[places], rows.labels[places])


def label_set(
  declared: Sequence[str] | None, evaluation: Sequence[str | None]
) -> tuple[str, ...]:
  """The classes, from what is declared or public, never from private data.

  Args:
    declared: The value of ``--labels``: names, or one name of a file with one
      label a line; None takes the labels of the evaluation file.
    evaluation: The labels of the evaluation file.

  Returns:
    The names; the order of ``declared``, else sorted.

  Raises:
    ValueError: If a declared label is repeated, there are fewer than two, or
      a label occurs in the evaluation file only.
  """
  if declared is None:
    names = tuple(sorted(set(map(str, evaluation))))
  elif len(declared) == 1 and pathlib.Path(declared[0]).is_file():
    lines = pathlib.Path(declared[0]).read_text('utf-8').splitlines()
    names = tuple(line.strip() for line in lines if line.strip())
  else:
    names = tuple(declared)
  if len(set(names)) < len(names):
    raise ValueError(f'--labels: a label is repeated in {list(names)}.')
  unknown = sorted(set(map(str, evaluation)) - set(names))
  if unknown:
    raise ValueError(
      f'--labels lacks {unknown}, which occur in the evaluation file only.'
    )
  if len(names) < 2:
    raise ValueError(f'--labels: expected two or more, got {list(names)}.')
  return names


def encode_labels(
  labels: Sequence[str | None], names: Sequence[str]
) -> np.ndarray:
  """Indices into ``names``; ``BLANK`` for a label outside of the set.

  A private record with an unknown label is a record like any other, only with
  a zero gradient: refusing it would tell that it is there.
  """
  index: dict[str | None, int] = {name: i for i, name in enumerate(names)}
  return np.asarray([index.get(label, BLANK) for label in labels], np.int32)
