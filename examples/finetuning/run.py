"""One run: plan, loop, evaluation, checkpoints, output folder."""

import contextlib
import dataclasses
import json
import pathlib
import signal
from collections.abc import Iterator
from typing import Any

import optax
import tqdm

from . import (
  checkpoints,
  methods,
  privacy,
  randomness,
  reporting,
  sampling,
  summaries,
  tasks,
  training,
)


@dataclasses.dataclass(frozen=True)
class Settings:
  """How to train; all of it is public except ``seed``.

  Attributes:
    optimizer: One of ``methods.METHODS``.
    learning_rate: At the first step; a cosine takes it to a tenth.
    l2_clip_norm: Largest norm of one example's gradient, over all trainable
      leaves.
    microbatch_size: Examples in memory at once.
    eval_every: Steps between evaluations.
    checkpoint_every: Steps between checkpoints.
    seed: None for secret randomness.
    skip_padding: Whether micro-batches of nothing but padding are left out.
      Saves about a quarter of the time; but how long a step takes then tells
      how many records were drawn.
    nonprivate_diagnostics: Whether to write measures of the training data.
    keep_checkpoints: Whether the secrets stay on disk after the last step.
    devices: Number of devices over which each batch is split.
  """

  optimizer: str
  learning_rate: float
  l2_clip_norm: float
  microbatch_size: int
  eval_every: int
  checkpoint_every: int
  seed: int | None = None
  skip_padding: bool = False
  nonprivate_diagnostics: bool = False
  keep_checkpoints: bool = False
  devices: int = 1


class Interrupted(Exception):
  """The run was asked to stop, and has saved where it is."""


def train(
  task: tasks.Task,
  plan: privacy.Plan,
  settings: Settings,
  output: pathlib.Path,
) -> dict[str, Any]:
  """Trains, or goes on from the last checkpoint in ``output``.

  Args:
    task: Model and data.
    plan: Public constants; ``noise_multiplier`` 0 where nothing is private.
    settings: How to train.
    output: Gets ``adapter.safetensors``, ``metrics.jsonl``, ``metrics.png``
      and ``summary.json``; with diagnostics also ``nonprivate_metrics.jsonl``
      and ``nonprivate_metrics.png``, which must stay as private as the data.

  Returns:
    What is in ``summary.json``: start and final evaluation, and the privacy
    that was spent.

  Raises:
    Interrupted: After SIGINT or SIGTERM.
    OSError: If a disk is full: what was saved before is still there.
    ValueError: If the checkpoint belongs to other data, or is lost; if there
      are fewer devices than asked for.
  """
  summary_path = output / 'summary.json'
  if summary_path.exists():
    if not settings.keep_checkpoints:  # It may have ended just before that.
      checkpoints.erase(output)
    return json.loads(summary_path.read_text('utf-8'))
  method = _method(plan, settings, task.params)
  state = training.init_state(task.params, method)
  store = checkpoints.Checkpoints(output)
  checkpoint = checkpoints.Checkpoint(
    state,
    randomness.sampling_seed(settings.seed),
    checkpoints.digest(*task.train),
  )
  report = reporting.Report(
    output, nonprivate_diagnostics=settings.nonprivate_diagnostics
  )
  release = _release(task, plan, settings)
  ledger = checkpoints.Ledger(release, 0)
  restored = store.restore(checkpoint, release)
  if restored is not None:
    found = checkpoint.data_digest
    checkpoint, ledger = restored
    checkpoints.check_same_data(found, checkpoint.data_digest)
  elif report.public.path.exists():
    raise ValueError(
      f'--resume: the checkpoints of the run in {output} are gone, and its '
      f'noise with them. From the start it would be a second release, with a '
      f'budget of its own: choose another --output.'
    )
  else:
    # Before anything is released: see the error above.
    ledger = _ahead(ledger, plan, settings, 0)
    store.save(checkpoint, ledger)
  report.resume(int(checkpoint.state.step))
  checkpoint = _loop(
    task,
    plan,
    settings,
    method,
    checkpoint,
    ledger,
    store,
    report,
    # A process that was killed may have released what it had written down.
    spent_before=0 if restored is None else ledger.spent_steps,
  )
  summary = summaries.write(
    task, plan, settings, checkpoint.state, report, output
  )
  store.close()
  if not settings.keep_checkpoints:
    checkpoints.erase(output)
  return summary


def _release(
  task: tasks.Task, plan: privacy.Plan, settings: Settings
) -> dict[str, Any]:
  """All that decides what is released, beside the data and the secrets."""
  used = summaries.public(settings)
  for name in ('eval_every', 'checkpoint_every', 'keep_checkpoints'):
    del used[name]
  return {
    'plan': dataclasses.asdict(plan),
    'settings': used,
    'base': task.base,
    'labels': list(task.labels),
  }


def _ahead(
  ledger: checkpoints.Ledger,
  plan: privacy.Plan,
  settings: Settings,
  done: int,
) -> checkpoints.Ledger:
  """The ledger with the steps until the next checkpoint written down."""
  planned = min(plan.steps, done + settings.checkpoint_every)
  return ledger._replace(spent_steps=max(ledger.spent_steps, planned))


def _method(
  plan: privacy.Plan, settings: Settings, params: Any
) -> methods.Method:
  return methods.make(
    settings.optimizer,
    learning_rate=optax.cosine_decay_schedule(
      settings.learning_rate, plan.steps, alpha=0.1
    ),
    l2_clip_norm=settings.l2_clip_norm,
    noise_multiplier=plan.noise_multiplier,
    expected_batch_size=plan.expected_batch_size,
    prng_key=randomness.noise_key(settings.seed),
    params=params,
    steps=plan.steps,
  )


def _loop(
  task: tasks.Task,
  plan: privacy.Plan,
  settings: Settings,
  method: methods.Method,
  checkpoint: checkpoints.Checkpoint,
  ledger: checkpoints.Ledger,
  store: checkpoints.Checkpoints,
  report: reporting.Report,
  spent_before: int,
) -> checkpoints.Checkpoint:
  """All steps that are left."""
  placement = training.Placement(settings.devices)
  state, frozen = placement.everywhere((checkpoint.state, task.frozen))
  evaluate = task.make_evaluate(task.graphdef, task.evaluation)
  step = training.make_step(
    task.graphdef,
    method,
    microbatch_size=settings.microbatch_size,
    skip_padding=settings.skip_padding,
    nonprivate_diagnostics=settings.nonprivate_diagnostics,
    loss=task.make_loss(task.graphdef),
  )

  def batch_of(number: int):
    indices = sampling.draw(
      checkpoint.sampling_seed,
      number,
      dataset_size=plan.dataset_size,
      sampling_probability=plan.sampling_probability,
      size=plan.padded_size,
    )
    if settings.skip_padding:
      indices = sampling.padding_last(indices, settings.microbatch_size)
    return placement.split(sampling.gather(task.train, indices))

  if int(state.step) == 0:
    report.add(0, evaluate(state.params, frozen))
  compiled = training.compile_step(step, state, frozen, *batch_of(0))
  with (
    _stop_requests() as requests,
    # Nothing but the number of the step and the public evaluation.
    tqdm.tqdm(
      initial=int(state.step),
      total=plan.steps,
      desc=settings.optimizer,
      unit='step',
      dynamic_ncols=True,
    ) as bar,
  ):
    bar.set_postfix(_shown(report.public.rows))
    for number in range(int(state.step), plan.steps):
      state, diagnostics = compiled(state, frozen, *batch_of(number))
      done = int(state.step)  # Waits: one step at a time.
      bar.update()
      if done % settings.eval_every == 0 or done == plan.steps:
        measured = None
        if diagnostics is not None:
          measured = {k: float(v) for k, v in diagnostics._asdict().items()}
        report.add(done, evaluate(state.params, frozen), measured)
        bar.set_postfix(_shown(report.public.rows))
      due = done % settings.checkpoint_every == 0 or done == plan.steps
      if requests or due:
        ledger = _ahead(ledger, plan, settings, done)
        store.save(checkpoint._replace(state=state), ledger)
      if requests and done < plan.steps:
        message = f'Stopped after {done} of {plan.steps} steps, saved.'
        if settings.optimizer != 'adamw':
          message += summaries.spent(
            plan, max(done, spent_before), ledger.spent_steps
          )
        raise Interrupted(message)
  return checkpoint._replace(state=state)


def _shown(rows: list[dict[str, Any]]) -> dict[str, str]:
  if not rows:
    return {}
  is_language = 'eval_perplexity' in rows[-1]
  name = 'perplexity' if is_language else 'accuracy'
  return {name: f'{rows[-1][f"eval_{name}"]:.3f}'}


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
