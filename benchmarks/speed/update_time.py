"""Time of the optimizer's update alone: PRISM, and AdamW on the factors.

    python -m benchmarks.speed.update_time [--only small]

Two workloads, those of the timings of the authors' PyTorch step (arXiv:
2606.00944): 24 modules 384 x 384 of rank 8 with a batch of 32, and 60 large
ones of rank 16 with a batch of 4. With and without the clip of per-example
gradients. Then the cost against the number of modules, the rank and the width,
and compile times.
The workloads once more with glibc told to ask for huge pages, which saves time
where much memory is taken and given back at every step. And the alias beside
chains of its parts.
"""

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax_privacy import noise_addition

import prism_optax
from benchmarks.common import methods, runner, timing
from prism_optax import fixed_rank
from prism_optax.fixed_rank import _tangents

STDDEV = 0.1
WORKLOADS = {
  'small': ([(384, 384)] * 24, 8, 32),
  'large': (
    [(2560, 2560)] * 36 + [(10240, 2560)] * 12 + [(2560, 10240)] * 12,
    16,
    4,
  ),
}


def problem(shapes: Sequence[tuple[int, int]], rank: int):
  """Canonical factors of modules (outputs, inputs), and gradients."""
  params, grads = {}, {}
  for i, (outputs, inputs) in enumerate(shapes):
    keys = jax.random.split(jax.random.key(i), 4)
    params[f'm{i}'] = {
      'lora_a': jax.random.normal(keys[0], (inputs, rank)) / inputs**0.5,
      'lora_b': 0.01 * jax.random.normal(keys[1], (rank, outputs)),
    }
    grads[f'm{i}'] = {
      'lora_a': 0.01 * jax.random.normal(keys[2], (inputs, rank)),
      'lora_b': 0.01 * jax.random.normal(keys[3], (rank, outputs)),
    }
  return prism_optax.lora.canonicalize(params), grads


def noisy_adamw() -> optax.GradientTransformation:
  """What a DP-AdamW does after its clip, with jax-privacy's noise in floats."""
  return optax.chain(
    noise_addition.gaussian_privatizer(
      stddev=STDDEV, prng_key=jax.random.key(0)
    ),
    optax.adamw(1e-3),
  )


def prism(
  per_example_gradients: bool = False, batch: int = 1, prng_key: Any = None
) -> optax.GradientTransformation:
  """PRISM with the same noise."""
  return prism_optax.prism(
    1e-3,
    l2_clip_norm=1.0,
    noise_multiplier=STDDEV * batch,
    expected_batch_size=batch,
    per_example_gradients=per_example_gradients,
    prng_key=prng_key,
  )


def step_of(
  tx: optax.GradientTransformation, params: Any
) -> tuple[Any, Callable[[Any, Any], Any]]:
  """What is carried, and the update and its application as one program."""

  def step(carried, grads):
    params, state = carried
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  return (params, tx.init(params)), step


def timed(
  txs: dict[str, optax.GradientTransformation],
  params: Any,
  gradients: Callable[[str], Any],
  runs: int,
) -> tuple[dict[str, list[float]], dict[str, timing.Step]]:
  """Seconds of each update, in turn, and the compiled steps."""
  steps = {}
  for name, tx in txs.items():
    carried, step = step_of(tx, params)
    steps[name] = timing.Step(step, carried, gradients(name))
  return timing.in_turn(steps, runs, progress=True), steps


def rows_of(
  txs: dict[str, optax.GradientTransformation],
  workload: str,
  runs: int,
  reference: str,
) -> list[runner.Row]:
  """Rows of a workload, with ratios to one of them."""
  shapes, rank, batch = WORKLOADS[workload]
  params, grads = problem(shapes, rank)
  one_by_one = jax.tree.map(lambda g: jnp.stack([g] * batch), grads)
  times, steps = timed(
    txs, params, lambda x: one_by_one if x.endswith('with clip') else grads,
    runs,
  )  # fmt: skip
  return [
    {
      'method': name,
      **timing.summary(seconds),
      f'to {reference}': timing.ratio(times, name, reference),
      'compile seconds': steps[name].compile_seconds,
    }
    for name, seconds in times.items()
  ]


def workload(name: str, runs: int) -> list[runner.Row]:
  """PRISM, noise and AdamW, and AdamW."""
  batch = WORKLOADS[name][2]
  return rows_of(
    {
      'adamw': optax.adamw(1e-3),
      'noise + adamw': noisy_adamw(),
      'prism': prism(),
      'prism with clip': prism(True, batch),
    },
    name, runs, 'noise + adamw',
  )  # fmt: skip


def float_noise(stddev: float) -> optax.GradientTransformation:
  """The privatizer with normal numbers, added as floats: not exact."""

  def update(stacks, key, step):
    key, draw = jax.random.split(key)
    stacks = stacks.map_pairs(fixed_rank.multiply_out)
    normal = optax.tree.random_like(draw, stacks, jax.random.normal)
    noisy = optax.tree.add_scale(stacks, stddev, normal)
    return noisy.map_pairs(
      lambda x, frame: _tangents.projected(frame, x), step.frames
    ), key

  return prism_optax.transforms.tangent_transformation(
    'float_noise', update, lambda step: jax.random.key(0), adds_noise=True
  )


def chains(name: str, runs: int) -> list[runner.Row]:
  """The alias against its lines, chained by this library and by optax.

  Also without the lattice: with noise as floats. And with the clip.
  """
  privatizer = prism_optax.tangent_privatizer(STDDEV)
  lines = functools.partial(methods.spelled_out, 1e-3)
  optax_rate = optax.scale_by_learning_rate
  found = rows_of(
    {
      'prism': prism(),
      'prism_optax.chain': lines(privatizer, STDDEV),
      'optax.chain': lines(privatizer, STDDEV, chain=optax.chain),
      "optax.chain, optax's rate": lines(
        privatizer, STDDEV, chain=optax.chain, scale=optax_rate
      ),
      'noise as floats': lines(float_noise(STDDEV), STDDEV),
      'prism with clip': prism(True, WORKLOADS[name][2]),
    },
    name, runs, 'prism',
  )  # fmt: skip
  return [
    {'chain': row.pop('method'), 'workload': name, **row} for row in found
  ]


AXES = {
  'modules': [(k, 384, 8) for k in (1, 6, 24, 60, 180)],
  'rank': [(24, 384, r) for r in (4, 8, 16, 32, 64)],
  'width': [(24, w, 8) for w in (128, 384, 1024, 2048, 4096)],
}


def scaling(axis: str, runs: int, points: int) -> list[runner.Row]:
  """Milliseconds and compile seconds against modules, rank or width."""
  found = []
  for modules, width, rank in AXES[axis][:points]:
    params, grads = problem([(width, width)] * modules, rank)
    txs = {'prism': prism(), 'noise + adamw': noisy_adamw()}
    times, steps = timed(txs, params, lambda _, grads=grads: grads, runs)
    found += [
      {
        'modules': modules, 'width': width, 'rank': rank, 'method': name,
        **timing.summary(seconds),
        'compile seconds': steps[name].compile_seconds,
      }
      for name, seconds in times.items()
    ]  # fmt: skip
  return found


HUGE_PAGES = {'GLIBC_TUNABLES': 'glibc.malloc.hugetlb=1'}


def measured(
  threads: int, huge_pages: bool, kind: str, what: str, runs: int, points: int
) -> list[runner.Row]:
  """Rows with the threads that this process has."""
  timing.use_threads(threads)
  if kind == 'axis':
    return scaling(what, max(2, runs // 5), points)
  count = runs if what == 'small' else max(2, runs // 5)
  return (workload if kind == 'workload' else chains)(what, count)


def measure(
  runs: int = 50, points: int = 6, **setting: Any
) -> list[runner.Row]:
  """The same in a process of its own: its start fixes the threads."""
  given = json.dumps({**setting, 'runs': runs, 'points': points})
  done = subprocess.run(
    [sys.executable, '-m', 'benchmarks.speed.update_time', '--child', given],
    stdout=subprocess.PIPE, check=True, text=True, cwd=runner.ROOT,
    env=os.environ | (HUGE_PAGES if setting['huge pages'] else {}),
  )  # fmt: skip
  return [
    {setting['kind']: setting['what'], **row} for row in json.loads(done.stdout)
  ]


def settings() -> list[dict[str, Any]]:
  """Workloads with and without huge pages, chains, and the axes."""
  found = [
    {'threads': threads, 'huge pages': huge, 'kind': 'workload', 'what': name}
    for threads in (1, 2)
    for huge in (False, True)
    for name in WORKLOADS
  ]
  found += [
    {'threads': 2, 'huge pages': False, 'kind': 'chains',
     'what': name}
    for name in WORKLOADS
  ]  # fmt: skip
  return found + [
    {'threads': threads, 'huge pages': False, 'kind': 'axis', 'what': axis}
    for threads in (1, 2)
    for axis in AXES
  ]


if __name__ == '__main__':
  if sys.argv[1:2] == ['--child']:
    given = json.loads(sys.argv[2])
    given['huge_pages'] = given.pop('huge pages')
    print(json.dumps(measured(**given)))
  else:
    runner.main(
      __doc__, 'update_time', settings(), measure,
      smoke={'runs': 2, 'points': 1}, 
    )  # fmt: skip
