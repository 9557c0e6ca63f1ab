"""One private fine-tuning run: from a description to the rows it gets right."""

import dataclasses
import functools
import hashlib
import json
import pathlib
import time
from typing import Any

import jax
import jax.numpy as jnp
import jax_privacy
import numpy as np
import optax
from finetuning import sampling

from benchmarks import baselines, encoded_text
from prism_optax import accounting, lora

DELTA = 1e-5
# Rows of the training file that are set aside, the same for every run.
TEST_ROWS, TUNING_ROWS = 6000, 3000
CHUNK = 500
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
    task: Key of ``TASKS``.
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
    temperature: Of the logits.
    top_layers: So many layers carry adapters.
    length: Tokens of a row.
    options: More arguments of ``prism``, as sorted pairs.
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

  @property
  def name(self) -> str:
    text = json.dumps(dataclasses.asdict(self), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


TASKS = {
  # File, column of the label, label that is left out.
  'sst2': ('sst2/train.jsonl', 'label', None),
  'clinc150': ('clinc150/train.jsonl', 'domain', 'oos'),
  'banking77': ('banking77/train.jsonl', 'label', None),
}


@functools.lru_cache(maxsize=1)
def data(task, length, top_layers, folder, cache):
  """``(train, tuning, test, classes)``, split by a fixed shuffle."""
  file, column, unwanted = TASKS[task]
  texts, labels, names = encoded_text.read(folder / file, column, unwanted)
  rows = encoded_text.encode(
    texts, labels, length=length, top_layers=top_layers, cache=cache
  )
  order = np.random.default_rng(0).permutation(len(labels))
  test = min(TEST_ROWS, len(order) // 5)
  tuning = min(TUNING_ROWS, len(order) // 10)
  parts = np.split(order, [test, test + tuning])
  return (
    rows.take(parts[2]),
    rows.take(parts[1]),
    rows.take(parts[0]),
    len(names),
  )


@functools.lru_cache
def noise_multiplier(epsilon, probability, steps, limit, rows):
  """Sigma of DP-SGD with Poisson batches cut at ``limit`` rows."""
  del limit, rows  # Six deviations above the expectation: sampling.py.
  return accounting.calibrate_noise_multiplier(
    epsilon, DELTA, probability, steps
  )


def start(run: Run, classes: int) -> tuple[Any, Any]:
  """``(params, frozen)`` before training, from the seed."""
  method = baselines.METHODS[run.method]
  layers = encoded_text.frozen_layers(run.top_layers)
  keys = jax.random.split(jax.random.key(run.seed), 3)
  hidden = layers[0]['query']['kernel'].shape[0]
  head = {
    'kernel': jax.nn.initializers.orthogonal()(keys[0], (hidden, classes)),
    'bias': jnp.zeros(classes),
  }
  layout = lora.Layout(scale=run.scale)
  kernels = [
    {
      name: {'kernel': x['kernel']}
      for name, x in layer.items()
      if 'kernel' in x
    }
    for layer in layers
  ]
  adapters = [{} for _ in layers]
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
        {
          name: {**x, **modules.get(name, {})} for name, x in layer.items()
        } for layer, modules in zip(layers, kernels, strict=True)
      ]  # fmt: skip
    elif run.initialization == 'balanced':
      adapters = lora.initialize(
        adapters, keys[2], method='balanced', size=0.1, layout=layout
      )
    adapters = in_gauge(adapters, run.gauge, keys[2])
  params = {'layers': adapters}
  if run.head == 'trained' or method.parameters == 'head':
    params['head'] = head
  return method.prepare(params, layout), {'layers': layers, 'head': head}


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


@functools.lru_cache
def programs(
  method_name, head, scale, temperature, batch, microbatch, private, options
):
  """``(init, step, evaluate)``, compiled once for runs that differ in numbers."""
  del head  # Part of the key only: it changes the structure of the tree.
  method = baselines.METHODS[method_name]
  if options:
    method = baselines.prism_with(**dict(options))
  layout = lora.Layout(scale=scale)

  def loss(params, frozen, tokens, lengths, labels):
    out = encoded_text.logits(
      params, frozen, tokens, lengths, scale, temperature
    )
    return jnp.mean(
      optax.softmax_cross_entropy_with_integer_labels(out, labels)
    )

  def step(carry, rate, clip, stddev, frozen, rows, is_padding):
    params, state, key = carry
    release = baselines.Release(clip, batch, stddev, key)
    gradient = jax_privacy.clipped_grad(
      loss,
      l2_clip_norm=clip if private else jnp.inf,
      normalize_by=batch,
      batch_argnums=(2, 3, 4),
      pre_clipping_transform=method.coordinates(params, release, layout),
      microbatch_size=microbatch,
    )
    mean = gradient(params, frozen, *rows, is_padding_example=is_padding)
    tx = method.make(rate, release, params, layout)
    updates, state = tx.update(mean, state, params)
    # What is trained on is public: a norm of private gradients would not be.
    signal = optax.tree.norm(mean)
    return (optax.apply_updates(params, updates), state, key), signal

  def init(params, clip, stddev, key):
    release = baselines.Release(clip, batch, stddev, key)
    return method.make(1.0, release, params, layout).init(params)

  @jax.jit
  def evaluate(params, frozen, rows):
    tokens, lengths, labels = rows
    out = encoded_text.logits(
      params, frozen, tokens, lengths, scale, temperature
    )
    losses = optax.softmax_cross_entropy_with_integer_labels(out, labels)
    return losses, jnp.argmax(out, -1) == labels

  return init, jax.jit(step, donate_argnums=0), evaluate


@functools.lru_cache(maxsize=1)
def data_of_probe(task, length, top_layers, folder, cache):
  """:func:`data` with sentence vectors of the frozen model for tokens."""
  frozen = encoded_text.frozen_layers(top_layers)
  nothing = [{} for _ in frozen]
  program = jax.jit(lambda x: encoded_text.features(nothing, frozen, *x[:2]))
  *parts, classes = data(task, length, top_layers, folder, cache)
  out = []
  for part in parts:
    vectors = [np.asarray(program(tuple(x))) for x in chunks_of(part)]
    out.append(part._replace(tokens=np.concatenate(vectors)))
  return *out, classes


def chunks_of(part: encoded_text.Texts) -> list[encoded_text.Texts]:
  """Nearly equal parts of about ``CHUNK`` rows."""
  count = max(1, len(part.labels) // CHUNK)
  rows = np.arange(len(part.labels))
  return [part.take(chunk) for chunk in np.array_split(rows, count)]


def execute(run: Run, folder: pathlib.Path, cache: pathlib.Path) -> dict:
  """Trains and evaluates.

  Returns:
    ``{'tuning': accuracy, 'test': packed bits in hexadecimal, ...}``.
  """
  began = time.perf_counter()
  probing = baselines.METHODS[run.method].parameters == 'head'
  train, tuning, test, classes = (data_of_probe if probing else data)(
    run.task, run.length, run.top_layers, folder, cache
  )
  rows = run.rows or len(train.labels)
  private = run.epsilon is not None
  microbatch = 32
  size = sampling.padded_size(run.batch, rows, microbatch)
  probability = run.batch / rows
  sigma = (
    float(noise_multiplier(run.epsilon, probability, run.steps, size, rows))
    if private
    else 0.0
  )
  params, frozen = start(run, classes)
  init, step, evaluate = programs(
    run.method,
    run.head,
    run.scale,
    run.temperature,
    run.batch,
    microbatch,
    private,
    run.options,
  )
  stddev = sigma * run.clip / run.batch
  key = jax.random.fold_in(jax.random.key(run.seed), 1)
  carry = params, init(params, run.clip, stddev, key), key
  carry = jax.tree.map(jnp.copy, carry)
  seed = np.random.SeedSequence(run.seed).generate_state(4)
  signals, curve = [], []
  for t in range(run.steps):
    drawn = sampling.draw(
      seed, t, dataset_size=rows, sampling_probability=probability, size=size
    )
    drawn = sampling.padding_last(drawn, microbatch)
    batch = train.take(np.maximum(drawn, 0))
    rate = run.rate * (1 - t / run.steps)
    carry, signal = step(
      carry, rate, run.clip, stddev, frozen, tuple(batch), drawn < 0
    )
    signals.append(float(signal))
    if (t + 1) % CURVE_STEPS == 0:
      few = tuple(tuning.take(np.arange(CHUNK)))
      losses, _ = evaluate(carry[0], frozen, few)
      curve.append(float(losses.mean()))

  def hits(part):
    right = [
      evaluate(carry[0], frozen, tuple(rows))[1] for rows in chunks_of(part)
    ]
    return np.concatenate([np.asarray(each) for each in right])

  # The rows that decide on a learning rate are not the rows that are reported.
  on_tuning, on_test = hits(tuning), hits(test)
  released = jax.tree.leaves(carry[0])
  return {
    'run': dataclasses.asdict(run),
    'noise multiplier': sigma,
    'tuning accuracy': float(on_tuning.mean()),
    'test accuracy': float(on_test.mean()),
    'test hits': np.packbits(on_test).tobytes().hex(),
    'tuning loss': curve,
    'signal': [float(f'{x:.4g}') for x in signals],
    'noise': stddev * sum(x.size for x in released) ** 0.5,
    'test rows': len(test.labels),
    'seconds': time.perf_counter() - began,
  }
