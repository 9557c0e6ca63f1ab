"""Calibration: the published multipliers, and never less privacy."""

import math

import pytest

from prism_optax import accounting
from prism_optax.accounting import _epsilon

Relation = accounting.NeighboringRelation
Q, STEPS, DELTA = 64 / 9919, 300, 1e-5
# A run of few steps and a small target: the accountant is quick.
TARGET, SHORT = 0.3, (0.1, 5)
PUBLISHED = [
  (6.0, 'pld', 0.516),
  (6.0, 'rdp', 0.553),
  (3.0, 'pld', 0.641),
  (3.0, 'rdp', 0.699),
]


def spent(sigma, **kwargs):
  event = accounting.dpsgd_event(sigma, Q, STEPS)
  return accounting.epsilon(event, DELTA, **kwargs)


@pytest.fixture(scope='module')
def plain():
  return accounting.calibrate_noise_multiplier(TARGET, DELTA, *SHORT)


@pytest.mark.parametrize(('target', 'accountant', 'expected'), PUBLISHED)
def test_published_multipliers_are_the_smallest(target, accountant, expected):
  """To their three digits, on a grid that sees them: the search is below."""
  grid = {'value_discretization_interval': 1e-3, 'accountant': accountant}
  assert spent(expected + 5e-4, **grid) <= target
  assert spent(expected - 5e-4, **grid) > target


def test_multiplier_of_a_short_run_meets_the_target(plain):
  event, less = (
    accounting.dpsgd_event(sigma, *SHORT)
    for sigma in (plain, plain * (1 - 1e-5))
  )
  assert accounting.epsilon(event, DELTA) <= TARGET
  assert accounting.epsilon(less, DELTA) > TARGET


def test_replace_one_needs_more_noise_and_meets_the_target(plain):
  relation = Relation.REPLACE_ONE
  sigma = accounting.calibrate_noise_multiplier(
    TARGET, DELTA, *SHORT, neighboring_relation=relation
  )
  event = accounting.dpsgd_event(sigma, *SHORT)
  found = accounting.epsilon(event, DELTA, neighboring_relation=relation)
  assert 0.99 < found / TARGET <= 1
  assert sigma > 1.2 * plain


@pytest.mark.slow
def test_truncated_batches_need_more_noise_and_meet_the_target(plain):
  public = {'truncated_batch_size': 40, 'dataset_size': 300}
  sigma = accounting.calibrate_noise_multiplier(TARGET, DELTA, *SHORT, **public)
  event = accounting.dpsgd_event(sigma, *SHORT, **public)
  assert 0.999 < accounting.epsilon(event, DELTA) / TARGET <= 1
  assert sigma > plain


def test_one_release_without_sampling_is_the_exact_gaussian():
  """3.7306 inverts the exact formula of Balle and Wang at (1, 1e-5)."""
  sigma = accounting.calibrate_noise_multiplier(1.0, DELTA, 1.0, 1)
  # The grid of the accountant is 1e-4 wide.
  assert sigma == pytest.approx(3.730632, rel=1e-4)


@pytest.mark.parametrize('first_step', [1e-5, 0.1])
@pytest.mark.parametrize('guess', [0.01, 1.0, 50.0])
def test_answer_is_as_near_as_promised_however_wrong_the_guess(
  guess, first_step
):
  """An accountant in closed form, epsilon 3 / sigma^2."""

  def spent(sigma):
    return 3 / sigma**2

  sigma = _epsilon._solve(spent, 2.0, guess, 5e-6, first_step)
  assert spent(sigma) <= 2.0
  assert sigma == pytest.approx(math.sqrt(1.5), rel=5e-6)
  assert spent(sigma * (1 - 6e-6)) > 2.0


def test_answer_meets_the_target_where_epsilon_jumps():
  """As it does where delta is near the accountant's own tail."""

  def spent(sigma):
    return math.inf if sigma < 1.7 else 0.0

  sigma = _epsilon._solve(spent, 2.0, 1.0, 5e-6)
  assert spent(sigma) == 0
  assert sigma == pytest.approx(1.7, rel=1e-5)


def test_the_search_ends_where_no_noise_is_enough():
  with pytest.raises(ValueError, match='cannot be reached'):
    _epsilon._solve(lambda s: 1.0, 0.5, 3.0, 5e-6)


@pytest.mark.parametrize(
  ('arguments', 'message'),
  [
    ((0.0, DELTA, 0.1, 3), 'target_epsilon.*0.0'),
    ((-1.0, DELTA, 0.1, 3), 'target_epsilon.*-1.0'),
    ((math.nan, DELTA, 0.1, 3), 'target_epsilon.*nan'),
    ((math.inf, DELTA, 0.1, 3), 'target_epsilon.*inf'),
    ((1.0, 0.0, 0.1, 3), 'delta.*0.0'),
    ((1.0, 1.0, 0.1, 3), 'delta.*1.0'),
    ((1.0, DELTA, 0.0, 3), 'sampling_probability.*0.0'),
    ((1.0, DELTA, 1.2, 3), 'sampling_probability.*1.2'),
    ((1.0, DELTA, 0.1, 0), 'steps.*0'),
  ],
)
def test_bad_arguments_are_named(arguments, message):
  with pytest.raises(ValueError, match=message):
    accounting.calibrate_noise_multiplier(*arguments)


def test_a_target_out_of_reach_says_so():
  # Below what the accountant's tail can show, at any noise.
  with pytest.raises(ValueError, match=r'target_epsilon=1e-06.*reached'):
    accounting.calibrate_noise_multiplier(1e-6, 1e-9, 0.01, 100)


def test_an_analysis_that_is_missing_says_so():
  with pytest.raises(ValueError, match=r"'rdp' has no analysis.*REPLACE_ONE"):
    accounting.calibrate_noise_multiplier(
      1.0,
      DELTA,
      0.1,
      3,
      accountant='rdp',
      neighboring_relation=Relation.REPLACE_ONE,
    )
  with pytest.raises(ValueError, match=r"'rdp' has no analysis.*Truncated"):
    accounting.calibrate_noise_multiplier(
      1.0,
      DELTA,
      0.1,
      3,
      accountant='rdp',
      truncated_batch_size=40,
      dataset_size=300,
    )


def test_nothing_is_logged_on_the_way(caplog):
  """Fractional orders of Renyi divergences would warn here, line upon line."""
  accounting.calibrate_noise_multiplier(TARGET, 1e-4, 128 / 900, 5)
  assert not caplog.records


def test_a_target_is_met_by_the_noise_as_it_is_drawn():
  """Also where what is drawn costs a third of delta."""
  entries, q, steps = 7e10, 1e-3, 1000
  found = {
    x: accounting.calibrate_noise_multiplier(
      2.0, 1e-5, q, steps, accountant='rdp', entries=x
    )
    for x in (None, entries)
  }
  assert found[None] < found[entries]
  spent = accounting.epsilon(
    accounting.dpsgd_event(found[entries], q, steps),
    1e-5,
    accountant='rdp',
    entries=entries,
  )
  assert 1.9 < spent <= 2.0
  with pytest.raises(ValueError, match=r'adds .* to delta'):
    accounting.calibrate_noise_multiplier(
      2.0, 1e-5, q, steps, accountant='rdp', entries=1e12
    )
  with pytest.raises(ValueError, match=r'adds .* to epsilon'):
    accounting.calibrate_noise_multiplier(
      1e-9, 1e-4, q, steps, accountant='rdp', entries=1e9
    )
