"""Calibration: the smallest multiplier, and never less privacy."""

import pytest

from prism_optax import accounting

REPLACE = accounting.NeighboringRelation.REPLACE_ONE
DELTA = 1e-5
calibrate = accounting.calibrate_noise_multiplier
# A run of few steps and a small target: the accountant is quick.
TARGET, SHORT = 0.3, (0.1, 5)


@pytest.mark.slow
def test_multiplier_of_a_short_run_meets_the_target(caplog):
  plain = calibrate(TARGET, DELTA, *SHORT)
  spent, more = (
    accounting.epsilon(accounting.dpsgd_event(sigma, *SHORT), DELTA)
    for sigma in (plain, plain * (1 - 1e-5))
  )
  assert spent <= TARGET < more
  assert not caplog.records  # Nothing is logged on the way.


@pytest.mark.slow
@pytest.mark.parametrize(
  ('cut', 'relation', 'more'),
  [
    ({}, {'neighboring_relation': REPLACE}, 1.2),
    ({'truncated_batch_size': 40, 'dataset_size': 300}, {}, 1),
  ],
)
def test_other_mechanisms_need_more_noise_and_meet_the_target(
  cut, relation, more
):
  sigma = calibrate(TARGET, DELTA, *SHORT, **cut, **relation)
  event = accounting.dpsgd_event(sigma, *SHORT, **cut)
  found = accounting.epsilon(event, DELTA, **relation)
  assert 0.99 < found / TARGET <= 1
  assert sigma > calibrate(TARGET, DELTA, *SHORT) * more


def test_a_target_is_met_by_the_noise_as_it_is_drawn():
  """Also where what is drawn costs a third of delta."""
  entries, q, steps = 7e10, 1e-3, 1000
  ideal, found = (
    calibrate(2.0, DELTA, q, steps, accountant='rdp', entries=x)
    for x in (None, entries)
  )
  assert ideal < found
  event = accounting.dpsgd_event(found, q, steps)
  spent = accounting.epsilon(event, DELTA, accountant='rdp', entries=entries)
  assert 1.9 < spent <= 2.0
