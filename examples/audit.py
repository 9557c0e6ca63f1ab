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
from jax_privacy import auditing

import prism_optax
from prism_optax import training

# Fixed before anything is trained: a choice made by looking voids the bounds.
CANARIES, GUESSES = 1000, 300  # Half of the guesses say "in", half "out".
SIGNIFICANCE = 0.05  # So often may an audit contradict a claim that is true.
STRENGTH = 1e3  # A canary's gradient is far beyond the clip.


def with_canaries(loss):
  """The loss of a record (canary 0), of canary i, or of an empty place (-1).

  Canary i pulls at a number of its own, `params['canaries'][i - 1]`, which no
  other record moves: its gradient is orthogonal to all others.
  """

  def audited(params, frozen, *record):
    *own, canary = record
    pull = STRENGTH * params['canaries'][canary - 1]
    planted = jnp.where(canary > 0, pull, 0.0)  # Or no gradient at all.
    return jnp.where(canary == 0, loss(params['own'], frozen, *own), planted)

  return audited


def with_places(data, coin):
  """The data, and a place for every canary, whether it is in or not.

  So the size that is declared does not depend on the coins. The blank records
  are for shape alone; the loss of one must be finite.
  """
  numbers = np.where(coin, np.arange(1, len(coin) + 1), -1)
  blank = [np.zeros((len(coin), *x.shape[1:]), x.dtype) for x in data]
  own = [np.concatenate(pair) for pair in zip(data, blank, strict=True)]
  return *own, np.int32([0] * len(data[0]) + list(numbers))


def scores(private, params, data, frozen, rate):
  """What was released about each canary, larger if it was in.

  One attacker has the final parameters. The other has those of every step and
  divides each step by its learning rate.
  """
  state = private.init(params)
  start = before = np.float64(params['canaries'])
  steps = np.zeros_like(start)
  for batch in private.batches(state, data):
    state = private.step(state, batch, frozen)
    after = np.float64(state.params['canaries'])
    steps += (before - after) / rate(batch.step)
    before = after
  return {'final parameters': start - before, 'every step': steps}


def lower_bounds(score, coin, guesses, delta):
  """How many guesses are right, and two lower bounds of epsilon.

  The first presumes nothing, the second that errors trade off as those of a
  Gaussian mechanism (Mahloujifar et al. 2024, arXiv:2410.22235).
  """
  order = np.argsort(score, kind='stable')
  lowest, highest = order[: guesses // 2], order[-(guesses // 2) :]
  right = int(np.sum(~coin[lowest]) + np.sum(coin[highest]))
  # 1 is a guess, right ones first; 0 is none. The coins had no part in choosing
  # whom to guess, so that nothing has to be paid for the choice.
  rights = 1.0 * (np.arange(right + 1) < right)
  wrongs = 1.0 * (np.arange(len(coin) - right - 1) < guesses - right)
  auditor = auditing.CanaryScoreAuditor(rights, wrongs)
  how = {'threshold_strategy': auditing.Explicit(0.5)}
  bound = auditor.epsilon_one_run(SIGNIFICANCE, delta, **how)
  return right, bound, auditor.epsilon_one_run_fdp(SIGNIFICANCE, delta, **how)


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
  claim, rows, seen = honest.epsilon(), {}, {}
  _, most, _ = lower_bounds(coin, coin, guesses, train.DELTA)
  print(f'claimed: epsilon <= {claim:.2f} at delta = {train.DELTA:g}.')
  print(f'{guesses} guesses of {canaries} coins can show {most:.2f} at most.\n')
  print(f'{"run and attacker":32} right  epsilon >=  if Gaussian')
  for run, private in ('as it is', honest), (f'noise x {planted:g}', less):
    for attacker, x in scores(private, params, data, weights, rates).items():
      row = f'{run}, {attacker}'
      bounds, seen[row] = lower_bounds(x, coin, guesses, train.DELTA), x
      verdict = '  THE CLAIM IS WRONG' if bounds[1] > claim else ''
      print('{:32} {:5} {:11.2f} {:12.2f}'.format(row, *bounds) + verdict)
      rows[row] = bounds
  print('\nEach row: confidence 95 %. Coins and scores are for the auditor.')
  if plot:
    draw(plot, seen, coin)
  return claim, rows


if __name__ == '__main__':
  parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
  parser.add_argument('--steps', type=int, default=60)
  parser.add_argument('--planted', type=float, default=0.5, help='0: no noise')
  parser.add_argument('--seed', type=int, help='for tests: voids the audit')
  parser.add_argument('--plot', help='file for histograms of the scores')
  main(**vars(parser.parse_args()))
