"""One run of the language-model benchmark, by the step of the example."""

import dataclasses
import functools
import pathlib
import time
from typing import Any

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
import optax
from finetuning import methods, privacy, randomness, sampling, training

from benchmarks.accuracy import (
  language_layers,
  language_metric,
  language_problems,
  language_rows,
)
from benchmarks.common import methods as benchmark_methods
from prism_optax import accounting, contrib, lora

DELTA, CLIP, MICROBATCH, CHUNK = 1e-5, 1.0, 32, 32
PRIVATE = ('prism', 'dp-adamw')
METRIC, ROWS = 'metric', 'rows'
# Perplexity on tuning rows along the way, so often.
CURVE_POINTS = 3


@dataclasses.dataclass(frozen=True)
class Run:
  """All that a result depends on.

  Attributes:
    task: Key of ``language_rows.TASKS``.
    method: One of ``PRIVATE``, ``'adamw'`` (neither clip nor noise) or
      ``'zero-shot'`` (no step at all). Behind a private one may stand
      ``'+metric'`` (coordinates of a metric of the inputs that is released
      before, a part of epsilon) and behind ``'prism'`` ``'+rows'`` (rows are
      scaled by their moments).
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

  task: str
  method: str
  epsilon: float | None
  seed: int
  rate: float = 0.0
  b1: float = 0.9
  weight_decay: float = 0.1
  warm_up: bool = True
  steps: int = 24
  batch: int = 256
  layers: int = 1
  is_tuning: bool = False

  @property
  def parts(self) -> list[str]:
    """The optimizer, and what is added to it."""
    return self.method.split('+')


def plan_of(run: Run, rows: int) -> privacy.Plan:
  """The public constants of a run."""
  batch = min(run.batch, rows)
  return _plan(
    rows, batch, sampling.padded_size(batch, rows, MICROBATCH), run.steps,
    run.epsilon, METRIC in run.parts,
  )  # fmt: skip


@functools.lru_cache
def _plan(rows, batch, padded, steps, epsilon, has_metric) -> privacy.Plan:
  plan = privacy.Plan(rows, batch, padded, steps, 0.0, DELTA)
  if epsilon is None:
    return plan
  if not has_metric:
    return privacy.calibrate(plan, epsilon)
  noise_multiplier = accounting.calibrate_noise_multiplier(
    epsilon,
    DELTA,
    plan.sampling_probability,
    steps,
    prior_events=[
      dp_accounting.GaussianDpEvent(language_metric.NOISE_MULTIPLIER)
    ],
    neighboring_relation=privacy.RELATION,
    **plan.truncation,
  )
  return dataclasses.replace(plan, noise_multiplier=noise_multiplier)


def method_of(
  run: Run, knobs: dict[str, Any], params: Any, batch: int, key: jax.Array
) -> methods.Method:
  """The method with numbers that may be traced.

  Args:
    run: Its method and steps decide on the program.
    knobs: ``rate``, ``b1``, ``weight_decay``, ``warm_up`` and
      ``noise_multiplier``.
    params: The adapters.
    batch: The divisor.
    key: Of the noise; only what is made by ``init`` has it.
  """
  del params
  cosine = optax.cosine_decay_schedule(1.0, run.steps, alpha=0.1)
  b1, warm_up = knobs['b1'], knobs['warm_up']

  def rate(count):
    # Warm-up or not is a factor of the first moment, and so of the rate: one
    # program for both. AdamW corrects its moment by default, PRISM does not.
    correction = 1 - b1 ** (count + 1)
    if run.parts[0] == 'prism':
      factor = jnp.where(warm_up, 1.0, 1 / correction)
    else:
      factor = jnp.where(warm_up, correction, 1.0)
    return knobs['rate'] * cosine(count) * factor

  if run.parts[0] == 'prism':
    transform = benchmark_methods.prism_with(
      rate,
      l2_clip_norm=CLIP,
      noise_multiplier=knobs['noise_multiplier'],
      expected_batch_size=batch,
      prng_key=key,
      weight_decay=knobs['weight_decay'],
      scales_rows=ROWS in run.parts,
      b1=b1,
    )
    return methods.Method('prism', transform, prepare=lora.canonicalize)
  adamw = {'b1': b1, 'weight_decay': knobs['weight_decay']}
  if run.parts[0] in PRIVATE:
    transform = methods.dp_adamw(
      rate,
      l2_clip_norm=CLIP,
      noise_multiplier=knobs['noise_multiplier'],
      expected_batch_size=batch,
      prng_key=key,
      **adamw,
    )
  else:
    transform = methods.adamw(rate, expected_batch_size=batch, **adamw)
  return methods.Method(run.method, transform)


def adapters(params: Any, metric: contrib.InputMetric | None) -> Any:
  """Of the coordinates that are trained."""
  return params if metric is None else metric.to_params(params)


@functools.cache
def programs(static: Run, rows: int, model: str):
  """``(init, step, scores)``, compiled once for runs that differ in numbers."""
  loaded = language_problems.model_of(model, static.layers)
  task = language_rows.TASKS[static.task]
  batch = plan_of(static, rows).expected_batch_size
  of_adapters = language_layers.row_losses(
    loaded.graphdef, task.response_length
  )

  def losses_of(params, frozen, batch):
    frozen, metric = frozen
    return of_adapters(adapters(params, metric), frozen, batch)

  def loss(params, frozen, batch):
    losses, hits, _ = losses_of(params, frozen, batch)
    # The sum over a response's tokens: what others say divides it by nothing.
    return losses.sum(-1).mean(), hits.mean()

  def step(state, frozen, batch_, is_padding, knobs):
    method = method_of(static, knobs, state.params, batch, jax.random.key(0))
    return training.make_step(
      loaded.graphdef,
      method,
      microbatch_size=MICROBATCH,
      # These rows are public: how long a step takes may tell what was drawn.
      skip_padding=True,
      loss=loss,
    )(state, frozen, batch_, is_padding)[0]

  def scores(params, frozen, batch_):
    losses, hits, weights = losses_of(params, frozen, batch_)
    return losses.sum(-1), (hits | ~weights).all(-1), weights.sum(-1)

  def init(params, knobs, key):
    return training.init_state(
      params, method_of(static, knobs, params, batch, key)
    )

  return init, jax.jit(step, donate_argnums=0), jax.jit(scores)


def static_part(run: Run) -> Run:
  """What decides on the program of a run."""
  return dataclasses.replace(
    run, rate=0.0, b1=0.9, weight_decay=0.0, warm_up=True, seed=0,
    epsilon=None, is_tuning=False,
  )  # fmt: skip


def execute(
  run: Run, name: str, folder: pathlib.Path, cache: pathlib.Path
) -> dict[str, Any]:
  """Trains and measures.

  Returns:
    A dict for a file of JSON: ``'tuning perplexity'`` and ``'tuning exact'``
    at the end and along the way; unless it is a tuning run, of each row of
    the table ``'losses'`` (nats, summed over the response, hexadecimal
    float16), ``'exact'`` (``'0'`` or ``'1'``) and ``'tokens'`` of all rows.
  """
  began = time.perf_counter()
  given = language_problems.problem(run.task, name, run.layers, folder, cache)
  rows = len(given.private.labels)
  plan, static = plan_of(run, rows), static_part(run)
  init, step, scores = programs(static, rows, name)
  knobs = {
    'rate': run.rate,
    'b1': run.b1,
    'weight_decay': run.weight_decay,
    'warm_up': run.warm_up,
    'noise_multiplier': plan.noise_multiplier,
  }
  knobs = {name: np.float32(value) for name, value in knobs.items()}
  metric = None
  if METRIC in run.parts:
    metric = language_problems.input_metric(
      run.task, name, run.layers, folder, cache, run.seed
    )
  frozen = given.model.frozen, metric
  state = init(
    language_layers.start(given.model.params, run.seed),
    knobs,
    randomness.noise_key(run.seed),
  )

  def score(params, examples):
    found = []
    for begin in range(0, len(examples.labels), CHUNK):
      indices = np.full(CHUNK, -1)
      last = min(begin + CHUNK, len(examples.labels))
      indices[: last - begin] = np.arange(begin, last)
      batch, _ = sampling.gather(examples, indices)
      part = scores(params, frozen, batch)
      found.append([np.asarray(x)[: last - begin] for x in part])
    return [np.concatenate(x) for x in zip(*found, strict=True)]

  def tuning_scores(params):
    losses, exact, tokens = score(params, given.tuning)
    perplexity = float(np.exp(losses.sum() / tokens.sum()))
    return {'perplexity': perplexity, 'exact': float(exact.mean())}

  curve = []
  steps = 0 if run.method == 'zero-shot' else run.steps
  every = -(-run.steps // CURVE_POINTS)
  seed = randomness.sampling_seed(run.seed)
  for t in range(steps):
    indices = sampling.draw(
      seed,
      t,
      dataset_size=rows,
      sampling_probability=plan.sampling_probability,
      size=plan.padded_size,
    )
    indices = sampling.padding_last(indices, MICROBATCH)
    batch = sampling.gather(given.private, indices)
    state = step(state, frozen, *batch, knobs)
    # A tuning run is as short as can be.
    if (t + 1) % every == 0 and t + 1 < steps and not run.is_tuning:
      curve.append({'step': t + 1, **tuning_scores(state.params)})
  curve.append({'step': steps, **tuning_scores(state.params)})
  result = {
    'run': dataclasses.asdict(run),
    'noise multiplier': plan.noise_multiplier,
    'private rows': rows,
    'held steps': int(state.held),
    'tuning perplexity': curve[-1]['perplexity'],
    'tuning exact': curve[-1]['exact'],
    'curve': curve,
  }
  if not run.is_tuning:
    losses, exact, tokens = score(state.params, given.table)
    if given.task.new_tokens:
      found = language_layers.written(
        given.model,
        adapters(state.params, metric),
        given.task,
        given.rows.table,
      )
      exact = [
        given.task.is_right(answer, row)
        for answer, row in zip(found, given.rows.table, strict=True)
      ]
      result['answers'] = found[:5]
    result |= {
      'losses': losses.astype(np.float16).tobytes().hex(),
      'exact': ''.join(str(int(x)) for x in exact),
      'tokens': int(tokens.sum()),
    }
  return result | {'seconds': time.perf_counter() - began}
