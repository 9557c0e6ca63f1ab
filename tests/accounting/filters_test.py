"""Privacy filters: what each composition charges, and what it refuses."""

import math

import dp_accounting
import pytest
from dp_accounting import dp_event, rdp

from prism_optax import accounting
from prism_optax.accounting import _gaussian

Gaussian = dp_accounting.GaussianDpEvent
Laplace = dp_accounting.LaplaceDpEvent
Relation = accounting.NeighboringRelation
DELTA = 1e-5
CLASSIC = Gaussian(4.8448)  # The classic formula at epsilon 1, delta 1e-5.


def poisson(sigma, q):
  return dp_accounting.PoissonSampledDpEvent(q, Gaussian(sigma))


@pytest.mark.parametrize(
  ('sensitivity', 'expected'),
  [(1, (0.75, 2.69, 10.4)), (2, (1.61, 5.98, 25.4))],
)
def test_gaussian_releases_are_charged_exactly(sensitivity, expected):
  event = Gaussian(4.8448 / sensitivity)
  budget = accounting.PrivacyBudget(30.0, DELTA)
  found = [
    budget.spend(event, 'a', count=count)
    for count in (1, 9, 90)  # One, ten, a hundred in all.
  ]
  assert [round(found[0], 2), round(found[1], 2), round(found[2], 1)] == list(
    expected
  )
  mu = sensitivity / 4.8448
  assert found[2] == pytest.approx(
    accounting.gaussian_epsilon(10 * mu, DELTA), rel=1e-9
  )


def test_tokens_are_releases():
  """256 tokens are charged 256 times, where a request costs epsilon 0.75."""
  budget = accounting.PrivacyBudget(50.0, DELTA)
  assert round(budget.spend(CLASSIC, 'a', count=256), 1) == 18.9
  doubled = accounting.PrivacyBudget(
    50.0, DELTA, neighboring_relation=Relation.REPLACE_ONE
  )
  assert round(doubled.spend(CLASSIC, 'a', count=256), 1) == 49.2


def test_heterogeneous_gaussians_add_their_inverse_variances():
  budget = accounting.PrivacyBudget(20.0, DELTA)
  budget.spend(Gaussian(3.0), 'a')
  nested = dp_accounting.ComposedDpEvent(
    [dp_accounting.SelfComposedDpEvent(Gaussian(7.0), 4), Gaussian(5.0)]
  )
  spent = budget.spend(nested, 'a', count=2)
  mu = math.sqrt(1 / 9 + 2 * (4 / 49 + 1 / 25))
  assert spent == pytest.approx(accounting.gaussian_epsilon(mu, DELTA))


def test_a_budget_for_one_release_takes_one_and_no_more():
  """Calibration and budget meet exactly: rounding refuses nothing."""
  for epsilon in (0.3, 1.0, 2.7, 10.0):
    for count in (1, 7, 100):
      sigma = math.sqrt(count) / _gaussian.gaussian_mu(epsilon, DELTA)
      budget = accounting.PrivacyBudget(epsilon, DELTA)
      assert budget.how_many_more(Gaussian(sigma), 'a') == count
      for _ in range(count):
        spent = budget.spend(Gaussian(sigma), 'a')
        assert spent <= epsilon
      assert spent == pytest.approx(epsilon, rel=1e-9)
      with pytest.raises(accounting.BudgetExceeded):
        budget.spend(Gaussian(sigma), 'a')


def test_renyi_orders_share_delta():
  """Each of K orders is a filter for delta / K; the best may then be chosen."""
  budget = accounting.PrivacyBudget(8.0, DELTA, composition='renyi')
  event, count = poisson(1.0, 0.01), 500
  spent = budget.spend(event, 'a', count=count)
  orders = budget._filters['session']['renyi']._orders
  assert len(orders) == 6
  alone = []
  for order in orders:
    accountant = rdp.RdpAccountant([order]).compose(event, count)
    alone.append(accountant.get_epsilon(DELTA / 6))
  assert spent == pytest.approx(min(alone), rel=1e-12)


@pytest.mark.parametrize(
  'event',
  [
    CLASSIC,
    Laplace(3.0),
    poisson(1.0, 0.01),
    dp_event.ZCDpEvent(0.02),
    dp_accounting.ComposedDpEvent([CLASSIC, poisson(0.8, 0.02)]),
  ],
)
@pytest.mark.parametrize('count', [1, 30, 400])
def test_renyi_filter_is_never_below_the_accountants(event, count):
  """A filter pays for adaptivity: more than RDP of a fixed composition."""
  budget = accounting.PrivacyBudget(200.0, DELTA, composition='renyi')
  spent = budget.spend(event, 'a', count=count)
  fixed = accounting.epsilon(
    dp_accounting.SelfComposedDpEvent(event, count), DELTA, accountant='rdp'
  )
  assert spent >= fixed


def test_renyi_filter_costs_little_where_the_budget_is_used_up():
  """Orders are chosen for a full budget: there the price is some percent."""
  for event in (Gaussian(20.0), poisson(2.0, 0.01), Laplace(20.0)):
    for epsilon in (1.0, 8.0):
      budget = accounting.PrivacyBudget(epsilon, DELTA, composition='renyi')
      count = budget.how_many_more(event, 'a')
      assert budget.spend(event, 'a', count=count) <= epsilon
      fixed = accounting.epsilon(
        dp_accounting.SelfComposedDpEvent(event, count), DELTA, accountant='rdp'
      )
      assert 0.8 * epsilon < fixed < epsilon


def test_filter_takes_the_rule_of_the_first_release():
  budget = accounting.PrivacyBudget(20.0, DELTA)
  budget.spend(poisson(1.0, 0.01), 'mixed', count=100)
  for event in (CLASSIC, Laplace(3.0), dp_event.ZCDpEvent(0.02)):
    budget.spend(event, 'mixed')
  budget.spend(CLASSIC, 'gaussian')
  before = budget.export()
  for event in (poisson(1.0, 0.01), Laplace(3.0)):
    with pytest.raises(ValueError, match=r"composition='renyi'"):
      budget.spend(event, 'gaussian')
  with pytest.raises(ValueError, match='Renyi analysis'):
    budget.spend(dp_accounting.UnsupportedDpEvent(), 'mixed')
  assert budget.export() == before


def test_no_noise_is_refused():
  for composition in ('filter', 'renyi'):
    budget = accounting.PrivacyBudget(5.0, DELTA, composition=composition)
    for event in (
      Gaussian(0.0),
      Laplace(0.0),
      dp_accounting.NonPrivateDpEvent(),
    ):
      with pytest.raises(accounting.BudgetExceeded):
        budget.spend(event, 'a')
    assert budget.export()['ledger'] == []
