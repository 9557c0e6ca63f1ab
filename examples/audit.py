"""An audit of a private run: what planted records prove about its epsilon.

    python examples/audit.py

A file to copy. The run is that of `train.py`, with canaries among its records:
each is in by the toss of a coin that only the auditor knows. After one training
the auditor guesses the coins from what was released. More right guesses than
the claimed epsilon allows prove that the claim is wrong (Steinke, Nasr,
Jagielski 2023, arXiv:2305.08846). A second run has half of its noise, on
purpose, to show what a mistake looks like. Two minutes on two cores.
"""

import argparse
import functools

import jax.numpy as jnp
import numpy as np
import optax
import train  # Your run: its loss, its parameters, its data, its constants.

import prism_optax
from prism_optax import training
from prism_optax.finetune.audit import (
  lower_bounds,
  scores,
  table,
  with_canaries,
  with_places,
)

# Fixed before anything is trained: a choice made by looking voids the bounds.
CANARIES, GUESSES = 1000, 300  # Half of the guesses say "in", half "out".


def draw(path, seen, coin):
  """Histograms of the scores of canaries that were in, and out."""
  import matplotlib.pyplot as plt

  figure, axes = plt.subplots(1, len(seen), figsize=(13, 2.5), layout='tight')
  for ax, (title, score) in zip(axes, seen.items(), strict=True):
    ax.hist([score[coin], score[~coin]], 30, label=['in', 'out'])
    ax.set(title=title, yticks=[], xlabel='score')
  axes[0].legend()
  figure.savefig(path)


def main(steps=60, planted=0.5, canaries=CANARIES, seed=None, plot=None):
  """Prints a table; returns the claim, and the bounds of each row."""
  public, data, _ = train.load()
  weights = train.pretrain(*public)
  guesses = GUESSES * canaries // CANARIES
  coin = np.random.default_rng(seed).random(canaries) < 0.5
  data = with_places(data, coin)
  rates = optax.cosine_decay_schedule(train.LEARNING_RATE, steps)
  params = {'own': train.PARAMS, 'canaries': jnp.zeros(canaries)}
  make = functools.partial(
    training.make_private, with_canaries(train.loss), params,
    optimizer=functools.partial(prism_optax.prism, rates),
    l2_clip_norm=train.CLIP, expected_batch_size=train.BATCH, prng_key=seed,
    dataset_size=train.PRIVATE_SIZE + canaries, steps=steps, delta=train.DELTA,
  )  # fmt: skip
  honest = make(target_epsilon=train.EPSILON)
  less = make(noise_multiplier=planted * honest.noise_multiplier)
  claim, seen = honest.epsilon(), {}

  def rows():
    for run, private in ('as it is', honest), (f'noise x {planted:g}', less):
      for attacker, score in scores(
        private, params, data, weights, rates
      ).items():
        seen[f'{run}, {attacker}'] = score
        yield f'{run}, {attacker}', score

  for line in table(claim, coin, guesses, train.DELTA, rows()):
    print(line, flush=True)
  if plot:
    draw(plot, seen, coin)
  return claim, {
    row: lower_bounds(score, coin, guesses, train.DELTA)
    for row, score in seen.items()
  }


if __name__ == '__main__':
  parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
  parser.add_argument('--steps', type=int, default=60)
  parser.add_argument('--planted', type=float, default=0.5, help='0: no noise')
  parser.add_argument('--seed', type=int, help='for tests: voids the audit')
  parser.add_argument('--plot', help='file for histograms of the scores')
  main(**vars(parser.parse_args()))
