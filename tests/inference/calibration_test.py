"""Noise and cost of a release: the published figures, and refusals.

Laws of these functions are in `tests/properties/inference_test.py`.
"""

import math

import numpy as np
import pytest

from prism_optax import accounting, inference

Relation = accounting.NeighboringRelation
REPLACE, ADD = Relation.REPLACE_ONE, Relation.ADD_OR_REMOVE_ONE
DELTA = 1e-5
stddev_of = inference.gaussian_stddev


def test_classic_stddev_is_the_published_one_and_analytic_is_smaller():
  classic = stddev_of(1.0, DELTA, 1.0, method='classic')
  assert classic == pytest.approx(4.8448, abs=5e-5)
  assert stddev_of(1.0, DELTA, 1.0) == pytest.approx(3.7306, abs=5e-5)
  assert stddev_of(1.0, DELTA, 2.0, method='classic') == 2 * classic
  assert stddev_of(1.0, DELTA, 0.0) == 0
  # Proved below 1, true for some way above, false at 10.
  for epsilon in (0.01, 1.0, 4.0):
    mu = 1 / stddev_of(epsilon, DELTA, 1.0, method='classic')
    assert accounting.gaussian_epsilon(mu, DELTA) <= epsilon
  with pytest.raises(ValueError, match="'classic' is not enough.*epsilon=10"):
    stddev_of(10, DELTA, 1.0, method='classic')


@pytest.mark.parametrize(
  ('relation', 'count', 'expected', 'digits'),
  [
    (ADD, 1, 0.75, 2),
    (REPLACE, 10, 5.98, 2),
    # The accountant's grid grows with the releases.
    pytest.param(ADD, 256, 18.9, 1, marks=pytest.mark.slow),
    pytest.param(REPLACE, 256, 49.2, 1, marks=pytest.mark.slow),
  ],
)
def test_releases_cost_what_they_cost(relation, count, expected, digits):
  """A clip of 1 at the classic stddev; 256 are the tokens of one request."""
  event = inference.release_event(4.8448, 1.0, relation, count)
  spent = accounting.PrivacyBudget(60.0, DELTA).spend(event, 'alice')
  assert round(spent, digits) == expected
  # The accountant agrees, as far as its grid goes.
  assert accounting.epsilon(event, DELTA) == pytest.approx(spent, rel=1e-3)


def test_discrete_noise_costs_a_little_more():
  many = inference.release_event(3.0, 1.5, REPLACE, 7, noise='discrete')
  exact = accounting.gaussian_epsilon(math.sqrt(7), DELTA)
  rdp = accounting.epsilon(many, DELTA, accountant='rdp')
  assert exact < rdp < 1.1 * exact
  # A budget that begins with it takes it, and continuous noise after it.
  budget = accounting.PrivacyBudget(60.0, DELTA)
  assert budget.spend(many, 'a') > exact
  budget.spend(inference.release_event(3.0, 1.5, REPLACE), 'a')
  for noise in ('gaussian', 'discrete'):
    event = inference.release_event(0.0, 1.0, ADD, noise=noise)
    with pytest.raises(accounting.BudgetExceeded):
      budget.spend(event, 'b')


event_of = inference.release_event
LEFT, RIGHT, HIDDEN = np.ones((5, 3)), np.ones((11, 3)), np.ones((2, 11))


@pytest.mark.parametrize(
  ('call', 'message'),
  [
    (lambda: stddev_of(0.0, DELTA, 1.0), 'epsilon=0.0'),
    (lambda: stddev_of(math.nan, DELTA, 1.0), 'epsilon=nan'),
    (lambda: stddev_of(1.0, 0.0, 1.0), 'delta=0.0'),
    (lambda: stddev_of(1.0, 1.0, 1.0), 'delta=1.0'),
    (lambda: stddev_of(1.0, DELTA, -1.0), 'sensitivity=-1.0'),
    (lambda: stddev_of(1.0, DELTA, 1.0, method='exact'), "method='exact'"),
    (lambda: inference.hidden_state_sensitivity(0.0, ADD), 'l2_clip_norm=0.0'),
    (
      lambda: inference.hidden_state_sensitivity(1.0, 'replace'),
      "neighboring_relation='replace'",
    ),
    (lambda: event_of(-1.0, 1.0, ADD), 'stddev=-1.0'),
    (lambda: event_of(1.0, math.inf, ADD), 'l2_clip_norm=inf'),
    (lambda: event_of(1.0, 1.0, ADD, 0), 'count=0'),
    (lambda: event_of(1.0, 1.0, ADD, noise='laplace'), "noise='laplace'"),
    (lambda: inference.lora_delta(HIDDEN, LEFT[:, 0], RIGHT), 'right'),
    (lambda: inference.lora_delta(HIDDEN[:, 1:], LEFT, RIGHT), 'right'),
    (lambda: inference.lora_delta(1.0, LEFT, RIGHT), 'right'),
  ],
)
def test_bad_arguments_are_named(call, message):
  with pytest.raises(ValueError, match=message):
    call()
