"""What is claimed of a run that stops early holds against the best rule.

Releases are Gaussian sums without sampling, of which all is known: after t
steps the log of the likelihood ratio of two neighbours is normal with mean and
half its variance ``t / (2 sigma^2)``. An attacker decides after each step
whether to stop. Backwards from the last step their best rule is a maximum of
two numbers at each value of the ratio (Bellman).
"""

import functools
import pathlib
import re

import numpy as np
import optax
import pytest
import scipy.stats

from prism_optax import accounting
from tests import cases
from tests.cases import PARAMS, N

DELTA, STEPS, SIGMA = 1e-5, 64, 8.0
# Values of the log ratio: 12 is ten standard deviations of the last one.
SPACING = 0.01
RATIOS = np.arange(-12, 12, SPACING)


@functools.cache
def make(stop):
  return cases.make(
    optax.sgd(0.1), expected_batch_size=N, noise_multiplier=SIGMA, steps=STEPS,
    delta=DELTA, stop=stop, prng_key=None,
  )  # fmt: skip


def largest_delta(epsilon_of):
  """The delta that the claim has: over all stopping rules and all sets S.

  It is the largest ``P(S) - integral over S of e^epsilon dQ``, where epsilon is
  the one that is claimed for the step in which the run stopped.
  """
  gains = [
    np.maximum(1 - np.exp(np.minimum(epsilon_of(t) - RATIOS, 700.0)), 0)
    for t in range(1, STEPS + 1)
  ]
  half = round(2 / SPACING)  # Sixteen standard deviations of one step.
  moves = SPACING * np.arange(-half, half + 1)
  law = scipy.stats.norm.pdf(moves, 0.5 / SIGMA**2, 1 / SIGMA)
  law /= law.sum()
  value = gains[-1]
  for gain in [*gains[-2::-1], np.zeros_like(RATIOS)]:
    # Beyond the ends the value is that of the ends: near none, and all.
    padded = np.pad(value, half, mode='edge')
    # From x to x + move, so the law is turned round by the correlation.
    value = np.maximum(gain, np.correlate(padded, law, 'valid'))
  return np.interp(0.0, RATIOS, value)


@pytest.mark.parametrize('stop', ['planned', 'adaptive'])
def test_what_is_claimed_holds_for_any_stop(stop):
  private = make(stop)
  stops = private.parts.settings.stops
  by_stop = {t: private.epsilon(t) for t in stops}
  found = largest_delta(lambda t: by_stop[min(x for x in stops if x >= t)])
  assert found <= DELTA * (1 + 1e-3)  # Of the grid of ratios.
  assert found > 0.8 * DELTA  # The bound is nearly met: the attack is strong.


def shown(private, done, **options):
  state = private.init(PARAMS)._replace(step=np.asarray(done))
  statement = private.statement(state, **options)
  return float(re.match(r'epsilon <= (\S+) at', statement)[1]), statement


def test_a_statement_before_the_last_step():
  private = make('planned')
  whole, _ = shown(private, STEPS)
  assert whole == pytest.approx(private.epsilon(), abs=2e-3)
  early, words = shown(private, 20)
  assert early == whole
  assert words.endswith('20 of 64 steps (epsilon is for all 64)')
  # Also where a ledger is ahead of a state that was restored.
  for done, options in ((20, {}), (9, {'released_steps': 20})):
    fixed, words = shown(private, done, stop_was_fixed=True, **options)
    assert fixed == pytest.approx(private.epsilon(20), abs=2e-3)
    assert fixed < whole
    assert words.endswith(
      '20 of 64 steps (declared: the stop was fixed beforehand)'
    )
  _, words = shown(private, STEPS, stop_was_fixed=True)
  assert words.endswith('64 of 64 steps')
  with pytest.raises(ValueError, match='at most 64 steps, got 65'):
    shown(private, 1, released_steps=65)


def test_a_statement_with_stops_that_were_fixed_beforehand():
  private = make('adaptive')
  # Public, and they end with the last step.
  assert private.parts.settings.stops == (4, 8, 16, 32, 64)
  early, words = shown(private, 20)
  assert words.endswith(
    '20 of 64 steps (epsilon is for 32, one of 5 possible stops)'
  )
  assert 'at delta = 1e-05' in words
  assert early == shown(private, 32)[0] < shown(private, 33)[0]
  assert early == pytest.approx(private.epsilon(20), abs=2e-3)
  wanted = accounting.gaussian_epsilon(np.sqrt(32) / SIGMA, DELTA / 5)
  assert early == pytest.approx(wanted, abs=3e-3)
  with pytest.raises(ValueError, match="stop='adaptive'.*stop_was_fixed=True"):
    shown(private, 20, stop_was_fixed=True)
  # Halves are rounded up, and one step has one stop.
  for steps, stops in ((300, (19, 38, 75, 150, 300)), (1, (1,))):
    made = cases.make(optax.sgd(0.1), steps=steps, stop='adaptive')
    assert made.parts.settings.stops == stops


@pytest.mark.slow
def test_the_page_has_these_figures():
  page = pathlib.Path(__file__).parents[2] / 'docs/explanation/stops.md'
  rows = re.findall(r'^\| (?:up to )?(\d+) \| (.*) \| (.*) \|$',
                    page.read_text('utf-8'), re.M)  # fmt: skip
  assert [int(t) for t, *_ in rows] == [300, 150, 75, 38, 19]

  def epsilon(steps, delta):
    event = accounting.dpsgd_event(0.8, 64 / 9919, steps)
    return pytest.approx(accounting.epsilon(event, delta), abs=6e-3)

  for steps, planned, adaptive in rows:
    assert float(planned) == epsilon(300, 1e-5)
    assert float(adaptive) == epsilon(int(steps), 1e-5 / 5)
