"""Metrics as JSON lines, a plot, and a table: public numbers only.

What is written is about the evaluation file, which is declared public, unless
its name begins with ``nonprivate_``. Times are left out: the duration of a
step may tell how many records it had.
"""

import json
import math
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


class Report:
  """The curves of one run: public ones, and others where asked for.

  Two files and two plots, so that what may be published and what may not are
  never in one.
  """

  def __init__(self, output: pathlib.Path, *, nonprivate_diagnostics: bool):
    self.output = output
    self.public = Metrics(output / 'metrics.jsonl')
    self.nonprivate = (
      Metrics(output / 'nonprivate_metrics.jsonl')
      if nonprivate_diagnostics
      else None
    )

  def resume(self, step: int) -> None:
    """See :meth:`Metrics.resume`."""
    self.public.resume(step)
    if self.nonprivate is not None:
      self.nonprivate.resume(step)

  def add(
    self,
    step: int,
    evaluation: dict[str, float],
    diagnostics: dict[str, float] | None = None,
  ) -> None:
    """Writes what was measured at a step."""
    self.public.add({'step': step, **evaluation})
    if self.nonprivate is not None and diagnostics is not None:
      self.nonprivate.add({'step': step, **diagnostics})

  def plot(self, title: str) -> None:
    """Draws loss and accuracy on the evaluation file over the steps."""
    _plot(self.output / 'metrics.png', self.public.rows, [], title)
    if self.nonprivate is not None:
      _plot(
        self.output / 'nonprivate_metrics.png',
        self.public.rows,
        self.nonprivate.rows,
        title,
      )


def _plot(
  path: pathlib.Path,
  public: Sequence[dict[str, Any]],
  nonprivate: Sequence[dict[str, Any]],
  title: str,
) -> None:
  figure, axes = plt.subplots(1, 2, figsize=(9, 3.5), layout='constrained')
  for axis, kind in zip(axes, ('loss', 'accuracy'), strict=True):
    for rows, prefix, label, line in (
      (public, 'eval', 'evaluation', '-'),
      (nonprivate, 'nonprivate', 'training batch (NOT private)', '--'),
    ):
      if rows:
        values = [row[f'{prefix}_{kind}'] for row in rows]
        steps = [row['step'] for row in rows]
        axis.plot(
          steps,
          values,
          line,
          label=label,
          linewidth=2,
          marker='o',
          markersize=4,
        )
    axis.set(xlabel='step', ylabel=kind)
    axis.grid(alpha=0.3)
    axis.legend()
  figure.suptitle(title, fontsize='medium')
  figure.savefig(path, dpi=150)
  plt.close(figure)


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
