"""The search for a noise multiplier, and closed forms at the ends."""

import math
import re

import pytest
from dp_accounting import dp_event as dp
from scipy import optimize, stats

from prism_optax import accounting
from prism_optax.accounting import _calibration, _epsilon, _events, _gaussian


@pytest.mark.parametrize('first_step', [1e-5, 0.1])
@pytest.mark.parametrize('guess', [0.01, 1.0, 50.0])
def test_answer_is_as_near_as_promised_however_wrong_the_guess(
  guess, first_step
):
  """An accountant in closed form, epsilon 3 / sigma^2, of few values."""
  seen = []

  def spent(sigma):
    seen.append(sigma)
    return 3 / sigma**2

  sigma = _calibration._solve(spent, 2.0, guess, 5e-6, first_step)
  assert len(seen) < 40
  assert spent(sigma) <= 2.0
  assert sigma == pytest.approx(math.sqrt(1.5), rel=5e-6)
  assert spent(sigma * (1 - 6e-6)) > 2.0


def test_the_grid_holds_the_loss_of_all_steps():
  """Two million points, which fit in memory, reach so far, and not too far."""
  for sigma, probability, steps in ((1, 1, 1), (1, 1, 10_000), (0.03, 1e-3, 1)):
    event = accounting.dpsgd_event(sigma, probability, steps)
    reached = 1e6 * _events.affordable_interval(event, 1e-5)
    assert 1 < reached / _events.rough_epsilon(event, 1e-5) < 5
  of_one = dp.PoissonSampledDpEvent(0.1, dp.LaplaceDpEvent(0.5))
  assert 2e6 * _events.affordable_interval(of_one, 1e-5) == pytest.approx(48)
  assert _events.affordable_interval(dp.UnsupportedDpEvent(), 1e-5) == 0
  # Of the last one's loss, ten standard deviations from the mean.
  assert reached > math.log(1e-3) + (2 * 1.3 - 1) / (2 * 0.03**2)


def test_answer_meets_the_target_where_epsilon_jumps():
  """As it does where delta is near the accountant's own tail."""
  sigma = _calibration._solve(
    lambda sigma: math.inf if sigma < 1.7 else 0.0, 2.0, 1.0, 5e-6
  )
  assert sigma == pytest.approx(1.7, rel=1e-5)
  assert sigma >= 1.7
  with pytest.raises(ValueError, match=r'cannot be reached.*up to 1e\+09'):
    _calibration._solve(lambda s: 1.0, 0.5, 3.0, 5e-6)
  near_the_end = _calibration._solve(lambda s: 1.5e-3 / s, 1.0, 3e-3, 5e-6)
  assert near_the_end == pytest.approx(1.5e-3, rel=1e-5)
  assert 1e-3 < _calibration._solve(lambda s: 1e-9 / s, 1.0, 1.0, 5e-6) < 2e-3
  assert _calibration._refined(lambda s: 2.0, lambda s: 2.0, 2.0, 1.0) < 0.1
  jump = _calibration._refined(
    lambda s: math.inf if s < 1.7 else 0.0, lambda s: 3 / s**2, 2.0, 2.0
  )
  assert jump == pytest.approx(1.7, rel=1e-5)


@pytest.mark.parametrize('guess', [1.1, 1.2, 1.3])
@pytest.mark.parametrize('power', [1.5, 2.0, 3.0, 0.0, math.inf])
def test_a_slope_saves_values_and_never_accuracy(guess, power):
  """Epsilon 3 / sigma^2. What is known of its slope may be wrong by a half."""
  seen = []

  def fine(sigma):
    seen.append(sigma)
    return 3 / sigma**2

  sigma = _calibration._refined(fine, lambda s: 3 / s**power, 2.0, guess)
  assert sigma in seen
  assert fine(sigma) <= 2.0 < fine(sigma * (1 - 9e-6))
  assert len(seen) <= 5 or power in (0.0, math.inf)


def test_beyond_the_ends_of_the_scale():
  for mu, epsilon, delta in (
    (0.0, 1.0, 0), (math.inf, 1.0, 1), (1e5, 1.0, 1), (1e-5, 1.0, 0),
    (1.0, math.inf, 0),
  ):  # fmt: skip
    assert _gaussian.gaussian_delta(mu, epsilon) == delta
  # Of 1e-6 total variation is below delta: nothing is left to hide.
  for mu, delta, epsilon in (
    (0.0, 1e-5, 0), (1.0, 0.0, math.inf), (1.0, 1.0, 0), (1e-6, 1e-5, 0),
    (math.inf, 1e-5, math.inf), (1.0, _gaussian.gaussian_delta(1.0, 0.0), 0),
  ):  # fmt: skip
    assert accounting.gaussian_epsilon(mu, delta) == epsilon
  assert _gaussian.gaussian_mu(1.0, 0.0) == 0
  assert _gaussian.gaussian_mu(math.inf, 1e-5) == math.inf
  # epsilon 0: delta is the total variation distance, 2 Phi(mu / 2) - 1.
  mu = _gaussian.gaussian_mu(0.0, 0.2)
  assert 2 * stats.norm.cdf(mu / 2) - 1 == pytest.approx(0.2, rel=1e-12)
  with pytest.raises(ValueError, match='epsilon=nan'):
    _gaussian.gaussian_delta(1.0, math.nan)
  with pytest.raises(ValueError, match='epsilon=-1'):
    _gaussian.gaussian_mu(-1, 1e-5)
  with pytest.raises(ValueError, match='delta=1'):
    _gaussian.gaussian_mu(1.0, 1)


def test_a_cost_that_is_no_number_is_refused(monkeypatch):
  """Added to the others it would let everything pass."""
  budget = accounting.PrivacyBudget(1.0, 1e-5, composition='renyi')
  costs = 'prism_optax.accounting._filters.RenyiFilter._costs'
  monkeypatch.setattr(costs, lambda *_: (0.1, *5 * [math.nan]))
  with pytest.raises(ValueError, match='GaussianDpEvent'):
    budget.spend(dp.GaussianDpEvent(9.0), 'a')


def test_what_is_kept_of_an_event_does_not_grow():
  events = [dp.GaussianDpEvent(1.0)]
  kept = _events.frozen(dp.SelfComposedDpEvent(dp.ComposedDpEvent(events), 2))
  events.append(events[0])
  assert len(kept.event.events) == 1


def test_statement_of_the_noise_as_drawn_holds_at_the_delta_it_says():
  event, delta = accounting.dpsgd_event(0.6, 1e-3, 1000), 1e-5
  entries = 1e10  # More than most have: drawn noise adds 5e-7 to delta.
  ideal, drawn = (
    accounting.privacy_statement(event, delta, accountant='rdp', entries=x)
    for x in (None, entries)
  )
  assert drawn.endswith(', noise as drawn')
  assert '1e-05' in drawn
  spent, shown = (
    float(re.search(r'<= ([0-9.]+)', x)[1]) for x in (ideal, drawn)
  )
  assert spent < shown < 1.1 * spent

  # Without entries nothing is added; with too many no number overflows.
  assert _epsilon.release_guarantee(2.0, delta, 0) == (2.0, delta)
  assert _epsilon.release_guarantee(1e3, delta, 1e20)[1] == 1

  # Of all deltas of ideal noise, the largest to which drawn noise adds no more.
  def with_drawn(x):
    ideal = accounting.epsilon(event, x, accountant='rdp')
    return _epsilon.release_guarantee(ideal, x, entries)

  left = optimize.brentq(lambda x: with_drawn(x)[1] - delta, delta / 2, delta)
  assert with_drawn(left)[0] <= shown < with_drawn(left)[0] + 2e-3
  # The terms of the derivation, one entry, at epsilon and delta of zero:
  # tau + beta + nu + beta, 5e-17, 1e-20, 1e-19 and 1e-20.
  shift, added = _epsilon.release_guarantee(0.0, 0.0, 1)
  assert math.isclose(added, 5e-17 + 1e-19 + 2e-20, rel_tol=1e-5)
  # Bernstein: of so much the probability is 1e-20; summands are up to 4e-9.
  nats, moved = math.log(1e20), shift / 2
  assert moved**2 / (2 * (1.1e-23 + 4e-9 * moved / 3)) == pytest.approx(
    nats, rel=0.01
  )
  # Of many the deviation is more than the mean; what lies far out adds to it.
  shift, _ = _epsilon.release_guarantee(0.0, 0.0, 1e10)
  deviation = math.sqrt(2e10 * (1.1e-23 + 2e-9 * 2e-9**2) * nats)
  mean = 1e10 * (1.1e-23 + 5e-17) + 8e-9 / 3 * nats
  assert shift / 2 == pytest.approx(mean + deviation, rel=1e-6)
  # Where it takes two fifths of epsilon, and a third of delta.
  ideal = _calibration._ideal_target(6e-5, delta, 7e10)
  drawn = _epsilon.release_guarantee(*ideal, 7e10)
  assert 5e-5 < drawn[0] <= 6e-5 * (1 + 1e-9)
  assert 0.9 * delta < drawn[1] <= delta
  assert '(PLD)' in accounting.privacy_statement(dp.GaussianDpEvent(9.0), delta)
  # As SECURITY.md has it, of a million numbers, which a budget leaves out.
  most, total = _epsilon.release_guarantee(8.0, delta, 10**6)
  assert most - 8 < 1e-6
  assert total - delta < 1e-9
