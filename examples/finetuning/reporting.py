"""Metrics as JSON lines, a plot, and a table: public numbers only.

Everything here is about the evaluation file, which is declared public, unless
its name begins with ``nonprivate_``. Times are left out: the duration of a
step may tell how many records it had.
"""

import json
import pathlib
from collections.abc import Sequence
from typing import Any

import matplotlib

matplotlib.use('Agg')
from matplotlib import pyplot as plt


class Metrics:
  """A file with one JSON object for each evaluated step."""

  def __init__(self, path: pathlib.Path):
    self.path = path
    self.rows: list[dict[str, Any]] = []

  def resume(self, step: int) -> None:
    """Keeps what was written up to ``step``.

    The rows after it belong to steps that are done again, with the same
    result; a row that was cut off in the middle is among them.
    """
    self.rows = []
    if self.path.exists():
      for line in self.path.read_text('utf-8').splitlines():
        try:
          row = json.loads(line)
        except json.JSONDecodeError:
          break
        if row['step'] <= step:
          self.rows.append(row)
    temporary = self.path.with_suffix('.tmp')
    temporary.write_text(''.join(map(_line, self.rows)), 'utf-8')
    temporary.replace(self.path)

  def add(self, row: dict[str, Any]) -> None:
    if self.rows and self.rows[-1]['step'] >= row['step']:
      return  # The step of a checkpoint was evaluated before it was saved.
    self.rows.append(row)
    with self.path.open('a', encoding='utf-8') as file:
      file.write(_line(row))


def _line(row: dict[str, Any]) -> str:
  return json.dumps(row) + '\n'


def plot(
  path: pathlib.Path, rows: Sequence[dict[str, Any]], title: str
) -> None:
  """Draws loss and accuracy on the evaluation file over the steps."""
  figure, axes = plt.subplots(1, 2, figsize=(9, 3.5), layout='constrained')
  steps = [row['step'] for row in rows]
  for axis, kind in zip(axes, ('loss', 'accuracy'), strict=True):
    axis.plot(steps, [row[f'eval_{kind}'] for row in rows], label='evaluation')
    name = f'nonprivate_{kind}'
    measured = [row for row in rows if name in row]
    if measured:
      axis.plot(
        [row['step'] for row in measured],
        [row[name] for row in measured],
        linestyle='--',
        label='training batch (not private)',
      )
    axis.set(xlabel='step', ylabel=kind)
    axis.legend()
  figure.suptitle(title, fontsize='medium')
  figure.savefig(path, dpi=150)
  plt.close(figure)


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
