"""A finished run, opened again from what it wrote: nothing else is needed."""

import dataclasses
import pathlib
from typing import Any

from flax import nnx

from . import adapters, files, options, tasks
from .models import classifier, pretrained


@dataclasses.dataclass(frozen=True)
class Finished:
  """What a run left behind.

  Attributes:
    folder: Of the run.
    options: Those it was done with.
    summary: What is in ``summary.json``.
  """

  folder: pathlib.Path
  options: options.Options
  summary: dict[str, Any]

  @property
  def adapter(self) -> pathlib.Path:
    return self.folder / 'adapter.safetensors'


def find(folder: str, *expected: str) -> Finished:
  """Opens a run.

  Args:
    folder: Its ``--output``.
    *expected: Tasks of which it may be; any if there are none.

  Raises:
    ValueError: If there is no run, it is not finished, or of another task.
  """
  path = pathlib.Path(folder)
  for name, what in (
    ('options.json', 'there is no run'),
    ('summary.json', 'the run is not finished: go on with train --resume'),
  ):
    if not (path / name).is_file():
      raise ValueError(f'{folder}: {what} (no {path / name}).')
  used = options.read(path / 'options.json')
  if expected and used.task not in expected:
    raise ValueError(
      f'{folder}: expected a run of --task {" or ".join(expected)}, got '
      f'{used.task}.'
    )
  return Finished(path, used, files.read_json(path / 'summary.json'))


def find_all(folder: str) -> list[Finished]:
  """The run in a folder, or those of all methods that the demo compared.

  Raises:
    ValueError: As :func:`find`.
  """
  path = pathlib.Path(folder)
  parts = sorted(path.glob('*/summary.json'))
  if (path / 'summary.json').exists() or not parts:
    return [find(folder)]
  used = options.read(path / 'options.json')
  return [Finished(part.parent, used, files.read_json(part)) for part in parts]


def model(
  run: Finished, *, before: bool = False, moved: bool = False
) -> tuple[Any, pretrained.Pretrained]:
  """The model of a run, and where its frozen weights came from.

  Args:
    run: What :func:`find` returned, of the tasks ``classify`` or ``instruct``.
    before: Whether it is to be as it was before it was adapted.
    moved: Whether to refuse adapters that equal their start.

  Raises:
    ValueError: If the weights are not those that the run began with, or the
      adapters were never moved.
  """
  used, source = run.options, pretrained.find(run.options.model)
  if source.sha256 != used.base['sha256']:
    raise ValueError(
      f'{run.folder}: the frozen weights have sha256 {source.sha256}, the run '
      f'began with {used.base["sha256"]}.'
    )
  found = tasks.network(used, source)
  if before:
    return found, source
  _, start, _ = classifier.split(found)
  params = adapters.load(run.adapter, start)
  if moved and not adapters.have_moved(params, start):
    raise ValueError(
      f'{run.folder}: training never moved the adapters: there is nothing to '
      f'export ({run.summary["held_steps"]} of {run.summary["final"]["step"]} '
      'steps diverged).'
    )
  nnx.update(found, params)
  return found, source
