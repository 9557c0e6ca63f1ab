"""The private training of a task, its loss, and the public evaluation."""

import dataclasses
import math
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tqdm
from flax import nnx

from prism_optax import training

from . import data, methods
from .command_line import NOT_PRIVATE
from .options import LEARNING_RATES, TABLE, Options

# As secret as the data: the state holds the keys of noise and batches. Whoever
# reads it can take the noise off everything that was released.
FOLDER = 'checkpoints_secret'
# Of a method that is not private: no gradient of a network is that long.
NO_CLIP = 1e6


@dataclasses.dataclass(frozen=True)
class Run:
  """One training.

  Attributes:
    task: Model and data.
    options: Of the run.
    name: Of the method.
    output: Gets ``adapter.safetensors``, ``metrics.jsonl`` and
      ``summary.json``; with diagnostics also ``nonprivate_metrics.jsonl``,
      which must stay as private as the data.
    private: What trains.
  """

  task: Any
  options: Options
  name: str
  output: pathlib.Path
  private: training.PrivateTraining

  @property
  def state_path(self) -> pathlib.Path:
    return self.output.resolve() / FOLDER / 'state.npz'


def make_loss(graphdef: Any, divisor: int = 1) -> Callable[..., Any]:
  """``loss(params, frozen, inputs, labels) -> (loss, hits)`` of one record.

  The loss of a blank record is zero, whatever the parameters.

  Args:
    graphdef: Static part of the model.
    divisor: The loss of a record is the SUM over its labels (one, or the tokens
      of its response), in nats, over this declared constant. The mean over a
      batch's tokens would couple records: one with many tokens would change
      what the others count.
  """

  def loss(params, frozen, inputs, labels):
    logits = nnx.merge(graphdef, params, frozen)(inputs[None]).squeeze(0)
    losses, hits, counts = _measured(logits, labels)
    hits = jnp.sum(hits) / jnp.maximum(jnp.sum(counts), 1)
    return jnp.sum(losses) / divisor, hits

  return loss


def _measured(
  logits: jax.Array, labels: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Loss and hit of each label, and whether it counts, shaped as the labels."""
  counts = labels != data.BLANK
  losses = optax.softmax_cross_entropy_with_integer_labels(
    logits, jnp.where(counts, labels, 0)
  )
  hits = jnp.argmax(logits, axis=-1) == labels
  return jnp.where(counts, losses, 0), hits, counts


def make(
  task: Any, options: Options, name: str, folder: pathlib.Path
) -> training.PrivateTraining:
  """The training of a task by one of ``command_line.METHODS``.

  Args:
    task: A ``tasks.Task``.
    options: Of the run. Their ``plan``, if a run goes on, has the noise that it
      was calibrated to.
    name: Of the method.
    folder: Of the secrets of a run, where its journal is.

  Raises:
    ValueError: If a size, delta or noise does not fit, the target cannot be
      met, or there are fewer devices than asked for.
  """
  size, is_private = options.dataset_size, name != NOT_PRIVATE
  plan = options.plan or vars(options)
  noise = {'noise_multiplier': plan['noise_multiplier']}
  if noise['noise_multiplier'] is None:
    noise = {'target_epsilon': options.target_epsilon}
  clip = options.l2_clip_norm if is_private else NO_CLIP
  rates = schedule(options, name)
  optimizer = methods.optimizer(name, rates, clip, task.params)
  return training.make_private(
    task.loss,
    task.params,
    has_aux=True,
    optimizer=optimizer,
    l2_clip_norm=clip,
    expected_batch_size=options.batch_size,
    dataset_size=size,
    steps=options.steps,
    delta=options.delta if is_private else 0.5 / size,
    **noise if is_private else {'noise_multiplier': 0.0},
    record=jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), task.train
    ),
    prior_releases=[] if task.head is None else [task.head],
    tags={'base': task.base['sha256'], 'method': name},
    journal=folder / 'journal.sqlite',
    prng_key=options.seed,
    execution=training.Execution(
      options.microbatch_size,
      batch_sharding=sharding(options, 'data'),
      skip_padding=options.skip_padding,
    ),
  )


def learning_rate(options: Options, name: str) -> float:
  """At the first step; a cosine takes it to a tenth.

  By default it falls with the root of the number of steps, which is between
  what was measured: the best rates of ``docs/hyper_parameters.md`` fall nearly
  as one over the steps, those of language models hardly from 24 to 240 steps.
  From a released head it does not rise for fewer steps: noise would take away
  what the head knows.
  """
  if options.learning_rate is not None:
    return options.learning_rate
  steps = TABLE['steps'].defaults[options.task]
  own = LEARNING_RATES[options.task][name]
  fewer = 1.0 if options.head == 'released' else math.inf
  return own * min(math.sqrt(steps / options.steps), fewer)


def schedule(options: Options, name: str) -> optax.Schedule:
  rate = learning_rate(options, name)
  return optax.cosine_decay_schedule(rate, options.steps, alpha=0.1)


def sharding(options: Options, *axes: str) -> jax.sharding.NamedSharding | None:
  """Over the devices of ``--mesh``, if there are several.

  Args:
    options: Of the run.
    *axes: ``'data'`` to split the first axis; none for copies on each.

  Raises:
    ValueError: If there are fewer devices.
  """
  count, found = options.mesh, jax.device_count()
  if count > found:
    raise ValueError(
      f'--mesh asks for {count} devices, but there are {found}. (On '
      f'a CPU: XLA_FLAGS=--xla_force_host_platform_device_count={count}.)'
    )
  if count == 1:
    return None
  auto = (jax.sharding.AxisType.Auto,)
  mesh = jax.make_mesh((count,), ('data',), auto)
  return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes))


def make_evaluate(
  graphdef: Any, evaluation: data.Examples, chunk: int
) -> Callable[[Any, Any], dict[str, float]]:
  """Builds ``evaluate(params, frozen)`` over a public set.

  A bar moves where it takes more than two seconds.

  Args:
    graphdef: Static part of the model.
    evaluation: Public rows; of those without a label nothing is measured.
    chunk: Rows at once; the last chunk is filled up with blank ones.

  Returns:
    A function that returns, over all labels, ``eval_loss``, the mean in nats,
    and ``eval_accuracy``, the fraction that was the likeliest; of a language
    model also ``eval_perplexity``, the exponential of the loss.
  """
  is_blank = evaluation.labels == data.BLANK
  used = ~is_blank.reshape(len(is_blank), -1).all(axis=1)
  rows = jax.tree.map(lambda x: x[used], evaluation)
  count = len(rows.labels)

  @jax.jit
  def totals(params, frozen, inputs, labels):
    logits = nnx.merge(graphdef, params, frozen)(inputs)
    return [jnp.sum(x) for x in _measured(logits, labels)]

  def evaluate(params, frozen):
    total = np.zeros(3)
    for start in tqdm.trange(
      0, count, chunk, desc='evaluation', unit='chunk', leave=False, delay=2
    ):
      places = np.arange(start, start + chunk)
      inputs, labels = (x[places % count] for x in rows)
      labels[places >= count] = data.BLANK
      total += np.asarray(totals(params, frozen, inputs, labels), np.float64)
    loss, accuracy = total[:2] / total[2]
    found = {'eval_loss': loss}
    if rows.labels.ndim == 2:
      found['eval_perplexity'] = np.exp(loss)
    return found | {'eval_accuracy': accuracy}

  return evaluate
