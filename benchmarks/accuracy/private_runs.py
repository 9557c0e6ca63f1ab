"""One private fine-tuning run: from a description to the rows it gets right."""

import dataclasses
import functools
import pathlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import jax_privacy
import numpy as np
import optax
from finetuning import sampling
from jax_privacy.matrix_factorization import toeplitz

from benchmarks.accuracy import problems, starting_points
from benchmarks.accuracy.run_settings import Run
from benchmarks.common import methods
from prism_optax import accounting, lora

DELTA = 1e-5
MICROBATCH = 32
# The loss on the first `problems.CHUNK` tuning rows is noted every so often.
CURVE_STEPS = 10


@functools.lru_cache
def noise_multiplier(
  epsilon: float, rows: int, batch: int, steps: int, correlated: bool
) -> float:
  """Sigma of Poisson batches, or of correlated noise over a fixed order.

  Batches are cut six deviations above their expectation, which moves epsilon
  by less than 1e-3. Correlated noise has no amplification by sampling.
  """
  if not correlated:
    return float(
      accounting.calibrate_noise_multiplier(epsilon, DELTA, batch / rows, steps)
    )
  epoch = rows // batch
  strategy = toeplitz.materialize_lower_triangular(
    methods.strategy_coefficients(steps, epoch)
  )
  return float(
    accounting.calibrate_matrix_mechanism(
      epsilon,
      DELTA,
      np.asarray(strategy),
      max_participations=-(-steps // epoch),
      min_separation=epoch,
    )
  )


@functools.lru_cache(maxsize=8)
def programs(
  row_losses: Callable,
  method_name: str,
  options: tuple[tuple[str, Any], ...],
  structure: tuple,
  scale: float,
  temperature: float | None,
  batch: int,
  private: bool,
  steps: int,
  epoch: int,
  stddev: float | None,
):
  """``(init, step, scores)``, compiled once for runs that differ in numbers.

  ``structure`` says what else decides on shapes. ``stddev`` is None where it
  may be traced.
  """
  del structure
  method = methods.METHODS[method_name]
  if options:
    method = methods.on_manifold(methods.prism_with, **dict(options))
  layout = lora.Layout(scale=scale)
  numbers = {'scale': scale}
  if temperature is not None:
    numbers['temperature'] = temperature

  def release_of(clip, traced, key):
    used = traced if stddev is None else stddev
    return methods.Release(clip, batch, used, key, steps, epoch)

  def loss(params, frozen, *rows):
    return jnp.mean(row_losses(params, frozen, *rows, **numbers)[0])

  def step(carry, rate, clip, traced, frozen, rows, is_padding):
    params, state, key = carry
    release = release_of(clip, traced, key)
    gradient = jax_privacy.clipped_grad(
      loss,
      l2_clip_norm=clip if private else jnp.inf,
      normalize_by=batch,
      batch_argnums=tuple(range(2, 2 + len(rows))),
      pre_clipping_transform=method.coordinates(params, release, layout),
      microbatch_size=MICROBATCH,
    )
    mean = gradient(params, frozen, *rows, is_padding_example=is_padding)
    tx = method.make(rate, release, params, layout)
    updates, state = tx.update(mean, state, params)
    # What is trained on is public: a norm of private gradients would not be.
    signal = optax.tree.norm(mean)
    return (optax.apply_updates(params, updates), state, key), signal

  def init(params, clip, traced, key):
    release = release_of(clip, traced, key)
    return method.make(1.0, release, params, layout).init(params)

  @jax.jit
  def scores(params, frozen, rows):
    return row_losses(params, frozen, *rows, **numbers)

  return init, jax.jit(step, donate_argnums=0), scores


def batches(run: Run, rows: int, correlated: bool) -> Iterator[np.ndarray]:
  """Rows of each step, -1 for padding; one shape for all steps."""
  size = sampling.padded_size(run.batch, rows, MICROBATCH)
  if correlated:
    # Each row once an epoch, in the same order in all of them.
    epoch = rows // run.batch
    order = np.random.default_rng(run.seed).permutation(rows)
    for t in range(run.steps):
      first = (t % epoch) * run.batch
      drawn = np.full(size, -1)
      drawn[: run.batch] = order[first : first + run.batch]
      yield drawn
    return
  seed = np.random.SeedSequence(run.seed).generate_state(4)
  for t in range(run.steps):
    yield sampling.draw(
      seed,
      t,
      dataset_size=rows,
      sampling_probability=run.batch / rows,
      size=size,
    )


def train(
  run: Run,
  given: problems.Problem,
  sigma: float,
  each: Callable = lambda *_: None,
):
  """Runs the steps of a run.

  Args:
    run: Its ``epsilon`` only says whether there is a clip.
    given: Rows and model.
    sigma: Noise multiplier.
    each: Called as ``each(t, params, frozen, signal)`` after step t.

  Returns:
    ``((params, state, key), frozen, release)``.
  """
  method = methods.METHODS[run.method]
  rows = run.rows or len(given.train[0])
  stddev = sigma * run.clip / run.batch
  params, frozen = starting_points.start(run, given)
  init, step, _ = programs_of(run, given, stddev)
  key = jax.random.fold_in(jax.random.key(run.seed), 1)
  carry = params, init(params, run.clip, stddev, key), key
  carry = jax.tree.map(jnp.copy, carry)
  for t, drawn in enumerate(batches(run, rows, method.correlated)):
    drawn = sampling.padding_last(drawn, MICROBATCH)
    batch = problems.take(given.train, np.maximum(drawn, 0))
    rate = run.rate * (1 - t / run.steps)
    carry, signal = step(
      carry, rate, run.clip, stddev, frozen, batch, drawn < 0
    )
    each(t, carry[0], frozen, float(signal))
  release = methods.Release(run.clip, run.batch, stddev, key, run.steps)
  return carry, frozen, release


def programs_of(run: Run, given: problems.Problem, stddev: float):
  """:func:`programs` for a run."""
  rows = run.rows or len(given.train[0])
  structure = run.head, run.rank, run.task, run.length, run.top_layers, rows
  correlated = methods.METHODS[run.method].correlated
  return programs(
    given.row_losses, run.method, run.options, structure, run.scale,
    run.temperature if given.classes else None, run.batch,
    run.epsilon is not None, run.steps,
    rows // run.batch, stddev if correlated else None,
  )  # fmt: skip


def execute(run: Run, folder: pathlib.Path, cache: pathlib.Path) -> dict:
  """Trains and evaluates.

  Returns:
    A dict for a file of JSON: ``'tuning accuracy'``, ``'test accuracy'``,
    ``'test scores'`` (one for each row, as hexadecimal float16), losses on
    tuning rows, the norm of the clipped mean at each step (the data are public)
    and of the noise.
  """
  began = time.perf_counter()
  method = methods.METHODS[run.method]
  given = problems.problem(
    run.task,
    run.length,
    run.top_layers,
    method.parameters == 'head',
    folder,
    cache,
    run.public_test,
  )
  sigma = 0.0
  if run.epsilon is not None:
    rows = run.rows or len(given.train[0])
    sigma = noise_multiplier(
      run.epsilon, rows, run.batch, run.steps, method.correlated
    )
  stddev = sigma * run.clip / run.batch
  *_, scores = programs_of(run, given, stddev)
  signals, curve = [], []
  few = problems.take(
    given.tuning, np.arange(min(problems.CHUNK, len(given.tuning[0])))
  )

  def note(t, params, frozen, signal):
    signals.append(float(f'{signal:.4g}'))
    if (t + 1) % CURVE_STEPS == 0:
      curve.append(float(scores(params, frozen, few)[0].mean()))

  (params, *_), frozen, _ = train(run, given, sigma, note)

  def score(part):
    found = [scores(params, frozen, x)[1] for x in problems.chunks_of(part)]
    return np.concatenate([np.asarray(x) for x in found])

  # The rows that decide on a learning rate are not the rows that are reported.
  on_tuning, on_test = score(given.tuning), score(given.test)
  return {
    'run': dataclasses.asdict(run),
    'noise multiplier': sigma,
    'tuning accuracy': float(on_tuning.mean()),
    'test accuracy': float(on_test.mean()),
    'test scores': on_test.astype(np.float16).tobytes().hex(),
    'tuning loss': curve,
    'signal': signals,
    'noise': stddev * sum(x.size for x in jax.tree.leaves(params)) ** 0.5,
    'seconds': time.perf_counter() - began,
  }
