"""Text classification files: texts, and labels as places in a label set."""

import argparse
import functools
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from . import files

OPTIONS = '--text-column and --label-column'
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


def text(row: files.Entries, used: argparse.Namespace) -> str:
  return files.entry(row, used.text_column, OPTIONS)


def _text_and_label(
  row: files.Entries, used: argparse.Namespace
) -> tuple[str, str | None]:
  label = files.entry(row, used.label_column, OPTIONS, str, int)
  return text(row, used), label


def read_public(used: argparse.Namespace) -> TextFile:
  """Reads ``--eval``; see ``files.read_public``."""
  parse = functools.partial(_text_and_label, used=used)
  return _transposed(files.read_public(used.eval, parse))


def read_private(used: argparse.Namespace) -> TextFile:
  """Reads ``--data``; see ``files.read_private``."""
  expected = (
    f'the columns {used.text_column!r} (a string) and {used.label_column!r} (a '
    f'string or an integer); see {OPTIONS}'
  )
  parse = functools.partial(_text_and_label, used=used)
  return _transposed(files.read_private(used.data, parse, expected))


def _transposed(rows: Sequence[tuple[str, str | None] | None]) -> TextFile:
  pairs = [('', None) if row is None else row for row in rows]
  return TextFile(*map(list, zip(*pairs, strict=True)))


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
) -> list[str]:
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
    names = sorted(set(map(str, evaluation)))
  elif len(declared) == 1 and pathlib.Path(declared[0]).is_file():
    lines = pathlib.Path(declared[0]).read_text('utf-8').splitlines()
    names = [line.strip() for line in lines if line.strip()]
  else:
    names = list(declared)
  if len(set(names)) < len(names):
    raise ValueError(f'--labels: a label is repeated in {names}.')
  unknown = sorted(set(map(str, evaluation)) - set(names))
  if unknown:
    raise ValueError(
      f'--labels lacks {unknown}, which occur in the evaluation file only.'
    )
  if len(names) < 2:
    raise ValueError(f'--labels: expected two or more, got {names}.')
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
