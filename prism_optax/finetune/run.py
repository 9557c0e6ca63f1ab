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
from prism_optax.training._state import TrainingState

from . import adapters, files, methods, summaries, tasks, training
from .command_line import NOT_PRIVATE
from .options import Options
from .training import FOLDER as FOLDER
from .training import Run


class Interrupted(KeyboardInterrupt):
  """The run was asked to stop, and has saved where it is."""


def make(
  task: tasks.Task, options: Options, name: str, output: pathlib.Path
) -> Run:
  """A run, whose noise the options have from here on.

  Raises:
    ValueError: As ``training.make``; if no statement of it would mean anything.
  """
  private = training.make(task, options, name, output.resolve() / FOLDER)
  if name != NOT_PRIVATE and options.plan is None:
    # What cannot be stated at the end is not begun: delta may be too large, or
    # the noise too little.
    private.statement()
    options.plan = {'noise_multiplier': private.noise_multiplier}
  return Run(task, options, name, output, private)


def train(run: Run) -> dict[str, Any]:
  """Trains, or goes on from the last checkpoint.

  Returns:
    What is in ``summary.json``: start and final evaluation, and the privacy
    that was spent.

  Raises:
    Interrupted: After SIGINT or SIGTERM.
    OSError: If a disk is full: what was saved before is still there.
    ValueError: If the checkpoint belongs to other data or another training, or
      is lost.
  """
  folder, summary_path = run.state_path.parent, run.output / 'summary.json'
  if summary_path.exists():
    summary = files.read_json(summary_path)
  else:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    state = _begun(run)
    metrics = summaries.Metrics(run.output / 'metrics.jsonl', state.step)
    state = _loop(run, state, metrics)
    summary = _written(run, state, metrics.rows)
  shutil.rmtree(folder, ignore_errors=True)
  return summary


def _begun(run: Run) -> TrainingState:
  """A new state, saved before anything is released, or that of the run."""
  path = run.state_path
  if not path.exists():
    if (run.output / 'metrics.jsonl').exists():
      raise ValueError(
        f'--resume: the checkpoint of the run in {run.output} is gone, and '
        'its noise with it. From the start it would be a second release, with '
        'a budget of its own: choose another --output.'
      )
    # Of a process that died before it had saved a state, and so released none.
    path.with_name('journal.sqlite').unlink(missing_ok=True)
  state = run.private.init(methods.prepared(run.name, run.task.params))
  everywhere = training.sharding(run.options)
  if everywhere is not None:
    arrays = jax.device_put((state.params, state.optimizer), everywhere)
    state = state._replace(params=arrays[0], optimizer=arrays[1])
  if path.exists():
    return prism_training.load_state(path, state)
  prism_training.save_state(path, state)
  return state


def _loop(
  run: Run, state: TrainingState, metrics: summaries.Metrics
) -> TrainingState:
  """All steps that are left."""
  options, private, first = run.options, run.private, int(state.step)
  frozen = jax.device_put(run.task.frozen, training.sharding(options))
  batches = private.batches(state, run.task.train)
  path = run.output / 'nonprivate_metrics.jsonl'
  diagnostics = summaries.Metrics(path, first)
  print('Compiling and checking the step ...')
  private.compile(state, frozen)
  if not metrics.rows:  # Of a new run, or of one whose file is gone.
    metrics.add(first, run.task.evaluate(state.params, frozen))
  shape: dict[str, Any] = {
    'initial': first,
    'unit': 'step',
    'dynamic_ncols': True,
  }
  with (
    _stop_requests() as requests,
    # Nothing but the number of the step and the public evaluation.
    tqdm.tqdm(batches, run.name, private.steps, **shape) as bar,
  ):
    for batch in bar:
      bar.set_postfix(_shown(metrics.rows))
      done = int(state.step) + 1
      is_last = done == private.steps
      evaluates = done % options.eval_every == 0 or is_last
      if evaluates and options.nonprivate_diagnostics:
        means = private.nonprivate_means(state, batch, frozen)
        row = {
          'nonprivate_loss': means.loss,
          'nonprivate_accuracy': means.aux,
          'nonprivate_gradient_norm': means.gradient_norm,
        }
        diagnostics.add(done, {name: float(x) for name, x in row.items()})
      state = private.step(state, batch, frozen)
      if evaluates:
        metrics.add(done, run.task.evaluate(state.params, frozen))
      if requests or done % options.checkpoint_every == 0 or is_last:
        prism_training.save_state(run.state_path, state)
      if requests and not is_last:
        message = f'Stopped after {done} of {private.steps} steps, saved.'
        if run.name != NOT_PRIVATE:
          message += summaries.spent(private, state)
        raise Interrupted(message)
    bar.set_postfix(_shown(metrics.rows))
  return state


def _shown(rows: list[dict[str, Any]]) -> dict[str, str]:
  name = summaries.measure(rows[-1])
  return {name.removeprefix('eval_'): f'{rows[-1][name]:.3f}'}


def _written(
  run: Run, state: TrainingState, rows: list[dict[str, Any]]
) -> dict[str, Any]:
  """Writes the adapter and, last, ``summary.json``; what is in the latter."""
  summary = summaries.summarize(run, state, rows)
  facts = {
    'base': run.task.base,
    'labels': run.task.labels,
    'optimizer': run.name,
    'privacy': summary['statement'],
  }
  adapters.save(run.output / 'adapter.safetensors', state.params, facts)
  files.write_json(run.output / 'summary.json', summary)
  return summary


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
