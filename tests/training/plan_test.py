"""Plans: the best signal over noise for the cost, from public numbers alone."""

import functools
import math

import jax
import jax.numpy as jnp
import pytest

from prism_optax import accounting, training

DELTA = 1e-5


def _signal(size, epsilon, steps, batch):
  """The most of a run: its noise is calibrated."""
  sigma = accounting.calibrate_noise_multiplier(
    epsilon, DELTA, batch / size, steps
  )
  return math.sqrt(steps) * batch / sigma


def _spent(size, signal, steps, batch):
  """Epsilon of a run with so much signal, from above: to 0.01 percent."""
  sigma = math.sqrt(steps) * batch / signal
  return accounting.epsilon(
    accounting.dpsgd_event(sigma, batch / size, steps),
    DELTA,
    value_discretization_interval=1e-3,
  )


@pytest.mark.slow
@pytest.mark.parametrize(
  ('size', 'epsilon', 'cost'), [(2_000, 1.0, 20_000), (2_000, 8.0, 200_000)]
)
def test_has_the_best_signal_that_its_cost_can_buy(size, epsilon, cost):
  plan = training.plan(
    size, target_epsilon=epsilon, delta=DELTA, example_gradients=cost
  )
  chosen = plan.chosen
  assert chosen.example_gradients <= cost
  # At least sixty steps: for a tenth more of signal each would spend more.
  mine = _signal(size, epsilon, chosen.steps, chosen.expected_batch_size)
  for steps in (60, 120, 240, 480):
    batch = min(cost // steps, size)
    assert _spent(size, mine / 0.9, steps, batch) > 1.001 * epsilon
  # The table is of the same numbers: to one percent, and never too good.
  for x in plan.alternatives:
    run = x.steps, x.expected_batch_size
    assert _spent(size, x.signal_over_noise / 1.0001, *run) <= epsilon
    assert _spent(size, x.signal_over_noise / 0.99, *run) > 1.001 * epsilon
  limit = _signal(size, epsilon, 1, size)
  assert plan.limit == pytest.approx(limit, rel=1e-3)


@pytest.mark.slow
def test_users_cost_all_their_records():
  give = functools.partial(
    training.plan, 500, target_epsilon=2.0, delta=1e-4, example_gradients=24_000
  )
  # Records could be 200 in a batch; most of them would buy nothing.
  plan = give()
  enough = math.floor(2 * plan.limit / math.sqrt(120))
  assert plan.chosen.expected_batch_size == enough < 200
  of_users = give(examples_per_user=5).chosen
  assert of_users.expected_batch_size == 40
  assert of_users.example_gradients == 24_000


def test_the_table_shows_the_advice():
  plan = training.plan(
    500, target_epsilon=2.0, delta=1e-4, params={'w': jnp.zeros(3)},
    memory_bytes=100.0, bytes_per_example=10.0, examples_per_user=2,
  )  # fmt: skip
  b = plan.chosen.expected_batch_size
  # Other steps for the same cost, and other costs of the same steps.
  wanted = [(30, 4), (60, 2), *((120, 2.0**i) for i in range(-2, 3))]
  wanted += [(240, 1 / 2), (480, 1 / 4)]
  found = [(x.steps, x.expected_batch_size) for x in plan.alternatives]
  assert found == [(steps, round(b * x)) for steps, x in wanted]
  # The users that fit, down to a power of two.
  assert plan.arguments['execution'].microbatch_size == 4
  (row,) = [row for row in str(plan).splitlines() if row.startswith('>')]
  assert row.split()[1:3] == [
    str(plan.chosen.steps),
    str(plan.chosen.expected_batch_size),
  ]


def test_warns_where_noise_hides_the_gradients():
  many = jax.ShapeDtypeStruct((400, 400), jnp.float32)
  with pytest.warns(UserWarning, match='50 records are few') as warned:
    plan = training.plan(
      50, target_epsilon=1.0, delta=1e-2, params=many, memory_bytes=70.0,
      bytes_per_example=10.0, example_gradients=120,
    )  # fmt: skip
  assert warned[0].filename == __file__  # It points at the call.
  assert plan.chosen.expected_batch_size == 1  # Never less.
  # All of it, padded to 7, just fits.
  assert plan.arguments['execution'].microbatch_size is None
