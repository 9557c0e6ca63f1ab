"""Noise and cost of a release: the published figures and exact inversion."""

import math

import dp_accounting
import pytest

from prism_optax import accounting, inference
from prism_optax.accounting import _gaussian

Relation = accounting.NeighboringRelation
REPLACE, ADD = Relation.REPLACE_ONE, Relation.ADD_OR_REMOVE_ONE
DELTA = 1e-5


def test_classic_stddev_is_the_published_one_and_analytic_is_smaller():
  classic = inference.gaussian_stddev(1.0, DELTA, 1.0, method='classic')
  assert classic == pytest.approx(4.8448, abs=5e-5)
  analytic = inference.gaussian_stddev(1.0, DELTA, 1.0)
  assert analytic == pytest.approx(3.7306, abs=5e-5)


@pytest.mark.parametrize('epsilon', [0.01, 0.3, 1.0, 3.0, 10.0, 100.0])
@pytest.mark.parametrize('delta', [1e-10, 1e-5, 1e-2, 0.4])
@pytest.mark.parametrize('sensitivity', [1.0, 2.0, 0.37])
def test_analytic_stddev_inverts_the_exact_delta(epsilon, delta, sensitivity):
  stddev = inference.gaussian_stddev(epsilon, delta, sensitivity)
  found = _gaussian.gaussian_delta(sensitivity / stddev, epsilon)
  assert found == pytest.approx(delta, rel=1e-10)
  less = _gaussian.gaussian_delta(sensitivity / (stddev * 0.999), epsilon)
  assert less > delta


def test_stddev_is_proportional_to_the_sensitivity():
  for method in ('classic', 'analytic'):
    one = inference.gaussian_stddev(0.7, DELTA, 1.0, method=method)
    two = inference.gaussian_stddev(0.7, DELTA, 2.0, method=method)
    assert two == pytest.approx(2 * one, rel=1e-15)
    assert inference.gaussian_stddev(0.7, DELTA, 0.0, method=method) == 0


def test_classic_is_refused_where_it_falls_short():
  """Proved below 1, true for some way above, false at 10."""
  for epsilon in (0.01, 1.0, 4.0):
    classic = inference.gaussian_stddev(epsilon, DELTA, 1.0, method='classic')
    mu = 1 / classic
    assert _gaussian.gaussian_delta(mu, epsilon) <= DELTA
  with pytest.raises(ValueError, match="'classic' is not enough.*epsilon=10"):
    inference.gaussian_stddev(10, DELTA, 1.0, method='classic')


def test_sensitivity_follows_from_the_relation():
  assert inference.hidden_state_sensitivity(0.5, REPLACE) == 1.0
  assert inference.hidden_state_sensitivity(0.5, ADD) == 0.5
  special = Relation.REPLACE_SPECIAL
  assert inference.hidden_state_sensitivity(0.5, special) == 0.5


@pytest.mark.parametrize(
  ('relation', 'count', 'expected', 'digits'),
  [
    (ADD, 1, 0.75, 2),
    (ADD, 10, 2.69, 2),
    (ADD, 100, 10.4, 1),
    (REPLACE, 1, 1.61, 2),
    (REPLACE, 10, 5.98, 2),
    # The accountant's grid grows with the releases.
    pytest.param(REPLACE, 100, 25.4, 1, marks=pytest.mark.slow),
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


def test_a_block_costs_one_release_whatever_its_length():
  block = inference.release_event(4.8448, 1.0, REPLACE)
  tokens = inference.release_event(4.8448, 1.0, REPLACE, 256)
  budget = accounting.PrivacyBudget(60.0, DELTA)
  assert budget.spend(block, 'block') == pytest.approx(1.61, abs=5e-3)
  assert budget.spend(tokens, 'tokens') == pytest.approx(49.2, abs=5e-2)


def test_discrete_noise_is_concentrated_privacy():
  event = inference.release_event(3.0, 1.5, REPLACE, noise='discrete')
  assert event == dp_accounting.dp_event.ZCDpEvent(0.5)  # mu = 3 / 3.
  many = inference.release_event(3.0, 1.5, REPLACE, 7, noise='discrete')
  rdp = accounting.epsilon(many, DELTA, accountant='rdp')
  # Never below the exact figure of continuous noise, nor far above.
  exact = accounting.gaussian_epsilon(math.sqrt(7), DELTA)
  assert exact < rdp < 1.1 * exact
  # A budget that begins with it takes it, and continuous noise after it.
  budget = accounting.PrivacyBudget(60.0, DELTA)
  assert budget.spend(many, 'a') > exact
  budget.spend(inference.release_event(3.0, 1.5, REPLACE), 'a')


def test_a_calibrated_release_uses_up_the_budget_it_was_calibrated_for():
  for relation in Relation:
    sensitivity = inference.hidden_state_sensitivity(0.3, relation)
    stddev = inference.gaussian_stddev(1.0, DELTA, sensitivity)
    event = inference.release_event(stddev, 0.3, relation)
    budget = accounting.PrivacyBudget(1.0, DELTA)
    assert budget.spend(event, 'a') == pytest.approx(1.0, rel=1e-9)
    with pytest.raises(accounting.BudgetExceeded):
      budget.spend(event, 'a')


def test_without_noise_there_is_no_budget_that_pays():
  for noise in ('gaussian', 'discrete'):
    event = inference.release_event(0.0, 1.0, ADD, noise=noise)
    with pytest.raises(accounting.BudgetExceeded):
      accounting.PrivacyBudget(100.0, DELTA).spend(event, 'a')


@pytest.mark.parametrize(
  ('call', 'message'),
  [
    (lambda: inference.gaussian_stddev(0.0, DELTA, 1.0), 'epsilon=0.0'),
    (lambda: inference.gaussian_stddev(math.nan, DELTA, 1.0), 'epsilon=nan'),
    (lambda: inference.gaussian_stddev(1.0, 0.0, 1.0), 'delta=0.0'),
    (lambda: inference.gaussian_stddev(1.0, 1.0, 1.0), 'delta=1.0'),
    (lambda: inference.gaussian_stddev(1.0, DELTA, -1.0), 'sensitivity=-1.0'),
    (
      lambda: inference.gaussian_stddev(1.0, DELTA, 1.0, method='exact'),
      "method='exact'",
    ),
    (lambda: inference.hidden_state_sensitivity(0.0, ADD), 'l2_clip_norm=0.0'),
    (
      lambda: inference.hidden_state_sensitivity(1.0, 'replace'),
      "neighboring_relation='replace'",
    ),
    (lambda: inference.release_event(-1.0, 1.0, ADD), 'stddev=-1.0'),
    (lambda: inference.release_event(1.0, math.inf, ADD), 'l2_clip_norm=inf'),
    (lambda: inference.release_event(1.0, 1.0, ADD, 0), 'count=0'),
    (
      lambda: inference.release_event(1.0, 1.0, ADD, noise='laplace'),
      "noise='laplace'",
    ),
  ],
)
def test_bad_arguments_are_named(call, message):
  with pytest.raises(ValueError, match=message):
    call()
