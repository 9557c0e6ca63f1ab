"""Runs, their tables and tests, and a decoder that learns."""

import dataclasses

import jax
import numpy as np
import pytest

from benchmarks.accuracy import (
  private_runs,
  problems,
  small_decoder,
  starting_points,
  utility,
  utility_tables,
)


def test_differences_are_tested_at_their_level():
  """Without a difference 5 % are called significant, with one nearly all."""
  rng = np.random.default_rng(0)
  rows, seeds, trials = 200, 5, 400

  def p_value(shift):
    base = rng.normal(size=rows)
    of_seed = rng.normal(scale=0.05, size=(2, seeds, 1))
    own = rng.normal(scale=0.5, size=(2, 1, rows))  # Of a method on a row.
    drawn = base + of_seed + own + rng.normal(size=(2, seeds, rows))
    drawn[0] += shift
    return utility_tables.paired(list(drawn[0]), list(drawn[1]))['p']

  wrong = np.mean([p_value(0.0) < 0.05 for _ in range(trials)])
  # Deviation of a share of 400: 1.1 points.
  assert 0.01 < wrong < 0.085
  assert np.mean([p_value(0.4) < 0.05 for _ in range(50)]) > 0.9


def test_rates_are_compared_with_the_best_one():
  row = utility_tables.Row(
    'prism', 0.1, {}, {0.03: 0.7, 0.1: 0.8, 0.3: 0.75},
    untuned={0.3: 0.76, 0.03: 0.805, 0.1: 0.8, 1.0: 0.1},
  )  # fmt: skip
  *_, line = utility_tables.rates_table([row])
  assert line == '| prism | 0.1 | +0.50 | -4.00 |'


def test_tuning_ends_with_a_neighbour_on_both_sides(tmp_path):
  """Whatever the accuracies, and never with a rate that was not the best."""
  results = utility.Results(tmp_path)
  template = dataclasses.replace(utility.BASE, method='dp-adamw')
  best, run_count = 3e-4, 0
  while True:
    missing, rate = utility.tune(results, template)
    if rate is not None:
      break
    for run in missing:
      run_count += 1
      accuracy = 1 - abs(np.log10(run.rate / best))
      results.put(run, {'tuning accuracy': float(accuracy)})
  assert rate == best
  stored = sorted(utility.RATES['dp-adamw'])[0]
  assert run_count >= 3
  assert best < stored


@pytest.mark.slow
@pytest.mark.parametrize('method', ['prism, correlated noise', 'dp-muon'])
def test_other_noise_and_other_parameters_make_a_private_step(method):
  """Through the very program of a run."""
  rng = np.random.default_rng(0)
  rows = rng.integers(3, 40, (64, 5)).astype(np.int32)
  frozen = jax.jit(small_decoder.initial)(jax.random.key(0))
  given = problems.Problem(
    (rows,), (rows[:8],), (rows[:8],), frozen, small_decoder.row_losses, 0
  )
  run = private_runs.Run(
    method, 0.03, 3.0, 0, task='maths', length=4, rows=64, batch=32, steps=2,
    **utility.STARTS.get(method, {}),
  )  # fmt: skip
  (params, *_), *_ = private_runs.train(run, given, 1.0)
  before, _ = starting_points.start(run, given)
  moved = jax.tree.map(lambda x, y: np.max(np.abs(x - y)), before, params)
  assert np.isfinite(jax.tree.leaves(moved)).all()
  assert max(jax.tree.leaves(moved)) > 0


@pytest.mark.slow
def test_a_decoder_learns_what_it_is_trained_on():
  """The way of a run through the decoder, on a few made-up rows.

  By the method that compiles in the least time: what learns is the decoder.
  """
  rng = np.random.default_rng(0)
  rows = np.tile(rng.integers(3, 40, 13), (64, 1)).astype(np.int32)
  frozen = jax.jit(small_decoder.initial)(jax.random.key(0))
  given = problems.Problem(
    (rows,), (rows[:8],), (rows[:8],), frozen, small_decoder.row_losses, 0
  )
  run = private_runs.Run(
    'dp-adamw', 0.03, None, 0, task='maths', length=12, rows=64, batch=32,
    steps=8,
  )  # fmt: skip
  (params, *_), frozen, _ = private_runs.train(run, given, 0.0)
  before, _ = starting_points.start(run, given)
  losses = [
    small_decoder.row_losses(x, frozen, rows[:1])[0].item()
    for x in (before, params)
  ]
  assert losses[1] < losses[0] - 0.3


def test_best_rates_are_tried_elsewhere(tmp_path):
  """Three rates, with and without a change, where the runs are there."""
  results, runs = utility.Results(tmp_path), {}
  best = dataclasses.replace(utility.BASE, rate=3e-2)
  for i, rate in enumerate((1e-2, 3e-2, 1e-1)):
    run = dataclasses.replace(best, rate=rate, seed=utility.TUNING_SEED)
    results.put(run, {'tuning accuracy': 1 - abs(i - 1)})
    runs[dataclasses.replace(best, rate=rate)] = {'test accuracy': 0.1 * i}
  other = utility.changed(best, {'rank': 4, 'rungs': 1})
  assert (other.rate, other.rank) == (1e-1, 4)
  runs[other] = {'test accuracy': 0.7}
  table = utility_tables.transfer_table(runs, results)
  assert '| `as tuned` | 0.000 / 0.100 / 0.200 | - |' in table
  assert '| `rank=4` | - / - / 0.700 | - |' in table
  found = utility_tables.varied(
    {best: {'test accuracy': 0.5},
     dataclasses.replace(best, rank=4): {'test accuracy': 0.75}},
    'nuisances', results,
  )  # fmt: skip
  assert found == {'prism': {'rank=4': 0.25}}


def test_the_public_rows_decide_on_no_rate(tmp_path):
  results = utility.Results(tmp_path)
  template = dataclasses.replace(utility.BASE, public_test=True)
  missing, _ = utility.tune(results, template)
  assert missing
  assert not any(run.public_test for run in missing)


def test_runs_differ_by_name_wherever_they_differ():
  base = utility.BASE
  changed = [
    dataclasses.replace(base, seed=1),
    dataclasses.replace(base, epsilon=None),
    dataclasses.replace(base, options=(('b1', 0.5),)),
    dataclasses.replace(base, gauge=2.0),
    dataclasses.replace(base, public_test=True),
  ]
  assert len({run.name for run in (base, *changed)}) == 6
  assert dataclasses.replace(base).name == base.name
