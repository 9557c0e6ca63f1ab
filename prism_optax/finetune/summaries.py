"""What is said of a run: when it stops, and when it has ended."""

import importlib.metadata
import pathlib
from typing import Any

import prism_optax
from prism_optax.training import PrivateTraining
from prism_optax.training._state import TrainingState

from . import adapters, files, tasks, training
from . import options as options_lib
from .command_line import NOT_PRIVATE


def public(options: options_lib.Options, name: str) -> dict[str, Any]:
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


def plan(private: PrivateTraining) -> dict[str, Any]:
  """The public constants of the mechanism."""
  settings = private.parts.settings
  return {
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


def write(
  task: tasks.Task,
  private: PrivateTraining,
  options: options_lib.Options,
  name: str,
  state: TrainingState,
  rows: list[dict[str, Any]],
  output: pathlib.Path,
) -> dict[str, Any]:
  """Writes the adapter and, last, ``summary.json``.

  Returns:
    What is in ``summary.json``.
  """
  steps, held = int(state.step), int(state.held)
  if held:
    print(
      f'{name} diverged: {held} of {steps} steps gave numbers that are not '
      'finite and left the parameters as they were. Try a smaller '
      '--learning-rate.'
    )
  summary: dict[str, Any] = {
    'task': task.name,
    'optimizer': name,
    'start': rows[0],
    'final': rows[-1],
    'eval_rows': len(task.evaluation.labels),
    'chance': task.chance,
    'private': name != NOT_PRIVATE,
    'held_steps': held,
    'settings': public(options, name),
    'versions': versions(),
    'statement': 'not private',
  }
  if summary['private']:
    summary |= {
      'epsilon': private.epsilon(),
      # By each row of metrics.jsonl.
      'epsilons': [
        private.epsilon(row['step']) if row['step'] else 0.0 for row in rows
      ],
      'statement': private.statement(state),
      'plan': plan(private),
    }
  adapters.save(
    output / 'adapter.safetensors',
    state.params,
    {
      'base': task.base,
      'labels': task.labels,
      'optimizer': name,
      'privacy': summary['statement'],
    },
  )
  files.write_json(output / 'summary.json', summary)
  return summary
