"""Model and rows of a task of the language-model benchmark, read once."""

import dataclasses
import functools
import pathlib

from benchmarks.accuracy import language_layers, language_rows
from prism_optax.finetune import data
from prism_optax.finetune.models import pretrained

RANK = 4


@dataclasses.dataclass(frozen=True)
class Problem:
  """Model and rows of a task."""

  model: language_layers.Model
  task: language_rows.Task
  rows: language_rows.Parts
  private: data.Examples
  tuning: data.Examples
  table: data.Examples


@functools.cache
def model_of(name: str, layers: int) -> language_layers.Model:
  return language_layers.load(pretrained.find(name), layers, RANK)


@functools.lru_cache(maxsize=1)
def problem(
  task: str, model: str, layers: int, folder: pathlib.Path, cache: pathlib.Path
) -> Problem:
  """Reads the rows, and computes what enters the top layers, once."""
  loaded, rows = model_of(model, layers), language_rows.read(task, folder)
  used = language_rows.TASKS[task]
  rows = language_rows.Parts(
    rows.private,
    *(
      [row for row in part if language_layers.fits(loaded, used, row)]
      for part in (rows.tuning, rows.table)
    ),
  )
  parts = (
    language_layers.encode(loaded, used, part, cache)
    for part in (rows.private, rows.tuning, rows.table)
  )
  return Problem(loaded, used, rows, *parts)
