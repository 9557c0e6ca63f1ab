"""Time and memory of a step of ``make_private``, beside one written by hand.

    python -m benchmarks.speed.make_private [--only digits]

By hand: per-example gradients by vmap, or from one backward pass, into
``prism`` with its own clip, and ``apply_updates``, in one jitted step whose
buffers are donated. ``make_private`` with the same sizes does the same in
``step``, which also looks at the state and the batch. Both on the digits
network and on MiniLM, in turn, medians, ratios within a round. Then the
temporary memory of a step of MiniLM by the size of its micro-batches, as the
compiler plans it.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

import prism_optax
from benchmarks.common import runner, timing
from benchmarks.speed import steps
from prism_optax import training

ROUTES = {'vmap': False, 'one backward': True}
MAKE = {'digits': steps.digits, 'minilm': steps.sentences}
optimizer = functools.partial(prism_optax.prism, 1e-3)


def private(
  problem: steps.Problem, batched: bool, microbatch: int | None
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
    steps=10_000,  # More than are ever timed.
    delta=1e-5,
    prng_key=0,
  )


class PrivateStep:
  """``PrivateTraining.step`` again and again, on one batch.

  Args:
    problem: Model and data.
    batched: Whether the gradients come from one backward pass.
  """

  def __init__(self, problem: steps.Problem, batched: bool):
    self.training = private(problem, batched, None)
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


def by_hand(problem: steps.Problem, batched: bool, batch: Any) -> timing.Step:
  """What a user would write, on a batch that is already there."""
  tx = optimizer(
    l2_clip_norm=1.0, noise_multiplier=1.0,
    expected_batch_size=problem.rows * 3 // 4, prng_key=0,
  )  # fmt: skip
  carried, step = steps.chained(tx, problem.gradients(batched), problem.params)
  fixed = problem.frozen, batch.examples, batch.is_padding_example
  return timing.Step(step, carried, fixed)


def times(
  task: str, runs: int, rows: int | None, routes: Sequence[str]
) -> list[runner.Row]:
  """Milliseconds of both by the route of the gradients, and of a draw."""
  problem = MAKE[task](**({} if rows is None else {'rows': rows}))
  made: dict[str, Callable[[], None]] = {}
  for route in routes:
    batched = ROUTES[route]
    step = PrivateStep(problem, batched)
    made[f'make_private, {route}'] = step
    made[f'by hand, {route}'] = by_hand(problem, batched, step.batch)
    made['a draw'] = step.draw
  seconds = timing.in_turn(made, runs, progress=True)
  found = {name: timing.summary(x) for name, x in seconds.items()}
  for route in routes:
    name, other = f'make_private, {route}', f'by hand, {route}'
    found[name]['to by hand'] = timing.ratio(seconds, name, other)
  return [{'step': name, 'rounds': runs, **row} for name, row in found.items()]


def temporary_megabytes(
  problem: steps.Problem, batched: bool, microbatch: int | None
) -> float:
  """What the compiled step takes besides its arguments and results."""
  made = private(problem, batched, microbatch)
  state = made.init(problem.params)
  batch = next(iter(made.batches(state, problem.data)))
  program = made._step.lower(
    state.params, state.optimizer, problem.frozen, batch.examples,
    batch.is_padding_example, None,
  ).compile()  # fmt: skip
  return program.memory_analysis().temp_size_in_bytes / 2**20


def measure(
  task: str,
  part: str,
  runs: int = 20,
  rows: int | None = None,
  sizes: Sequence[int | None] = (8, 16, 32, None),
  routes: Sequence[str] = tuple(ROUTES),
) -> list[runner.Row]:
  """Rows of ``'time'`` or of ``'memory'``."""
  if part == 'time':
    # Small steps are hard to time: more of them.
    return times(task, runs * (10 if task == 'digits' else 1), rows, routes)
  problem = MAKE[task](rows=rows or 64)
  return [
    {
      'step': route,
      'rows at once': size or problem.rows,
      'temporary megabytes': temporary_megabytes(problem, ROUTES[route], size),
    }
    for route in routes
    for size in sizes
  ]


if __name__ == '__main__':
  runner.main(
    __doc__,
    'make_private',
    [
      {'task': 'digits', 'part': 'time'},
      {'task': 'minilm', 'part': 'time'},
      {'task': 'minilm', 'part': 'memory'},
    ],
    measure,
    # The other route has a test of its own.
    smoke={
      'task': 'digits',
      'runs': 1,
      'rows': 8,
      'sizes': (None,),
      'routes': ('vmap',),
    },
  )
