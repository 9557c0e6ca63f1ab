"""Fair timing of compiled steps: in turn, with their spread."""

import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def use_threads(count: int) -> None:
  """Restricts this process to so many cores. Before the first array is made."""
  os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:count])
  for name in ('OMP_NUM_THREADS', 'OPENBLAS_NUM_THREADS', 'MKL_NUM_THREADS'):
    os.environ[name] = str(count)


class Step:
  """A compiled step that carries its own state from call to call.

  Args:
    step: ``step(carried, fixed) -> carried``; ``carried`` is donated.
    carried: Its first argument at the start.
    fixed: The second argument of all calls.
  """

  def __init__(self, step: Callable[[Any, Any], Any], carried: Any, fixed: Any):
    start = time.perf_counter()
    self.program = (
      jax.jit(step, donate_argnums=0).lower(carried, fixed).compile()
    )
    self.compile_seconds = time.perf_counter() - start
    # Donated: the caller's arrays must live on.
    self._carried = jax.tree.map(jnp.copy, carried)
    self._fixed = fixed

  def __call__(self) -> None:
    self._carried = self.program(self._carried, self._fixed)
    jax.block_until_ready(self._carried)


def in_turn(
  steps: dict[str, Callable[[], None]], runs: int, progress: bool = False
) -> dict[str, list[float]]:
  """Seconds of each run of each step.

  One run of each after the other, so that whatever else the machine does meets
  all of them alike. The first round warms up and does not count.
  """
  times: dict[str, list[float]] = {name: [] for name in steps}
  for run in range(runs + 1):
    for name, step in steps.items():
      start = time.perf_counter()
      step()
      times[name].append(time.perf_counter() - start)
    if progress:
      print(f'  round {run} of {runs}', end='\r', file=sys.stderr, flush=True)
  return {name: seconds[1:] for name, seconds in times.items()}


def summary(seconds: list[float]) -> dict[str, float]:
  """Median, fastest, and quartiles, in milliseconds."""
  low, median, high = statistics.quantiles(seconds, n=4)
  values = {'median': median, 'min': min(seconds), 'q1': low, 'q3': high}
  return {name: 1e3 * value for name, value in values.items()}


def ratio(times: dict[str, list[float]], name: str, to: str) -> float:
  """Median of the ratios within a round: what disturbs both cancels."""
  pairs = zip(times[name], times[to], strict=True)
  return statistics.median(x / y for x, y in pairs)


def rows(
  made: dict[str, tuple[Any, Callable[[Any, Any], Any]]],
  fixed: Any,
  runs: int,
  references: dict[str, str],
) -> list[dict[str, Any]]:
  """Steps are compiled and timed in turn: one row for each.

  Args:
    made: What each step carries, and the step, by name.
    fixed: The second argument of all.
    runs: Rounds.
    references: Steps that the others are compared with, by their short names.
  """
  steps = {name: Step(step, x, fixed) for name, (x, step) in made.items()}
  times = in_turn(steps, runs, progress=True)
  found = []
  for name, seconds in times.items():
    memory = steps[name].program.memory_analysis()
    row = {
      'method': name,
      **summary(seconds),
      **{
        f'to {short}': ratio(times, name, reference)
        for short, reference in references.items()
      },
      'temporary megabytes': memory.temp_size_in_bytes / 2**20,
      'compile seconds': steps[name].compile_seconds,
    }
    found.append(row)
  return found
