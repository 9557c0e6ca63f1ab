"""The plan accounts for what is run."""

import dataclasses
import math

import dp_accounting
import pytest
from dp_accounting import pld
from finetuning import privacy

PLAN = privacy.Plan(
  dataset_size=900,
  expected_batch_size=128,
  padded_size=150,
  steps=20,
  noise_multiplier=4.0,
  delta=1e-4,
)
# A billion numbers of noise: what they add shows in the tenth digit.
DRAWN = dataclasses.replace(PLAN, entries=5 * 10**7)


def _by_hand(event, delta):
  accountant = pld.PLDAccountant()
  return accountant.compose(event).get_epsilon(delta)


def test_epsilon_is_that_of_the_truncated_event():
  step = dp_accounting.TruncatedSubsampledGaussianDpEvent(
    900, 128 / 900, 150, 4.0
  )
  event = dp_accounting.SelfComposedDpEvent(step, 20)
  expected = _by_hand(event, 1e-4)
  assert PLAN.epsilon(20) == pytest.approx(expected, rel=1e-9)
  plain = dp_accounting.PoissonSampledDpEvent(
    128 / 900, dp_accounting.GaussianDpEvent(4.0)
  )
  uncut = _by_hand(dp_accounting.SelfComposedDpEvent(plain, 20), 1e-4)
  # The cut at two deviations is not free: forgetting it would show.
  assert expected > 1.02 * uncut
  whole = dataclasses.replace(PLAN, padded_size=904)
  assert whole.epsilon(20) == pytest.approx(uncut, rel=1e-9)
  assert PLAN.epsilon(0) == 0


@pytest.mark.slow
def test_calibration_meets_the_target_with_the_cut():
  # Few steps under much noise: their distributions have few points.
  asked = dataclasses.replace(PLAN, noise_multiplier=0.0, steps=4)
  plan = privacy.calibrate(asked, 0.15)
  assert 0.1499 < plan.epsilon(plan.steps) <= 0.15
  assert dataclasses.replace(plan, noise_multiplier=0.0) == asked
  # As drawn a little more noise is needed, and the target is met with it.
  drawn = privacy.calibrate(dataclasses.replace(asked, entries=10**9), 0.15)
  assert drawn.noise_multiplier > plan.noise_multiplier
  assert 0.1499 < drawn.epsilon(drawn.steps) <= 0.15


def test_a_target_out_of_reach_is_named():
  with pytest.raises(ValueError, match='epsilon'):
    privacy.calibrate(PLAN, -1.0)
  with pytest.raises(ValueError, match=r'epsilon.*cannot be reached'):
    privacy.calibrate(dataclasses.replace(PLAN, delta=1e-300), 1e-9)


def test_statement_is_the_librarys_with_the_noise_as_it_is_drawn():
  text = DRAWN.statement(15)
  assert text == (
    f'epsilon <= {privacy.round_up(DRAWN.epsilon(15)):.3f} at delta = 0.0001,'
    ' add-or-remove-one neighbours (PLD), Poisson sampling, noise as drawn,'
    ' unit: one record, 15 of 20 steps'
  )
  # Without entries it is of ideal noise, and does not say otherwise.
  assert 'drawn' not in PLAN.statement(15)


def test_a_delta_that_the_noise_as_it_is_drawn_uses_up_is_named():
  small = dataclasses.replace(DRAWN, delta=1e-9)
  with pytest.raises(ValueError, match='as it is drawn .*delta=1e-09'):
    small.epsilon(20)


def test_a_delta_that_means_nothing_is_refused():
  with pytest.raises(ValueError, match='delta < 1 / dataset_size'):
    dataclasses.replace(DRAWN, delta=1 / 900).statement(20)


def test_what_is_printed_is_never_less_than_spent():
  assert privacy.round_up(1.00001) == 1.001
  assert privacy.round_up(2.0) == 2.0
  assert privacy.round_up(math.inf) == math.inf
