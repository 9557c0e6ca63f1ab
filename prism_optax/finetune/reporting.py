"""Metrics as JSON lines, and a table: public numbers only.

What is written is about the evaluation file, which is declared public, unless
its name begins with ``nonprivate_``. Times are left out: the duration of a
step may tell how many records it had.
"""

import json
import math
import pathlib
from collections.abc import Sequence
from typing import Any

from . import files


class Metrics:
  """A file with one JSON object for each evaluated step.

  Args:
    path: The file.
    step: Rows up to this step are kept. Those after it belong to steps that
      are done again, with the same result.
  """

  def __init__(self, path: pathlib.Path, step: float):
    self.path = path
    lines = path.read_text('utf-8').splitlines() if path.exists() else []
    self.rows = [row for row in map(json.loads, lines) if row['step'] <= step]

  def add(self, step: int, row: dict[str, float]) -> None:
    """Writes what was measured at a step."""
    if self.rows and self.rows[-1]['step'] >= step:
      return  # The step of a checkpoint was evaluated before it was saved.
    self.rows.append({'step': step, **row})
    files.write(self.path, ''.join(json.dumps(x) + '\n' for x in self.rows))


def measure(row: dict[str, Any]) -> str:
  """What counts: perplexity of a language model, accuracy else."""
  return 'eval_perplexity' if 'eval_perplexity' in row else 'eval_accuracy'


def round_up(epsilon: float) -> float:
  """To what is printed; never to less privacy loss than spent."""
  return math.ceil(epsilon * 1e3) / 1e3 if math.isfinite(epsilon) else epsilon


def table(rows: Sequence[Sequence[str]]) -> str:
  """Columns of text, the first row as the head."""
  widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
  lines = [
    '  '.join(
      cell.ljust(width) for cell, width in zip(row, widths, strict=True)
    )
    for row in rows
  ]
  lines.insert(1, '  '.join('-' * width for width in widths))
  return '\n'.join(line.rstrip() for line in lines)
