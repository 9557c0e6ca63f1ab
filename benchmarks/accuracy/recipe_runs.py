"""From a recipe to the rows that it gets right.

The top layer of all-MiniLM-L6-v2 with adapters of rank 8 on all six matrices
and a head on normalised sentence vectors. The layers below never change: what
they compute is kept on disk (``encoded_text.py``).
"""

import dataclasses
import functools
import pathlib
import time
from typing import Any

import jax
import jax.numpy as jnp
import jax_privacy
import numpy as np

from benchmarks.accuracy import encoded_text, plain_layers, problems, recipes
from benchmarks.accuracy.recipes import Knobs, Recipe
from prism_optax import accounting, contrib
from prism_optax.contrib import heads

DELTA, RANK, MICROBATCH = 1e-5, 8, 64
TEMPERATURE = 10.0
LENGTH = {'sst2': 20, 'clinc150': 16, 'banking77': 20}
# Of the releases before training. A class of banking77 has some ninety rows,
# and its mean is all that says what it is; of SST-2 there are thousands.
HEAD_NOISE = {
  'means': {'sst2': 10.0, 'clinc150': 8.0, 'banking77': 3.0},
  'ridge': {'sst2': 5.0, 'clinc150': 3.0, 'banking77': 2.0},
}
HEADS = {'means': heads.class_means, 'ridge': heads.ridge}
METRIC_NOISE = 10.0
# Rows that choose (of the tuning part), and rows that are reported.
TUNING_ROWS, TEST_ROWS = 1500, 3000


@functools.cache
def given(
  task: str, probing: bool, data: pathlib.Path, cache: pathlib.Path
) -> problems.Problem:
  """Rows and frozen weights; rows are sentence vectors for a probe."""
  return problems.problem(task, LENGTH[task], 1, probing, data, cache)


def private_head(recipe: Recipe, data, cache) -> heads.LinearHead:
  problem = given(recipe.task, True, data, cache)
  vectors, _, labels = problem.train
  parts = np.array_split(np.arange(len(labels)), 1 + len(labels) // 2000)
  return HEADS[recipe.head](
    [(vectors[rows], labels[rows]) for rows in parts],
    num_classes=problem.classes,
    noise_multiplier=HEAD_NOISE[recipe.head][recipe.task],
    dataset_size=len(labels),
    prng_key=jax.random.fold_in(jax.random.key(recipe.seed), 3),
  )


@functools.lru_cache(maxsize=2)
def input_metric(
  task: str, form: str, seed: int, data, cache
) -> contrib.InputMetric:
  """Of what query, key and value read, and what the output matrix reads."""
  problem = given(task, False, data, cache)
  attention = plain_layers.layer(
    encoded_text.make_layer, problem.frozen['layers'][0], {}
  ).attention

  @jax.jit
  def inputs(tokens, lengths):
    mask = jnp.arange(tokens.shape[1]) < lengths[:, None]
    hidden = tokens.astype(jnp.float32)
    read = attention.mixed(hidden.reshape(-1, hidden.shape[-1]), mask)
    read = read.reshape(hidden.shape)
    shown = mask[..., None]
    return {
      '*/[qkv]*': jnp.where(shown, hidden, 0),
      '*/output': jnp.where(shown, read, 0),
    }

  return contrib.input_metric(
    (inputs(*part[:2]) for part in problems.chunks_of(problem.train)),
    noise_multiplier=METRIC_NOISE,
    dataset_size=len(problem.train[0]),
    form=form,
    prng_key=jax.random.fold_in(jax.random.key(seed), 2),
  )


@functools.cache
def noise_multiplier(
  epsilon: float, rows: int, batch: int, steps: int, events: tuple[Any, ...]
) -> float:
  """Of Poisson batches, beside what was released before.

  A batch is as large as it is drawn: nothing is cut.
  """
  return float(
    accounting.calibrate_noise_multiplier(
      epsilon, DELTA, batch / rows, steps, prior_events=events
    )
  )


@functools.lru_cache(maxsize=8)
def programs(
  row_losses: Any,
  method: str,
  batch: int,
  classes: int,
  metric_shapes: Any,
  scales_rows: bool,
):
  """``(gradient, init, update, scores)``, compiled once for all numbers."""
  del classes, metric_shapes

  def adapted(params, metric):
    if metric is None:
      return params
    return {**params, 'layers': metric.to_params(params['layers'])}

  def losses(params, frozen, metric, rows):
    return row_losses(
      adapted(params, metric), frozen, *rows,
      scale=1.0, temperature=TEMPERATURE,
    )  # fmt: skip

  def loss(params, frozen, metric, *rows):
    return jnp.mean(losses(params, frozen, metric, rows)[0])

  @jax.jit
  def gradient(params, frozen, metric, rows, is_padding, head_share, total):
    """Adds the clipped gradients of a micro-batch, over b."""
    clipped = jax_privacy.clipped_grad(
      loss,
      l2_clip_norm=1.0,
      normalize_by=batch,
      batch_argnums=tuple(range(3, 3 + len(rows))),
      pre_clipping_transform=recipes.coordinates(method, params, head_share),
    )
    more = clipped(params, frozen, metric, *rows, is_padding_example=is_padding)
    return jax.tree.map(jnp.add, total, more)

  @jax.jit
  def init(params, knobs, stddev, key):
    tx = recipes.optimizer(method, knobs, stddev, batch, key, scales_rows)
    return tx.init(params)

  @jax.jit
  def update(params, state, mean, knobs, stddev, key):
    tx = recipes.optimizer(method, knobs, stddev, batch, key, scales_rows)
    updates, state = tx.update(mean, state, params)
    return jax.tree.map(jnp.add, params, updates), state

  return gradient, init, update, jax.jit(losses)


def execute(
  recipe: Recipe, data: pathlib.Path, cache: pathlib.Path, report: bool
) -> dict[str, Any]:
  """Trains and evaluates.

  Args:
    recipe: What to do.
    data: Folder of the data sets.
    cache: Folder of what is computed once.
    report: Whether to score the rows of the table, or those that choose.

  Returns:
    For a file of JSON: ``'accuracy'``, with ``report`` ``'right'``, a row each
    as bits in hexadecimal; ``'noise multiplier'``, ``'rows'``, ``'seconds'``.
  """
  began = time.perf_counter()
  probing = recipe.method in recipes.ON_VECTORS
  problem = given(recipe.task, probing, data, cache)
  rows = len(problem.train[0])
  keys = jax.random.split(jax.random.key(recipe.seed), 4)
  before: list[Any] = []
  hidden = problem.frozen['layers'][0]['query']['kernel'].shape[0]
  kernel = jnp.zeros((hidden, problem.classes))
  if recipe.head != 'zero':
    before.append(private_head(recipe, data, cache))
    kernel = before[0].kernel
  metric = None
  if recipe.metric:
    metric = input_metric(recipe.task, recipe.metric, recipe.seed, data, cache)
    before.append(metric)
    # Without names, with which each seed would be a program of its own.
    metric = dataclasses.replace(metric, digest='', key_digest='')
  params: dict[str, Any] = {
    'head': {'kernel': kernel, 'bias': jnp.zeros(problem.classes)},
    'layers': [
      recipes.start(
        recipe,
        {
          name: problem.frozen['layers'][0][name]['kernel']
          for name in plain_layers.MODULES
        },
        RANK,
        keys[0],
      )
    ],
  }
  sigma, steps, method = 0.0, 0, 'linear probe'
  if recipe.method != 'head alone':
    events = tuple(x.event for x in before)
    sigma = noise_multiplier(
      recipe.epsilon, rows, recipe.batch, recipe.steps, events
    )
    steps, method = recipe.steps, recipe.method
  shapes = None if metric is None else str(jax.tree.map(jnp.shape, metric))
  gradient, init, update, losses = programs(
    problem.row_losses,
    method,
    recipe.batch,
    problem.classes,
    shapes,
    recipe.scales_rows,
  )
  frozen, stddev = problem.frozen, sigma / recipe.batch
  frozen = {**frozen, 'head': params['head']}
  knobs = Knobs(recipe.rate, recipe.b1, recipe.decay, recipe.head_rate)
  state = init(params, knobs, stddev, keys[1])
  zeros = jax.tree.map(jnp.zeros_like, params)
  mean, count = zeros, 0
  rng = np.random.default_rng(recipe.seed)
  for t in range(steps):
    drawn = np.flatnonzero(rng.random(rows) < recipe.batch / rows)
    padded = -(-len(drawn) // MICROBATCH) * MICROBATCH
    is_padding = np.arange(padded) >= len(drawn)
    drawn = np.pad(drawn, (0, padded - len(drawn)))
    total = zeros
    for i in range(0, padded, MICROBATCH):
      part = slice(i, i + MICROBATCH)
      total = gradient(
        params, frozen, metric, problems.take(problem.train, drawn[part]),
        is_padding[part], recipe.head_share, total,
      )  # fmt: skip
    now = knobs._replace(rate=recipe.rate * (1 - t / steps))
    params, state = update(params, state, total, now, stddev, keys[1])
    if recipe.average and t >= steps // 2:
      mean, count = jax.tree.map(jnp.add, mean, params), count + 1
  if count:
    params = jax.tree.map(lambda x: x / count, mean)

  part, most = problem.tuning, TUNING_ROWS
  if report:
    part, most = problem.test, TEST_ROWS
  few = problems.take(part, np.arange(min(most, len(part[0]))))
  right = np.concatenate(
    [
      np.asarray(losses(params, frozen, metric, x)[1])
      for x in problems.chunks_of(few)
    ]
  )
  result = {
    'recipe': dataclasses.asdict(recipe),
    'noise multiplier': sigma,
    'accuracy': float(right.mean()),
    'rows': len(right),
    'seconds': round(time.perf_counter() - began, 1),
  }
  if report:
    result['right'] = np.packbits(right > 0.5).tobytes().hex()
  return result
