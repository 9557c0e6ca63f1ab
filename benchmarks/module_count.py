"""Compile and update time against the number of LoRA modules.

    python benchmarks/module_count.py [--modules 6 60 180]

``prism`` (without the clip) beside Gaussian noise and AdamW on the same
factors of 384 x 384 modules of rank 8. Modules of one shape are stacked, so
compile time should hardly grow. Updates of the two are timed in turn; medians.
"""

import argparse
import pathlib
import statistics
import sys
import time

import jax
import jax.numpy as jnp
import optax

ROOT = str(pathlib.Path(__file__).parents[1])
if ROOT not in sys.path:
  sys.path.insert(0, ROOT)

import prism_optax  # noqa: E402

STDDEV = 0.1


def noisy_adamw():
  adamw = optax.adamw(1e-3)

  def init(params):
    return jax.random.key(0), adamw.init(params)

  def update(updates, state, params):
    key, draw = jax.random.split(state[0])
    noise = optax.tree.random_like(draw, updates)
    noisy = jax.tree.map(lambda x, z: x + STDDEV * z, updates, noise)
    updates, inner = adamw.update(noisy, state[1], params)
    return updates, (key, inner)

  return optax.GradientTransformation(init, update)


def prism():
  return prism_optax.prism(
    1e-3,
    l2_clip_norm=1.0,
    noise_multiplier=STDDEV,
    expected_batch_size=1,
    per_example_gradients=False,
  )


def problem(modules, size=384, rank=8):
  keys = jax.random.split(jax.random.key(0), (modules, 2))
  params = {
    f'm{i}': {
      'lora_a': jax.random.normal(k[0], (size, rank)) / size**0.5,
      'lora_b': 0.01 * jax.random.normal(k[1], (rank, size)),
    }
    for i, k in enumerate(keys)
  }
  return prism_optax.lora.canonicalize(params)


def compiled(tx, params, grads):
  """(compiled step, its state, seconds to trace and compile)."""

  def step(grads, params, state):
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  state = tx.init(params)
  start = time.perf_counter()
  program = jax.jit(step).lower(grads, params, state).compile()
  return program, state, time.perf_counter() - start


def measure(modules, runs=15):
  """{method: (compile seconds, median milliseconds of an update)}."""
  params = problem(modules)
  grads = jax.tree.map(lambda x: 0.01 * jnp.ones_like(x), params)
  programs, times = {}, {}
  for name, tx in (('prism', prism()), ('noise + adamw', noisy_adamw())):
    programs[name] = [*compiled(tx, params, grads), params]
    times[name] = []
  for _ in range(runs):
    for name, entry in programs.items():
      start = time.perf_counter()
      entry[3], entry[1] = entry[0](grads, entry[3], entry[1])
      jax.block_until_ready(entry[3])
      times[name].append(1e3 * (time.perf_counter() - start))
  return {
    name: (entry[2], statistics.median(times[name]))
    for name, entry in programs.items()
  }


def main():
  parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
  parser.add_argument('--modules', type=int, nargs='+', default=[6, 60, 180])
  print(f'{"modules":>8}{"method":>16}{"compile s":>12}{"update ms":>12}')
  for modules in parser.parse_args().modules:
    for name, (seconds, milliseconds) in measure(modules).items():
      print(f'{modules:8}{name:>16}{seconds:12.1f}{milliseconds:12.1f}')


if __name__ == '__main__':
  main()
