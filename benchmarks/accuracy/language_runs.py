"""One run of the language-model benchmark, from a setting to its scores."""

import dataclasses
import functools
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.accuracy import language_layers, language_problems
from benchmarks.common import methods, private
from prism_optax import lora, training
from prism_optax.finetune import data

DELTA, CLIP, MICROBATCH, CHUNK = 1e-5, 1.0, 32, 32
PRIVATE = ('prism', 'dp-adamw')
# A clip that no gradient reaches, where nothing is private.
NO_CLIP = 1e4


@dataclasses.dataclass(frozen=True)
class Setting:
  """All that a result depends on.

  Attributes:
    task: Key of ``language_rows.TASKS``.
    method: One of ``PRIVATE``, ``'adamw'`` (neither clip nor noise) or
      ``'zero-shot'`` (no step at all).
    epsilon: At ``DELTA``; None where nothing is private.
    seed: Of initial adapters, batches and noise, the same for all methods.
    rate: Peak of the learning rate; a cosine takes it to a tenth.
    b1: Decay of the first moment.
    weight_decay: As AdamW has it.
    warm_up: Whether the first steps are smaller, by ``1 - b1^t``: no bias
      correction of the first moment.
    steps: Number of updates.
    batch: Expected batch size.
    layers: Number of top layers with adapters.
    is_tuning: Whether it is measured on tuning rows only.
  """

  task: str = ''
  method: str = ''
  epsilon: float | None = None
  seed: int = 0
  rate: float = 0.0
  b1: float = 0.9
  weight_decay: float = 0.1
  warm_up: bool = True
  steps: int = 24
  batch: int = 256
  layers: int = 1
  is_tuning: bool = False

  @property
  def static(self) -> 'Setting':
    """What decides on the program of a run."""
    return dataclasses.replace(
      self, rate=0.0, b1=0.9, weight_decay=0.0, warm_up=True,
      seed=0, is_tuning=False,
    )  # fmt: skip

  @property
  def numbers(self) -> dict[str, Any]:
    names = 'rate', 'b1', 'weight_decay', 'warm_up'
    return {name: np.float32(getattr(self, name)) for name in names}


# Fields that rows leave out where they have these values.
ALWAYS = ('task', 'method', 'epsilon', 'seed')
DEFAULTS = {
  k: v for k, v in dataclasses.asdict(Setting()).items() if k not in ALWAYS
}


@dataclasses.dataclass(frozen=True)
class Source:
  """The model's name, the folder of the data sets, that of a cache."""

  model: str
  data: pathlib.Path
  cache: pathlib.Path

  def problem(self, setting: Setting) -> language_problems.Problem:
    return language_problems.problem(
      setting.task, self.model, setting.layers, self.data, self.cache
    )


def optimizer(setting: Setting, numbers: private.Numbers) -> Any:
  """As `make_private` takes it, with numbers that may be traced."""
  cosine = optax.cosine_decay_schedule(1.0, setting.steps, alpha=0.1)
  b1, warm_up = numbers['b1'], numbers['warm_up']
  decay = numbers['weight_decay']
  is_prism = setting.method == 'prism'

  def rate(count):
    # Warm-up or not is a factor of the first moment, and so of the rate: one
    # program for both. AdamW corrects its moment by default, PRISM does not.
    correction = 1 - b1 ** (count + 1)
    factor = jnp.where(warm_up, correction, 1.0)
    if is_prism:
      factor = factor / correction
    return numbers['rate'] * cosine(count) * factor

  if is_prism:
    return methods.prism(rate, b1=b1, weight_decay=decay)
  return optax.adamw(rate, b1=b1, weight_decay=decay)


def losses_of(given: language_problems.Problem) -> Callable[..., Any]:
  """``losses(params, frozen, inputs, labels)``, see ``language_layers``."""
  losses = language_layers.row_losses(
    given.model.graphdef, given.task.response_length
  )
  return lambda params, frozen, *rows: losses(
    params, frozen, data.Examples(*rows)
  )


def training_of(
  setting: Setting,
  source: Source,
  numbers: private.Numbers,
  key: Any,
  noise_multiplier: float | None = None,
) -> training.PrivateTraining:
  """The private training; without a noise multiplier it is calibrated."""
  given = source.problem(setting)
  losses = losses_of(given)

  def loss(params, frozen, inputs, labels):
    # The sum over a response's tokens: what others say divides it by nothing.
    return losses(params, frozen, inputs[None], labels[None])[0].sum()

  rows = len(given.private.labels)
  noise = {'noise_multiplier': noise_multiplier}
  if noise_multiplier is None:
    noise = {'target_epsilon': setting.epsilon}
  return training.make_private(
    loss,
    given.model.params,
    optimizer=optimizer(setting, numbers),
    l2_clip_norm=NO_CLIP if setting.epsilon is None else CLIP,
    expected_batch_size=min(setting.batch, rows),
    dataset_size=rows,
    steps=setting.steps,
    delta=DELTA,
    # These rows are public: how long a step takes may tell what was drawn.
    execution=training.Execution(microbatch_size=MICROBATCH, skip_padding=True),
    prng_key=key,
    **noise,
  )


@functools.lru_cache(maxsize=8)
def program(setting: Setting, source: Source, sigma: float) -> private.Program:
  """The program of runs with this :attr:`Setting.static`."""
  return private.Program(
    lambda numbers, key: training_of(setting, source, numbers, key, sigma)
  )


@functools.lru_cache(maxsize=64)
def noise_multiplier(setting: Setting, source: Source) -> float:
  """Of a :attr:`Setting.static`."""
  return training_of(setting, source, setting.numbers, 0).noise_multiplier


def execute(
  setting: Setting, source: Source, *, smoke: bool = False
) -> dict[str, Any]:
  """Trains and measures.

  Returns:
    ``'tuning perplexity'``; unless it is a tuning run, of each row of the table
    ``'losses'`` (nats, summed over the response, hexadecimal float16),
    ``'exact'`` (``'0'`` or ``'1'``) and ``'tokens'`` of all rows.
  """
  given = source.problem(setting)
  losses_of_rows = jax.jit(losses_of(given))
  frozen = given.model.frozen
  sigma = 0.0
  if setting.epsilon is not None:
    sigma = 1.0 if smoke else noise_multiplier(setting.static, source)
  params = language_layers.start(given.model.params, setting.seed)
  if setting.method == 'prism':
    params = lora.canonicalize(params)

  def score(params, examples):
    found = []
    for begin in range(0, len(examples.labels), CHUNK):
      rows = np.arange(begin, min(begin + CHUNK, len(examples.labels)))
      part = [x[np.resize(rows, CHUNK)] for x in examples]
      losses, hits, weights = map(
        np.asarray, losses_of_rows(params, frozen, *part)
      )
      each = losses.sum(-1), (hits | ~weights).all(-1), weights.sum(-1)
      found.append([x[: len(rows)] for x in each])
      if smoke:
        break
    return [np.concatenate(x) for x in zip(*found, strict=True)]

  if setting.method != 'zero-shot':
    run, numbers = program(setting.static, source, sigma), setting.numbers
    batches = run.batches(params, tuple(given.private), numbers, setting.seed)
    params, _ = run.train(params, frozen, batches, numbers, setting.seed)
  losses, _, tokens = score(params, given.tuning)
  result = {
    'noise multiplier': sigma,
    'private rows': len(given.private.labels),
    'tuning perplexity': float(np.exp(losses.sum() / tokens.sum())),
  }
  if setting.is_tuning:
    return result
  losses, exact, tokens = score(params, given.table)
  if given.task.new_tokens and not smoke:
    found = language_layers.written(
      given.model, params, given.task, given.rows.table
    )
    exact = [
      given.task.is_right(answer, row)
      for answer, row in zip(found, given.rows.table, strict=True)
    ]
  return result | {
    'losses': losses.astype(np.float16).tobytes().hex(),
    'exact': ''.join(str(int(x)) for x in exact),
    'tokens': int(tokens.sum()),
  }
