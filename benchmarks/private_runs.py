"""One private fine-tuning run: from a description to the rows it gets right."""

import dataclasses
import functools
import hashlib
import json
import pathlib
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax_privacy
import numpy as np
import optax
from finetuning import sampling
from jax_privacy.matrix_factorization import toeplitz

from benchmarks import baselines, encoded_text, small_decoder
from prism_optax import accounting, lora

DELTA = 1e-5
# Rows of the training file that are set aside, the same for every run.
TEST_ROWS, TUNING_ROWS = 6000, 3000
CHUNK = 500
MICROBATCH = 32
# The loss on the first so many tuning rows is noted every so many steps.
CURVE_STEPS = 10


@dataclasses.dataclass(frozen=True)
class Run:
  """All that a result depends on.

  Attributes:
    method: Key of ``baselines.METHODS``.
    rate: Peak learning rate; it falls linearly to zero.
    epsilon: Of the run, at delta 1e-5; None trains without clip and noise.
    seed: Of initial factors, batches and noise.
    task: Key of ``TASKS``, or ``'maths'``: next tokens of gsm8k and mawps.
    rows: Size of the private set, the first of a fixed shuffle; 0 for all.
    steps: Updates.
    batch: Expected batch size.
    clip: C.
    rank: Of every adapter.
    initialization: ``'default'`` (A random, B zero), ``'spectral'`` (the
      largest singular directions, taken out of the frozen weights) or
      ``'balanced'`` (both random, small).
    scale: alpha / r of the model.
    gauge: Condition number of the gauge in which the start is written.
    head: ``'frozen'`` at random (a task that the adapters must solve; the
      linear probe's is trained), or ``'trained'`` beside the adapters.
    temperature: Of a classifier's logits.
    top_layers: So many layers carry adapters.
    length: Tokens of a row.
    options: More arguments of ``prism``, as sorted pairs.
    public_test: Whether the rows that are reported are the public validation
      split: to be looked at once, at the end.
  """

  method: str
  rate: float
  epsilon: float | None
  seed: int
  task: str = 'sst2'
  rows: int = 0
  steps: int = 120
  batch: int = 256
  clip: float = 1.0
  rank: int = 8
  initialization: str = 'default'
  scale: float = 1.0
  gauge: float = 1.0
  head: str = 'frozen'
  temperature: float = 10.0
  top_layers: int = 1
  length: int = 20
  options: tuple[tuple[str, Any], ...] = ()
  public_test: bool = False

  @property
  def name(self) -> str:
    fields = dataclasses.asdict(self)
    if not self.public_test:  # It came later: the names of files stay.
      del fields['public_test']
    text = json.dumps(fields, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


TASKS = {
  # File, column of the label, label that is left out.
  'sst2': ('sst2/train.jsonl', 'label', None),
  'clinc150': ('clinc150/train.jsonl', 'domain', 'oos'),
  'banking77': ('banking77/train.jsonl', 'label', None),
}
PUBLIC_TESTS = {'sst2': 'sst2/validation.jsonl'}


@dataclasses.dataclass(frozen=True)
class Problem:
  """Rows and model of a task.

  Attributes:
    train: Arrays with one row an example; so are the next two.
    tuning: Rows that decide on learning rates.
    test: Rows that are reported.
    frozen: All weights that are not trained; ``frozen['layers']`` is a list of
      layers with a ``kernel`` in each of ``encoded_text.MODULES``.
    row_losses: ``row_losses(params, frozen, *rows, scale=)``, loss and score of
      each row; a classifier's takes a ``temperature`` too.
    classes: Of a classifier; 0 for a decoder.
  """

  train: tuple[np.ndarray, ...]
  tuning: tuple[np.ndarray, ...]
  test: tuple[np.ndarray, ...]
  frozen: dict[str, Any]
  row_losses: Callable
  classes: int


def take(rows: tuple[np.ndarray, ...], which: np.ndarray):
  return tuple(x[which] for x in rows)


def split(rows: tuple[np.ndarray, ...]):
  """``(train, tuning, test)`` by a fixed shuffle."""
  order = np.random.default_rng(0).permutation(len(rows[0]))
  test = min(TEST_ROWS, len(order) // 5)
  tuning = min(TUNING_ROWS, len(order) // 10)
  parts = np.split(order, [test, test + tuning])
  return tuple(take(rows, parts[i]) for i in (2, 1, 0))


@functools.lru_cache(maxsize=2)
def problem(
  task, length, top_layers, probing, folder, cache, public_test=False
) -> Problem:
  """Reads the data, and computes what never changes, once."""
  if task == 'maths':
    frozen = small_decoder.pretrained(folder, cache, length)
    pairs = small_decoder.tokenizer(folder, cache)
    texts = small_decoder.private_texts(folder)
    rows = split((small_decoder.encode(pairs, texts, length),))
    return Problem(*rows, frozen, small_decoder.row_losses, 0)
  file, column, unwanted = TASKS[task]

  def encoded(file):
    texts, labels, names = encoded_text.read(folder / file, column, unwanted)
    rows = encoded_text.encode(
      texts, labels, length=length, top_layers=top_layers, cache=cache
    )
    return tuple(rows), names

  rows, names = encoded(file)
  rows = split(rows)
  if public_test:
    rows = (*rows[:2], encoded(PUBLIC_TESTS[task])[0])
  layers = encoded_text.frozen_layers(top_layers)
  if probing:
    nothing = [{} for _ in layers]
    program = jax.jit(lambda *x: encoded_text.features(nothing, layers, *x[:2]))
    rows = tuple(
      (np.concatenate([program(*x) for x in chunks_of(part)]), *part[1:])
      for part in rows
    )
  frozen = {'layers': layers}
  return Problem(*rows, frozen, encoded_text.row_losses, len(names))


def chunks_of(rows: tuple[np.ndarray, ...]) -> list[tuple[np.ndarray, ...]]:
  """Nearly equal parts of about ``CHUNK`` rows."""
  count = max(1, len(rows[0]) // CHUNK)
  parts = np.array_split(np.arange(len(rows[0])), count)
  return [take(rows, part) for part in parts]


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
    baselines.strategy(steps, epoch)
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


def start(run: Run, given: Problem) -> tuple[Any, Any]:
  """``(params, frozen)`` before training, from the seed."""
  method = baselines.METHODS[run.method]
  layers = given.frozen['layers']
  keys = jax.random.split(jax.random.key(run.seed), 3)
  layout = lora.Layout(scale=run.scale)
  kernels = [
    {name: {'kernel': layer[name]['kernel']} for name in encoded_text.MODULES}
    for layer in layers
  ]
  adapters: list[dict] = [{} for _ in layers]
  if method.parameters == 'matrices':
    adapters = kernels
  elif method.parameters == 'lora':
    for layer, modules in enumerate(kernels):
      for i, (name, x) in enumerate(sorted(modules.items())):
        rows, columns = x['kernel'].shape
        key = jax.random.fold_in(keys[1], 100 * layer + i)
        a = jax.random.normal(key, (rows, run.rank)) * rows**-0.5
        adapters[layer][name] = {
          'lora_a': a, 'lora_b': jnp.zeros((run.rank, columns))
        }  # fmt: skip
    if run.initialization == 'spectral':
      adapters, kernels = lora.spectral_residual(
        adapters, kernels, keys[2], layout=layout
      )
      layers = [
        {name: {**x, **modules.get(name, {})} for name, x in layer.items()}
        for layer, modules in zip(layers, kernels, strict=True)
      ]
    elif run.initialization == 'balanced':
      adapters = lora.initialize(
        adapters, keys[2], method='balanced', size=0.1, layout=layout
      )
    adapters = in_gauge(adapters, run.gauge, keys[2])
  params, frozen = {'layers': adapters}, {**given.frozen, 'layers': layers}
  if given.classes:
    hidden = layers[0]['query']['kernel'].shape[0]
    orthogonal = jax.nn.initializers.orthogonal()
    frozen['head'] = {
      'kernel': orthogonal(keys[0], (hidden, given.classes)),
      'bias': jnp.zeros(given.classes),
    }
    if run.head == 'trained' or method.parameters == 'head':
      params['head'] = frozen['head']
  return method.prepare(params, layout), frozen


def in_gauge(adapters, condition, key):
  """The same Z from factors A K, K^-1 B, with K of this condition number."""
  if condition == 1:
    return adapters
  out = []
  for layer in adapters:
    turned = {}
    for i, (name, pair) in enumerate(sorted(layer.items())):
      rank = pair['lora_a'].shape[1]
      basis = jax.random.normal(jax.random.fold_in(key, i), (rank, rank))
      basis = np.linalg.qr(basis)[0]
      size = np.geomspace(condition**-0.5, condition**0.5, rank)
      turned[name] = {
        'lora_a': pair['lora_a'] @ (basis * size) @ basis.T,
        'lora_b': (basis / size) @ basis.T @ pair['lora_b'],
      }
    out.append(turned)
  return out


@functools.lru_cache(maxsize=8)
def programs(
  row_losses, method_name, options, structure, scale, temperature, batch,
  private, steps, epoch, stddev,
):  # fmt: skip
  """``(init, step, scores)``, compiled once for runs that differ in numbers.

  ``structure`` says what else decides on shapes. ``stddev`` is None where it
  may be traced.
  """
  del structure
  method = baselines.METHODS[method_name]
  if options:
    method = baselines.prism_with(**dict(options))
  layout = lora.Layout(scale=scale)
  numbers = {'scale': scale}
  if temperature is not None:
    numbers['temperature'] = temperature

  def release_of(clip, traced, key):
    used = traced if stddev is None else stddev
    return baselines.Release(clip, batch, used, key, steps, epoch)

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


def batches(run: Run, rows: int, correlated: bool):
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
  run: Run, given: Problem, sigma: float, each: Callable = lambda *_: None
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
  method = baselines.METHODS[run.method]
  rows = run.rows or len(given.train[0])
  stddev = sigma * run.clip / run.batch
  params, frozen = start(run, given)
  init, step, _ = programs_of(run, given, stddev)
  key = jax.random.fold_in(jax.random.key(run.seed), 1)
  carry = params, init(params, run.clip, stddev, key), key
  carry = jax.tree.map(jnp.copy, carry)
  for t, drawn in enumerate(batches(run, rows, method.correlated)):
    drawn = sampling.padding_last(drawn, MICROBATCH)
    batch = take(given.train, np.maximum(drawn, 0))
    rate = run.rate * (1 - t / run.steps)
    carry, signal = step(
      carry, rate, run.clip, stddev, frozen, batch, drawn < 0
    )
    each(t, carry[0], frozen, float(signal))
  release = baselines.Release(run.clip, run.batch, stddev, key, run.steps)
  return carry, frozen, release


def programs_of(run: Run, given: Problem, stddev: float):
  """:func:`programs` for a run."""
  rows = run.rows or len(given.train[0])
  structure = run.head, run.rank, run.task, run.length, run.top_layers, rows
  correlated = baselines.METHODS[run.method].correlated
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
  method = baselines.METHODS[run.method]
  given = problem(
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
  few = take(given.tuning, np.arange(min(CHUNK, len(given.tuning[0]))))

  def note(t, params, frozen, signal):
    signals.append(float(f'{signal:.4g}'))
    if (t + 1) % CURVE_STEPS == 0:
      curve.append(float(scores(params, frozen, few)[0].mean()))

  (params, *_), frozen, _ = train(run, given, sigma, note)

  def score(part):
    found = [scores(params, frozen, x)[1] for x in chunks_of(part)]
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
