"""Time of a whole private training step of a decoder, by micro-batches.

    python -m benchmarks.speed.decoder_step_time [--only 8]

Random weights in one of two shapes, adapters on q, k, v, up and down.
``gemma``: those of Gemma-3-4B (34 layers of width 2560 over a vocabulary of
262,144), bfloat16, 64 sequences of 256 in micro-batches of 4, for a GPU.
``small``: six layers of width 384, 32 sequences of 64 in micro-batches of 8.
Non-private AdamW, DP-AdamW, PRISM and DP-Muon in turn; the private ones with
jax-privacy's clip. Ratios within a round, and the compiled memory.
"""

import jax

from benchmarks.common import runner, timing
from benchmarks.speed import decoder, steps
from prism_optax import lora

METHODS = ('adamw, not private', 'dp-adamw', 'prism', 'dp-muon')
# One stack of all layers for each kind of weight: the layers are scanned.
LAYOUT = lora.Layout(a_stack_axes=(0,), b_stack_axes=(0,))


def made(
  shape: decoder.Shape, rank: int
) -> tuple[dict[str, steps.Step], tuple]:
  """The step of each method, and the weights and tokens of all."""
  keys = jax.random.split(jax.random.key(0), 3)
  start = decoder.adapters(shape, rank, keys[0])
  size = (shape.batch, shape.length + 1)
  fixed = (
    decoder.weights(shape, keys[1]),
    jax.random.randint(keys[2], size, 0, shape.vocabulary),
  )
  loss = decoder.make_loss(shape)
  parts = shape.batch // shape.microbatch
  found = {METHODS[0]: steps.plain(loss, start, parts)}
  for name in METHODS[1:]:
    found[name] = steps.clipped(
      name, loss, start, batch=shape.batch, microbatch=shape.microbatch,
      layout=LAYOUT,
    )  # fmt: skip
  return found, fixed


def measure(model: str, rank: int, runs: int = 10) -> list[runner.Row]:
  """Rows of a rank."""
  found, fixed = made(decoder.SHAPES[model], rank)
  references = {'dp-adamw': 'dp-adamw', 'adamw': METHODS[0]}
  return timing.rows(found, fixed, runs, references)


if __name__ == '__main__':
  MODEL = 'gemma' if jax.default_backend() == 'gpu' else 'small'
  runner.main(
    __doc__,
    'decoder_step_time',
    [{'model': MODEL, 'rank': rank} for rank in (8, 16, 32, 64)],
    measure,
    smoke={'model': 'smoke', 'rank': 4, 'runs': 2},
  )
