"""What is said of a run, all of it public.

What is written is about the evaluation file, which is declared public, unless
its name begins with ``nonprivate_``. Times are left out: the duration of a
step may tell how many records it had.
"""

import importlib.metadata
import json
import math
import pathlib
from typing import Any

import prism_optax
from prism_optax.training import PrivateTraining
from prism_optax.training._state import TrainingState

from . import files, training
from .command_line import NOT_PRIVATE
from .options import Options


class Metrics:
  """A file with one JSON object for each evaluated step.

  Args:
    path: The file.
    step: Rows up to this step are kept. Those after it belong to steps that
      are done again, with the same result.
  """

  def __init__(self, path: pathlib.Path, step: Any):
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


def standard_error(accuracy: float, count: int) -> float:
  """Returns the standard error of an accuracy on ``count`` rows."""
  return math.sqrt(accuracy * (1 - accuracy) / count)


def round_up(epsilon: float) -> float:
  """To what is printed; never to less privacy loss than spent."""
  return math.ceil(epsilon * 1e3) / 1e3 if math.isfinite(epsilon) else epsilon


def public(options: Options, name: str) -> dict[str, Any]:
  """How a method was trained, without the seed."""
  names = (
    *('l2_clip_norm', 'microbatch_size', 'eval_every', 'checkpoint_every'),
    *('skip_padding', 'nonprivate_diagnostics'),
  )
  return {
    'optimizer': name,
    'learning_rate': training.learning_rate(options, name),
    **{x: getattr(options, x) for x in names},
    'devices': options.mesh,
  }


def plan(run: training.Run) -> dict[str, Any]:
  """The public constants of the mechanism."""
  private, head = run.private, run.task.head
  settings = private.parts.settings
  released = (
    {} if head is None else {'head_noise_multiplier': head.noise_multiplier}
  )
  return released | {
    'dataset_size': settings.sampling.dataset_size,
    'expected_batch_size': settings.sampling.expected_batch_size,
    'padded_size': private.padded_batch_size,
    'steps': private.steps,
    'noise_multiplier': private.noise_multiplier,
    'delta': settings.delta,
  }


def versions() -> dict[str, str]:
  """Of what decides the figures; of a checkout as well."""
  packages = 'jax', 'optax', 'dp-accounting'
  return {'prism-optax': prism_optax.__version__} | {
    name: importlib.metadata.version(name) for name in packages
  }


def spent(private: PrivateTraining, state: TrainingState) -> str:
  """What is spent if the run ends here.

  A stop that somebody decides on after looking at what was released is no part
  of any plan: what holds then is the statement of all steps, of which the run
  is a part. The journal is never behind: a step is written down before it is
  done.
  """
  fixed = private.statement(state, stop_was_fixed=True)
  return (
    f' Spent if you stop here: {fixed}; if what the run has shown so far made '
    f'you stop: {private.statement(state)}.'
  )


def summarize(
  run: training.Run, state: TrainingState, rows: list[dict[str, Any]]
) -> dict[str, Any]:
  """What ``summary.json`` holds, of the rows of ``metrics.jsonl``."""
  name, private = run.name, run.private
  held = int(state.held)
  if held:
    print(
      f'{name} diverged: {held} of {private.steps} steps gave numbers that are '
      'not finite and left the parameters as they were. Try a smaller '
      '--learning-rate.'
    )
  summary: dict[str, Any] = {
    'task': run.task.name,
    'optimizer': name,
    'start': rows[0],
    'final': rows[-1],
    'eval_rows': len(run.task.evaluation.labels),
    'chance': run.task.chance,
    'private': name != NOT_PRIVATE,
    'held_steps': held,
    'settings': public(run.options, name),
    'versions': versions(),
    'statement': 'not private',
  }
  if summary['private']:
    steps_of_rows = [row['step'] for row in rows]
    summary |= {
      'epsilon': private.epsilon(),
      'epsilons': [private.epsilon(x) for x in steps_of_rows],
      'statement': private.statement(state),
      'plan': plan(run),
    }
  return summary
