"""Time of a whole private training step: PRISM beside the alternatives.

    python -m benchmarks.speed.step_time [--only 8 noise]

The MiniLM encoder with adapters on all dense layers and a linear head, on
random tokens, batch 32. The same clip and data for all methods, run in turn;
ratios within a round. The clip is jax-privacy's, which takes any number of
micro-batches. The same with the clip in the chain of the optimizer, for a batch
whose gradients are held at once, which come from vmap or from one backward pass
of the batch. Non-private AdamW takes one plain backward pass of the batch.
``noise`` is PRISM's step as it is and with sums and noise as floats. Five
minutes a rank on two cores.
"""

import jax
import optax

import prism_optax
from benchmarks.common import methods, runner, timing
from benchmarks.speed import steps, update_time

ROUTES = {'vmap': False, 'one backward': True}


def chains(batch):
  """PRISM with its own clip, and DP-AdamW with optax's."""
  return {
    'prism': prism_optax.prism(
      steps.RATE, l2_clip_norm=1.0, noise_multiplier=1.0,
      expected_batch_size=batch, prng_key=jax.random.key(0),
    ),
    'dp-adamw': optax.chain(
      optax.contrib.differentially_private_aggregate(1.0, 1.0, 0),
      optax.adamw(steps.RATE),
    ),
  }  # fmt: skip


def noises(batch):
  """PRISM spelled out, with exact sums and noise and with those of floats."""
  stddev = update_time.STDDEV
  clip = prism_optax.intrinsic_clip(1.0, normalize_by=batch)
  noises = {
    'exact': prism_optax.tangent_privatizer(stddev),
    'floats': update_time.float_noise(stddev),
  }
  return {
    name: methods.spelled_out(steps.RATE, noise, stddev, clip=clip)
    for name, noise in noises.items()
  }


def of_chains(problem, txs, name, routes):
  """Steps of chains with gradients from some routes."""
  return {
    name.format(chain, route): steps.chained(
      tx, problem.gradients(ROUTES[route]), problem.params
    )
    for chain, tx in txs.items()
    for route in routes
  }


def measure(part, batch=32, length=48, runs=20, layers=6, routes=tuple(ROUTES)):
  """Rows of a rank, or of ``'noise'``."""
  rank = 8 if part == 'noise' else int(part)
  problem = steps.sentences(rank, batch, length, layers)
  if part == 'noise':
    made = of_chains(problem, noises(batch), '{}, {}', routes)
    references = {f'floats, {x}': f'floats, {x}' for x in routes}
  else:
    made = {'adamw, not private': steps.plain(problem.mean, problem.params)}
    for name in ('dp-adamw', 'prism', 'dp-muon'):
      made[name] = steps.clipped(
        name, problem.mean, problem.params, batch=batch, microbatch=batch
      )
    name = '{}, clip in the chain, {}'
    made |= of_chains(problem, chains(batch), name, routes)
    references = {'dp-adamw': 'dp-adamw', 'adamw': 'adamw, not private'}
  fixed = problem.frozen, tuple(x[:batch] for x in problem.data)
  return [
    {'rank': rank, **row} for row in timing.rows(made, fixed, runs, references)
  ]


if __name__ == '__main__':
  runner.main(
    __doc__,
    'step_time',
    [{'part': x} for x in ('8', '32', '64', 'noise')],
    measure,
    smoke={
      'part': 'noise',
      'batch': 2,
      'length': 8,
      'runs': 2,
      'layers': 1,
      'routes': ('one backward',),
    },
  )
