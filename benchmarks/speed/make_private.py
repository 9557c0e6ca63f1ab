"""Time and memory of a step of ``make_private``, beside one written by hand.

    python benchmarks/speed/make_private.py [--runs 20] [--only digits]

By hand: per-example gradients by vmap, or from one backward pass, into
``prism`` with its own clip, and ``apply_updates``, in one jitted step whose
buffers are donated. ``make_private`` with the same sizes does the same behind
``step``, which also looks at the state and the batch. Both on the digits
network and on MiniLM (weights of all-MiniLM-L6-v2 where its package is
installed, otherwise random ones in the same shapes), in turn, medians, ratios
within a round. Then the temporary memory of a step by the size of its
micro-batches, as the compiler plans it. Results go to
``benchmarks/results/make_private_<platform>.json``; ``--only`` renews one part.
"""

import argparse
import dataclasses
import functools
import json
import os
import pathlib
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

ROOT = pathlib.Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / 'examples')]

import prism_optax  # noqa: E402
from benchmarks.accuracy import digits_network  # noqa: E402
from benchmarks.common import results, timing  # noqa: E402
from benchmarks.speed import step_time  # noqa: E402
from prism_optax import lora, training  # noqa: E402

ROUTES = {'vmap': False, 'one backward': True}
MICROBATCHES = (8, 16, 32, None)
optimizer = functools.partial(prism_optax.prism, 1e-3)


class Problem(NamedTuple):
  """A model and its data.

  Attributes:
    loss: ``loss(params, frozen, x, y)`` of one example.
    losses: The same of a batch and copies of the parameters.
    params: The adapters.
    frozen: All other weights.
    data: ``(x, y)``, with one row an example.
    rows: Of a padded batch.
  """

  loss: Callable
  losses: Callable
  params: Any
  frozen: Any
  data: tuple[np.ndarray, ...]
  rows: int


def digits(rows: int = 128) -> Problem:
  """Two layers of 64 and 10 outputs with adapters of rank 4."""
  keys = jax.random.split(jax.random.key(0), 4)
  frozen = {
    'first': jax.random.normal(keys[0], (64, digits_network.HIDDEN)) / 8,
    'last': jax.random.normal(keys[1], (digits_network.HIDDEN, 10)) / 8,
  }
  params = {
    name: {
      'lora_a': jax.random.normal(keys[2], (w.shape[0], 4)) / 8,
      'lora_b': jnp.zeros((4, w.shape[1])),
    }
    for name, w in frozen.items()
  }
  _, private, _ = digits_network.pictures()

  def losses(params, frozen, x, y):
    def dense(name, x):
      pair = params[name]
      inner = jnp.einsum('bi,bir->br', x, pair['lora_a'])
      return x @ frozen[name] + jnp.einsum('br,bro->bo', inner, pair['lora_b'])

    logits = dense('last', jax.nn.relu(dense('first', x)))
    return optax.softmax_cross_entropy_with_integer_labels(logits, y)

  return Problem(
    digits_network.loss, losses, params, frozen, tuple(private), rows
  )


def minilm(rows: int = 32, length: int = 48) -> Problem:
  """Six layers of width 384, adapters of rank 8 on all dense ones."""
  graph, params, frozen, _ = step_time.model(8)

  def losses(params, frozen, x, y):
    logits = nnx.merge(graph, params, frozen)(x)
    return optax.softmax_cross_entropy_with_integer_labels(logits, y)

  def loss(params, frozen, x, y):
    return losses(params, frozen, x[None], y[None])[0]

  rng = np.random.default_rng(0)
  data = rng.integers(1000, 30000, (1000, length)), rng.integers(0, 2, 1000)
  return Problem(loss, losses, lora.canonicalize(params), frozen, data, rows)


def private(
  problem: Problem, batched: bool, microbatch: int | None, steps: int
) -> training.PrivateTraining:
  return training.make_private(
    problem.losses if batched else problem.loss,
    problem.params,
    optimizer=optimizer,
    l2_clip_norm=1.0,
    noise_multiplier=1.0,
    expected_batch_size=problem.rows * 3 // 4,
    dataset_size=len(problem.data[0]),
    execution=training.Execution(microbatch, problem.rows),
    batched_loss=batched,
    steps=steps,
    delta=1e-5,
    prng_key=0,
  )


class PrivateStep:
  """``PrivateTraining.step`` again and again, on one batch.

  Args:
    problem: Model and data.
    batched: Whether the gradients come from one backward pass.
    steps: How often it will be called at most.
  """

  def __init__(self, problem: Problem, batched: bool, steps: int):
    self.training = private(problem, batched, None, steps)
    self.state = self.training.init(problem.params)
    self._drawn = self.training.batches(self.state, problem.data)
    self.batch = next(iter(self._drawn))
    self._frozen = problem.frozen

  def __call__(self) -> None:
    # Drawing is timed by itself.
    batch = dataclasses.replace(self.batch, step=int(self.state.step))
    self.state = self.training.step(self.state, batch, self._frozen)
    jax.block_until_ready(self.state.params)

  def draw(self) -> None:
    jax.block_until_ready(self._drawn.draw(0).examples)


def by_hand(problem: Problem, batched: bool, batch: training.Batch):
  """What a user would write, on a batch that is already there."""
  tx = optimizer(
    l2_clip_norm=1.0, noise_multiplier=1.0,
    expected_batch_size=problem.rows * 3 // 4, prng_key=0,
  )  # fmt: skip

  def gradients(params, frozen, x, y):
    if batched:
      return lora.per_example_gradients(
        lambda copies, rows: problem.losses(copies, frozen, *rows)
      )(params, (x, y))
    return jax.vmap(jax.grad(problem.loss), (None, None, 0, 0))(
      params, frozen, x, y
    )

  def step(carried, fixed):
    params, state = carried
    frozen, examples, is_padding = fixed
    updates, state = tx.update(
      gradients(params, frozen, *examples), state, params,
      is_padding_example=is_padding,
    )  # fmt: skip
    return optax.apply_updates(params, updates), state

  return timing.Step(
    step,
    (problem.params, tx.init(problem.params)),
    (problem.frozen, batch.examples, batch.is_padding_example),
  )


def measure_time(problem: Problem, runs: int) -> dict[str, dict[str, float]]:
  """Milliseconds of both by the route of the gradients, and of a draw."""
  steps: dict[str, Callable[[], None]] = {}
  for route, batched in ROUTES.items():
    step = PrivateStep(problem, batched, 10_000)
    steps[f'make_private, {route}'] = step
    steps[f'by hand, {route}'] = by_hand(problem, batched, step.batch)
    steps['a draw'] = step.draw
  times = timing.in_turn(steps, runs, progress=True)
  rows = {name: timing.summary(seconds) for name, seconds in times.items()}
  for route in ROUTES:
    name, other = f'make_private, {route}', f'by hand, {route}'
    rows[name]['to by hand'] = timing.ratio(times, name, other)
  return rows


def temporary_megabytes(
  problem: Problem, batched: bool, microbatch: int | None
) -> float:
  """What the compiled step takes besides its arguments and results."""
  made = private(problem, batched, microbatch, 1)
  state = made.init(problem.params)
  batch = next(iter(made.batches(state, problem.data)))
  program = made._step.lower(
    state.params, state.optimizer, problem.frozen, batch.examples,
    batch.is_padding_example, None,
  ).compile()  # fmt: skip
  return program.memory_analysis().temp_size_in_bytes / 2**20


def main():
  parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
  parser.add_argument('--runs', type=int, default=20)
  parser.add_argument('--only', choices=('digits', 'minilm', 'memory'))
  args = parser.parse_args()
  path = results.path_of('make_private')
  found = {}
  if args.only and path.exists():
    found = json.loads(path.read_text('utf-8'))
  found |= {'environment': results.environment(), 'runs': args.runs}
  for name, make in {'digits': digits, 'minilm': minilm}.items():
    if args.only in (None, name):
      # Small steps are dear to time: more of them.
      rows = measure_time(make(), args.runs * (10 if name == 'digits' else 1))
      found[name] = {'steps': rows, 'load of the machine': os.getloadavg()[0]}
      for step, row in rows.items():
        print(name, step, {k: round(v, 3) for k, v in row.items()}, flush=True)
  if args.only in (None, 'memory'):
    problem = minilm(rows=64)
    found['temporary megabytes'] = {}
    for route, batched in ROUTES.items():
      found['temporary megabytes'][route] = row = {
        str(size or problem.rows): temporary_megabytes(problem, batched, size)
        for size in MICROBATCHES
      }
      print(route, {k: round(v, 1) for k, v in row.items()}, flush=True)
  print(f'Written to {results.save("make_private", found)}')


if __name__ == '__main__':
  main()
