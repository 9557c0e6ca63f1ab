"""What is said of a run: when it stops, and when it has ended."""

import dataclasses
import importlib.metadata
import json
import pathlib
from typing import Any

import prism_optax

from . import adapters, privacy, reporting, tasks, training


def public(settings: Any) -> dict[str, Any]:
  """``run.Settings`` as JSON knows them, without the seed."""
  used = dataclasses.asdict(settings)
  del used['seed']
  return used


def versions() -> dict[str, str]:
  """Of what decides the figures; of a checkout as well."""
  packages = 'jax', 'optax', 'jax-privacy', 'dp-accounting'
  return {'prism-optax': prism_optax.__version__} | {
    name: importlib.metadata.version(name) for name in packages
  }


def spent(plan: privacy.Plan, done: int, reserved: int) -> str:
  """What is spent if the run ends here, and what is written down for it.

  A stop that somebody decides on after looking at what was released is no part
  of any plan: what holds then is the statement of all steps, of which the run
  is a part.

  Args:
    plan: Of the run.
    done: Steps that may have been released.
    reserved: Steps in the ledger, the ones up to the next checkpoint included.
  """
  message = (
    f' Spent if you stop here: {plan.statement(done)}; if what the run has '
    f'shown so far made you stop: {plan.statement(plan.steps)}.'
  )
  if reserved > done:
    epsilon = privacy.round_up(plan.epsilon(reserved))
    message += (
      f' Reserved for a process that is killed before its next checkpoint: '
      f'{reserved} steps, epsilon <= {epsilon:.3f}.'
    )
  return message


def write(
  task: tasks.Task,
  plan: privacy.Plan,
  settings: Any,
  state: training.TrainState,
  report: reporting.Report,
  output: pathlib.Path,
) -> dict[str, Any]:
  """Writes the adapter, the plot and, last, ``summary.json``.

  Returns:
    What is in ``summary.json``.
  """
  steps = int(state.step)
  is_private = settings.optimizer != 'adamw'
  if int(state.held):
    print(
      f'{settings.optimizer} diverged: {int(state.held)} of {steps} steps '
      'gave numbers that are not finite and left the parameters as they were. '
      'Try a smaller --learning-rate.'
    )
  summary: dict[str, Any] = {
    'task': task.name,
    'optimizer': settings.optimizer,
    'start': report.public.rows[0],
    'final': report.public.rows[-1],
    'private': is_private,
    'held_steps': int(state.held),
    'settings': public(settings),
    'versions': versions(),
  }
  if is_private:
    summary |= {
      'epsilon': plan.epsilon(steps),
      'statement': plan.statement(steps),
      'plan': dataclasses.asdict(plan),
    }
    title = (
      f'{task.name}, {settings.optimizer}, epsilon {summary["epsilon"]:.2f}'
    )
  else:
    summary['statement'] = 'not private'
    title = f'{task.name}, {settings.optimizer}, not private'
  if settings.seed is not None and is_private:
    summary['statement'] += (
      '; the guarantee does NOT hold: --seed made batches and noise predictable'
    )
  adapters.save(
    output / 'adapter.safetensors',
    state.params,
    {
      'base': task.base,
      'labels': task.labels,
      'optimizer': settings.optimizer,
      'privacy': summary['statement'],
    },
  )
  report.plot(title)
  text = json.dumps(summary, indent=2) + '\n'
  temporary = output / 'summary.tmp'
  temporary.write_text(text, 'utf-8')
  temporary.replace(output / 'summary.json')
  return summary
