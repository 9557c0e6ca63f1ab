"""The comparison is fair: baselines do what their papers say."""

import dataclasses
import functools
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / 'examples'))

from benchmarks import (
  baselines,
  private_runs,
  small_decoder,
  utility,
  utility_tables,
)
from prism_optax import lora

ROWS, COLUMNS, RANK = 7, 5, 2


@pytest.fixture
def params():
  keys = jax.random.split(jax.random.key(0), 2)
  pair = {
    'lora_a': jax.random.normal(keys[0], (ROWS, RANK)),
    'lora_b': jax.random.normal(keys[1], (RANK, COLUMNS)),
  }
  return {'layers': [{'up': pair}]}


def release(stddev=0.0):
  return baselines.Release(1.0, 8, stddev, jax.random.key(1), 10, 5)


def z_of(params):
  pair = params['layers'][0]['up']
  return np.asarray(pair['lora_a'] @ pair['lora_b'])


def loss(params, target):
  pair = params['layers'][0]['up']
  return jnp.sum((pair['lora_a'] @ pair['lora_b'] - target) ** 2)


@functools.lru_cache
def trained(name, turn=None, steps=4, stddev=0.0):
  """Parameters after some steps, begun in the gauge of a turn of scale."""
  keys = jax.random.split(jax.random.key(0), 2)
  a = jax.random.normal(keys[0], (ROWS, RANK))
  b = jax.random.normal(keys[1], (RANK, COLUMNS))
  if turn is not None:
    k = jnp.array([[turn, 0.3], [0.0, 1.0]])
    a, b = a @ k, jnp.linalg.inv(k) @ b
  params = {'layers': [{'up': {'lora_a': a, 'lora_b': b}}]}
  method = baselines.METHODS[name]
  layout = lora.Layout()
  params = method.prepare(params, layout)
  tx = method.make(1e-2, release(stddev), params, layout)
  target = jax.random.normal(jax.random.key(5), (ROWS, COLUMNS))
  coordinates = method.coordinates

  @jax.jit
  def step(params, state):
    grads = jax.grad(loss)(params, target)
    grads = coordinates(params, release(stddev), layout)(grads)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  state = tx.init(params)
  for _ in range(steps):
    params, state = step(params, state)
  return params


FACTOR_METHODS = sorted(
  name
  for name, method in baselines.METHODS.items()
  if method.parameters == 'lora' and not method.correlated
)


@pytest.mark.slow
@pytest.mark.parametrize('name', FACTOR_METHODS)
def test_every_method_makes_the_loss_smaller(name, params):
  target = jax.random.normal(jax.random.key(5), (ROWS, COLUMNS))
  assert loss(trained(name), target) < loss(params, target)


@pytest.mark.parametrize('name', ['prism', 'lora-rite'])
def test_the_gauge_does_not_matter(name):
  """What LoRA-RITE is about, and what Adam has not."""
  one, other = z_of(trained(name)), z_of(trained(name, 3.0))
  # LoRA-RITE's basis is damped by 1e-6 of squares of order one.
  np.testing.assert_allclose(other, one, rtol=0, atol=1e-4)


def test_the_gauge_matters_to_adam():
  change = z_of(trained('dp-adamw', 3.0)) - z_of(trained('dp-adamw'))
  assert np.max(np.abs(change)) > 1e-2


def test_ffa_leaves_one_factor_alone(params):
  after = trained('ffa', stddev=0.5)
  before = params['layers'][0]['up']['lora_a']
  np.testing.assert_array_equal(after['layers'][0]['up']['lora_a'], before)
  example = jax.tree.map(jnp.ones_like, params)
  clipped = baselines.METHODS['ffa'].coordinates(params, release(), None)(
    example
  )
  # It takes no share of the norm either.
  assert not np.any(clipped['layers'][0]['up']['lora_a'])
  assert np.all(np.asarray(clipped['layers'][0]['up']['lora_b']) == 1)


def test_lora_plus_is_adam_with_a_faster_b(params):
  gradient = jax.tree.map(jnp.ones_like, params)
  adam, plus = optax.adam(1e-2), baselines.lora_plus(1e-2, release())
  slow, _ = adam.update(gradient, adam.init(params))
  fast, _ = plus.update(gradient, plus.init(params))
  slow, fast = (x['layers'][0]['up'] for x in (slow, fast))
  np.testing.assert_allclose(fast['lora_a'], slow['lora_a'], rtol=1e-6)
  np.testing.assert_allclose(fast['lora_b'], 6 * slow['lora_b'], rtol=1e-6)


def test_adamw_decayed_warms_up_and_decays(params):
  tx = baselines.adamw_decayed(0.5, release(), b1=0.8)
  state, seen = tx.init(params), []
  nothing = jax.tree.map(jnp.zeros_like, params)
  for gradient in (jax.tree.map(jnp.ones_like, params), nothing):
    updates, state = tx.update(gradient, state, params)
    seen.append(updates['layers'][0]['up']['lora_a'])
  weight = params['layers'][0]['up']['lora_a']
  # The first step of Adam is one; 0.2 is let through, then 0.36. Adam's
  # 1 - 0.999 is off by 2e-5 of itself in float32.
  np.testing.assert_allclose(seen[0], -0.1 * (1 + weight), atol=1e-5)
  # Then the moments that are left, (0.8 * 0.2) / (1 - 0.8^2) over the root of
  # (0.999 * 0.001) / (1 - 0.999^2).
  left = 0.8 * 0.2 / (1 - 0.8**2) / (0.999e-3 / (1 - 0.999**2)) ** 0.5
  np.testing.assert_allclose(seen[1], -0.18 * (left + weight), atol=1e-5)


def test_adam_bc_takes_the_noise_out_of_the_second_moment(params):
  def first(stddev, size):
    tx = baselines.adam_bc(1.0, release(stddev))
    gradient = jax.tree.map(lambda x: jnp.full_like(x, size), params)
    updates, _ = tx.update(gradient, tx.init(params))
    return float(updates['layers'][0]['up']['lora_a'][0, 0])

  # After one step: m = g, v = g^2. Without noise that is Adam's unit step.
  assert first(0.0, 3.0) == pytest.approx(-1, rel=1e-4)
  assert first(4.0, 5.0) == pytest.approx(-5 / 3, rel=1e-4)


def test_noise_has_the_size_that_was_asked_for():
  tree = {'x': jnp.zeros((300, 300))}
  tx = baselines.noise(release(0.25))
  out, state = tx.update(tree, tx.init(tree))
  # Relative deviation of the root of a mean of 90,000 squares: 0.24 %.
  assert np.std(out['x']) == pytest.approx(0.25, rel=0.012)
  again, _ = tx.update(tree, state)
  assert np.max(np.abs(again['x'] - out['x'])) > 0.1


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
  frozen = small_decoder.initial(jax.random.key(0))
  given = private_runs.Problem(
    (rows,), (rows[:8],), (rows[:8],), frozen, small_decoder.row_losses, 0
  )
  run = private_runs.Run(
    method, 0.03, 3.0, 0, task='maths', length=4, rows=64, batch=32, steps=2,
    **utility.STARTS.get(method, {}),
  )  # fmt: skip
  (params, *_), *_ = private_runs.train(run, given, 1.0)
  before, _ = private_runs.start(run, given)
  moved = jax.tree.map(lambda x, y: np.max(np.abs(x - y)), before, params)
  assert np.isfinite(jax.tree.leaves(moved)).all()
  assert max(jax.tree.leaves(moved)) > 0


@pytest.mark.slow
@pytest.mark.parametrize('method', ['prism', 'dp-adamw'])
def test_a_decoder_learns_what_it_is_trained_on(method):
  """The way of a run through the decoder, on a few made-up rows."""
  rng = np.random.default_rng(0)
  rows = np.tile(rng.integers(3, 40, 13), (64, 1)).astype(np.int32)
  frozen = small_decoder.initial(jax.random.key(0))
  given = private_runs.Problem(
    (rows,), (rows[:8],), (rows[:8],), frozen, small_decoder.row_losses, 0
  )
  run = private_runs.Run(
    method, 0.03, None, 0, task='maths', length=12, rows=64, batch=32, steps=8
  )
  (params, *_), frozen, _ = private_runs.train(run, given, 0.0)
  before, _ = private_runs.start(run, given)
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
