"""Time of a whole private training step of a decoder, by micro-batches.

    python benchmarks/speed/decoder_step_time.py [--model gemma] [--rank 16]

Random weights in one of two shapes, adapters on q, k, v, up and down.
``gemma``: those of Gemma-3-4B (34 layers of width 2560 over a vocabulary of
262,144), bfloat16, 64 sequences of 256 in micro-batches of 4, for a GPU.
``small``: six layers of width 384, 32 sequences of 64 in micro-batches of 8.
Non-private AdamW, DP-AdamW, PRISM and DP-Muon in turn; the private ones with
jax-privacy's clip. Ratios within a round, and the compiled memory. Results go
to ``benchmarks/results/decoder_step_time_<platform>.json``.
"""

import argparse
import dataclasses
import pathlib
import sys

import jax
import jax.numpy as jnp
import optax

ROOT = pathlib.Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / 'examples')]

from benchmarks.common import results, timing  # noqa: E402
from benchmarks.speed import clipped_step, decoder  # noqa: E402
from prism_optax import lora  # noqa: E402

METHODS = ('adamw, not private', 'dp-adamw', 'prism', 'dp-muon')
# One stack of all layers for each kind of weight: the layers are scanned.
LAYOUT = lora.Layout(a_stack_axes=(0,), b_stack_axes=(0,))


def plain_step(shape: decoder.Shape):
  """AdamW on the mean over micro-batches, in one backward pass each."""
  adamw, gradient = optax.adamw(1e-3), jax.grad(decoder.make_loss(shape))

  def step(carried, fixed):
    params, state = carried
    frozen, tokens = fixed
    parts = tokens.reshape(-1, shape.microbatch, tokens.shape[-1])
    total, _ = jax.lax.scan(
      lambda total, x: (optax.tree.add(total, gradient(params, frozen, x)), 0),
      optax.tree.zeros_like(params),
      parts,
    )
    mean = optax.tree.scale(1 / len(parts), total)
    updates, state = adamw.update(mean, state, params)
    return optax.apply_updates(params, updates), state

  return adamw.init, step


def compiled_steps(shape: decoder.Shape, rank: int) -> dict[str, timing.Step]:
  """One step of each method, on the same random weights and tokens."""
  keys = jax.random.split(jax.random.key(0), 3)
  start = decoder.adapters(shape, rank, keys[0])
  size = (shape.batch, shape.length + 1)
  fixed = (
    decoder.weights(shape, keys[1]),
    jax.random.randint(keys[2], size, 0, shape.vocabulary),
  )
  steps = {}
  for name in METHODS:
    if name == 'adamw, not private':
      init, step = plain_step(shape)
      carried = start, init(start)
    else:
      carried, step = clipped_step.make(
        name,
        decoder.make_loss(shape),
        start,
        batch=shape.batch,
        microbatch=shape.microbatch,
        layout=LAYOUT,
      )
    steps[name] = timing.Step(step, carried, fixed)
  return steps


def main():
  on_gpu = jax.default_backend() == 'gpu'
  parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
  parser.add_argument(
    '--model', choices=decoder.SHAPES, default='gemma' if on_gpu else 'small'
  )
  parser.add_argument('--rank', type=int, nargs='+', default=[8, 16, 32, 64])
  parser.add_argument('--runs', type=int, default=10)
  args = parser.parse_args()
  shape = decoder.SHAPES[args.model]
  sizes = dataclasses.asdict(shape) | {'dtype': jnp.dtype(shape.dtype).name}
  found = {
    'environment': results.environment(),
    'model': args.model,
    'shape': sizes,
    'ranks': {},
  }
  for rank in args.rank:
    steps = compiled_steps(shape, rank)
    times = timing.in_turn(steps, args.runs, progress=True)
    print(f'\n{args.model}, rank {rank}')
    found['ranks'][rank] = timing.table(
      steps, times, {'dp-adamw': 'dp-adamw', 'adamw': METHODS[0]}
    )
    # After each rank: what is measured is kept whatever comes next.
    path = results.save('decoder_step_time', found)
  print(f'Written to {path}')


if __name__ == '__main__':
  main()
