"""An audit: what planted records prove about the epsilon of a training.

Canaries are records that pull at numbers of their own, each in by the toss of
a coin that only the auditor knows. After one training the auditor guesses the
coins from what was released. More right guesses than the claimed epsilon
allows prove that the claim is wrong (Steinke, Nasr, Jagielski 2023,
arXiv:2305.08846).
"""

import argparse
import dataclasses
import pathlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax_privacy import auditing

from prism_optax.training import PrivateTraining

from . import finished, methods, tasks, training

SIGNIFICANCE = 0.05  # So often may an audit contradict a claim that is true.
STRENGTH = 1e3  # A canary's gradient is far beyond the clip.


def with_canaries(loss: Callable[..., Any]) -> Callable[..., Any]:
  """The loss of a record (canary 0), of canary i, or of an empty place (-1).

  Canary i pulls at a number of its own, `params['canaries'][i - 1]`, which no
  other record moves: its gradient is orthogonal to all others.
  """

  def audited(params: Any, frozen: Any, *record: Any) -> jax.Array:
    *own, canary = record
    pull = STRENGTH * params['canaries'][canary - 1]
    planted = jnp.where(canary != -1, pull, 0.0)  # Or no gradient at all.
    return jnp.where(canary == 0, loss(params['own'], frozen, *own), planted)

  return audited


def with_places(
  data: Sequence[np.ndarray], coin: np.ndarray
) -> tuple[np.ndarray, ...]:
  """The data, and a place for every canary, whether it is in or not.

  So the size that is declared does not depend on the coins. The blank records
  are for shape alone; the loss of one must be finite.
  """
  numbers = np.where(coin, np.arange(1, len(coin) + 1), -1)
  blank = [np.zeros((len(coin), *x.shape[1:]), x.dtype) for x in data]
  own = [np.concatenate(pair) for pair in zip(data, blank, strict=True)]
  first, *_ = data
  return *own, np.concatenate(
    [np.zeros(len(first), np.int32), np.asarray(numbers, np.int32)]
  )


def scores(
  private: PrivateTraining,
  params: Any,
  data: Any,
  frozen: Any,
  rate: Callable[[int], Any],
) -> dict[str, np.ndarray]:
  """What was released about each canary, larger if it was in.

  One attacker has the final parameters. The other has those of every step and
  divides each step by its learning rate.
  """
  state = private.init(params)
  start = before = np.asarray(params['canaries'], np.float64)
  steps = np.zeros_like(start)
  for batch in private.batches(state, data):
    state = private.step(state, batch, frozen)
    after = np.asarray(state.params['canaries'], np.float64)
    steps += (before - after) / rate(batch.step)
    before = after
  return {'final parameters': start - before, 'every step': steps}


def lower_bounds(
  score: np.ndarray, coin: np.ndarray, guesses: int, delta: float
) -> tuple[int, float, float]:
  """How many guesses are right, and two lower bounds of epsilon.

  The first presumes nothing, the second that errors trade off as those of a
  Gaussian mechanism (Mahloujifar et al. 2024, arXiv:2410.22235).
  """
  order = np.argsort(score)
  lowest, highest = order[: guesses // 2], order[-(guesses // 2) :]
  right = np.sum(~coin[lowest]) + np.sum(coin[highest])
  # 1 is a guess, right ones first; 0 is none. The coins had no part in choosing
  # whom to guess, so that nothing has to be paid for the choice.
  rights = 1.0 * (np.arange(right + 1) < right)
  wrongs = 1.0 * (np.arange(len(coin) - right - 1) < guesses - right)
  auditor = auditing.CanaryScoreAuditor(rights, wrongs)
  how = {'threshold_strategy': auditing.Explicit(0.5)}
  bound = auditor.epsilon_one_run(SIGNIFICANCE, delta, **how)
  return right, bound, auditor.epsilon_one_run_fdp(SIGNIFICANCE, delta, **how)


def table(
  claim: float, coin: np.ndarray, guesses: int, delta: float, rows: Any
) -> Iterator[str]:
  """Lines about ``(name, score)`` of each attacker, as they come."""
  _, most, _ = lower_bounds(coin, coin, guesses, delta)
  yield f'claimed: epsilon <= {claim:.2f} at delta = {delta:g}.'
  yield f'{guesses} guesses of {len(coin)} coins can show {most:.2f} at most.\n'
  yield f'{"run and attacker":32} right  epsilon >=  if Gaussian'
  for name, score in rows:
    right, bound, gaussian = lower_bounds(score, coin, guesses, delta)
    verdict = '  THE CLAIM IS WRONG' if bound > claim else ''
    yield f'{name:32} {right:5} {bound:11.2f} {gaussian:12.2f}{verdict}'
  yield '\nEach row: confidence 95 %. Coins and scores are for the auditor.'


def audit(command: argparse.Namespace) -> None:
  """The command ``audit``: trains as a run did, on its PUBLIC rows.

  The canaries take places of the run's declared size, so that sampling, clip,
  noise and steps are those of the run, and no private row is read again.

  Raises:
    ValueError: If the run is not private or not finished, or its declared size
      has no place for the canaries.
  """
  run = finished.find(command.run, 'classify', 'instruct')
  name, used = run.summary['optimizer'], run.options
  plan, count = run.summary.get('plan'), command.canaries
  if plan is None:
    raise ValueError(f'{command.run}: --optimizer {name} claims no epsilon.')
  used.dataset_size = size = plan['dataset_size']
  if not 10 <= count <= size:
    raise ValueError(
      f'Expected --canaries from 10 to the declared size {size}, got {count}.'
    )
  used.data, used.seed = used.eval, None
  task = tasks.read(used, run.folder)
  coin = np.random.default_rng().choice([False, True], count)
  data = with_places([x[: size - count] for x in task.train], coin)
  planted_loss = with_canaries(lambda *record: task.loss(*record)[0])
  own_params = methods.prepared(name, task.params)
  params = {'own': own_params, 'canaries': jnp.zeros(count)}
  changed: dict[str, Any] = {'params': params, 'train': data}
  changed['loss'] = lambda *record: (planted_loss(*record), ())
  planted = dataclasses.replace(task, **changed)
  noises = {'as it is': 1.0}
  if command.noise is not None:
    noises[f'noise x {command.noise:g}'] = command.noise
  # With the same noise, whatever was calibrated.
  rate = training.schedule(used, name)

  def rows() -> Iterator[tuple[str, np.ndarray]]:
    for kind, share in noises.items():
      used.plan = {'noise_multiplier': share * plan['noise_multiplier']}
      with tempfile.TemporaryDirectory() as folder:
        private = training.make(planted, used, name, pathlib.Path(folder))
        found = scores(private, params, data, task.frozen, rate)
      for attacker, score in found.items():
        yield f'{kind}, {attacker}', score

  guesses = 2 * (3 * count // 20)  # Half of them say "in", half "out".
  for line in table(run.summary['epsilon'], coin, guesses, used.delta, rows()):
    print(line, flush=True)
