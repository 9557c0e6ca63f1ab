"""One run: loop, evaluation, checkpoints, output folder."""

import contextlib
import pathlib
import shutil
import signal
from collections.abc import Iterator
from typing import Any

import jax
import tqdm

from prism_optax import training as prism_training
from prism_optax.training import PrivateTraining
from prism_optax.training._state import TrainingState

from . import files, methods, reporting, summaries, tasks, training
from . import options as options_lib
from .command_line import NOT_PRIVATE

# As secret as the data: the state holds the keys of noise and batches. Whoever
# reads it can take the noise off everything that was released.
FOLDER = 'checkpoints_secret'


class Interrupted(KeyboardInterrupt):
  """The run was asked to stop, and has saved where it is."""


def secrets(output: pathlib.Path) -> pathlib.Path:
  """The folder of state and journal, which is deleted at the end."""
  return output.resolve() / FOLDER


def train(
  task: tasks.Task,
  private: PrivateTraining,
  options: options_lib.Options,
  name: str,
  output: pathlib.Path,
) -> dict[str, Any]:
  """Trains, or goes on from the last checkpoint in ``output``.

  Args:
    task: Model and data.
    private: Of ``training.make``, for this output.
    options: Of the run.
    name: Of the method.
    output: Gets ``adapter.safetensors``, ``metrics.jsonl`` and
      ``summary.json``; with diagnostics also ``nonprivate_metrics.jsonl``,
      which must stay as private as the data.

  Returns:
    What is in ``summary.json``: start and final evaluation, and the privacy
    that was spent.

  Raises:
    Interrupted: After SIGINT or SIGTERM.
    OSError: If a disk is full: what was saved before is still there.
    ValueError: If the checkpoint belongs to other data or another training, or
      is lost.
  """
  folder, summary_path = secrets(output), output / 'summary.json'
  if summary_path.exists():
    summary = files.read_json(summary_path)
  else:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    state = _begun(task, private, options, name, output)
    metrics = reporting.Metrics(output / 'metrics.jsonl', int(state.step))
    state = _loop(task, private, options, name, state, metrics)
    summary = summaries.write(
      task, private, options, name, state, metrics.rows, output
    )
  shutil.rmtree(folder, ignore_errors=True)
  return summary


def _begun(
  task: tasks.Task,
  private: PrivateTraining,
  options: options_lib.Options,
  name: str,
  output: pathlib.Path,
) -> TrainingState:
  """A new state, saved before anything is released, or that of the run."""
  path = secrets(output) / 'state.npz'
  if not path.exists():
    if (output / 'metrics.jsonl').exists():
      raise ValueError(
        f'--resume: the checkpoint of the run in {output} is gone, and '
        'its noise with it. From the start it would be a second release, with '
        'a budget of its own: choose another --output.'
      )
    # Of a process that died before it had saved a state, and so released none.
    path.with_name('journal.sqlite').unlink(missing_ok=True)
  state = private.init(methods.prepared(name, task.params))
  everywhere = training.sharding(options)
  if everywhere is not None:
    arrays = jax.device_put((state.params, state.optimizer), everywhere)
    state = state._replace(params=arrays[0], optimizer=arrays[1])
  if path.exists():
    return prism_training.load_state(path, state)
  prism_training.save_state(path, state)
  return state


def _loop(
  task: tasks.Task,
  private: PrivateTraining,
  options: options_lib.Options,
  name: str,
  state: TrainingState,
  metrics: reporting.Metrics,
) -> TrainingState:
  """All steps that are left."""
  output, first = metrics.path.parent, int(state.step)
  frozen = jax.device_put(task.frozen, training.sharding(options))
  evaluate = task.make_evaluate(task.graphdef, task.evaluation)
  batches = private.batches(state, task.train)
  diagnostics = None
  if options.nonprivate_diagnostics:
    path = output / 'nonprivate_metrics.jsonl'
    diagnostics = reporting.Metrics(path, first)
  print('Compiling and checking the step ...')
  private.compile(state, frozen)
  if first == 0:
    metrics.add(0, evaluate(state.params, frozen))
  with (
    _stop_requests() as requests,
    # Nothing but the number of the step and the public evaluation.
    tqdm.tqdm(
      initial=first,
      total=private.steps,
      desc=name,
      unit='step',
      dynamic_ncols=True,
    ) as bar,
  ):
    bar.set_postfix(_shown(metrics.rows))
    for batch in batches:
      done = int(state.step) + 1
      is_last = done == private.steps
      evaluates = done % options.eval_every == 0 or is_last
      if evaluates and diagnostics is not None:
        means = private.nonprivate_means(state, batch, frozen)
        diagnostics.add(
          done,
          {
            'nonprivate_loss': float(means.loss),
            'nonprivate_accuracy': float(means.aux),
            'nonprivate_gradient_norm': float(means.gradient_norm),
          },
        )
      state = private.step(state, batch, frozen)
      bar.update()
      if evaluates:
        metrics.add(done, evaluate(state.params, frozen))
        bar.set_postfix(_shown(metrics.rows))
      if requests or done % options.checkpoint_every == 0 or is_last:
        prism_training.save_state(secrets(output) / 'state.npz', state)
      if requests and not is_last:
        message = f'Stopped after {done} of {private.steps} steps, saved.'
        if name != NOT_PRIVATE:
          message += summaries.spent(private, state)
        raise Interrupted(message)
  return state


def _shown(rows: list[dict[str, Any]]) -> dict[str, str]:
  if not rows:
    return {}
  name = reporting.measure(rows[-1])
  return {name.removeprefix('eval_'): f'{rows[-1][name]:.3f}'}


@contextlib.contextmanager
def _stop_requests() -> Iterator[list[int]]:
  """Collects SIGINT and SIGTERM; a second one acts as it always does."""
  requests: list[int] = []

  def remember(number, frame):
    del frame
    requests.append(number)
    signal.signal(number, previous[number])

  previous = {
    number: signal.signal(number, remember)
    for number in (signal.SIGINT, signal.SIGTERM)
  }
  try:
    yield requests
  finally:
    for number, handler in previous.items():
      signal.signal(number, handler)
