"""PrivacyBudget: what each release is charged, refused, kept, said."""

import json
import math

import dp_accounting
import numpy as np
import pytest
from dp_accounting import dp_event, rdp

from prism_optax import accounting, inference
from tests.core import seams

Gaussian, Laplace = dp_accounting.GaussianDpEvent, dp_accounting.LaplaceDpEvent
Exceeded = accounting.BudgetExceeded
DELTA = 1e-5
CLASSIC = Gaussian(4.8448)  # The classic formula at epsilon 1, delta 1e-5.


def budget_of(epsilon, **options):
  return accounting.PrivacyBudget(epsilon, DELTA, **options)


def poisson(sigma, q):
  return dp_accounting.PoissonSampledDpEvent(q, Gaussian(sigma))


def test_refusal_changes_nothing_and_says_what_is_left():
  budget = budget_of(2.0)
  spent = budget.spend(CLASSIC, 'alice', count=3)
  before = budget.export()
  with pytest.raises(Exceeded, match="'alice'") as refused:
    budget.spend(CLASSIC, 'alice', count=1000)
  assert refused.value.session == 'alice'
  assert refused.value.scope == 'session'
  assert refused.value.remaining == pytest.approx(2.0 - spent)
  assert f'{2.0 - spent:.4g}'[:5] in str(refused.value)
  assert budget.export() == before
  assert budget.remaining('alice') == pytest.approx(2.0 - spent)
  # What is smaller still fits.
  budget.spend(CLASSIC, 'alice')


def test_how_many_more_is_what_spend_accepts():
  budget = budget_of(6.0, composition='renyi', server_epsilon=8.0)
  budget.spend(CLASSIC, 'b', count=20)  # Leaves less under the server's cap.
  for event in (Laplace(9.0), Gaussian(2.0), CLASSIC):
    count = budget.how_many_more(event, 'a')
    assert count > 0
    with pytest.raises(Exceeded):
      budget.spend(event, 'a', count=count + 1)
  budget.spend(CLASSIC, 'a', count=count)
  assert budget.how_many_more(CLASSIC, 'a') == 0
  noop = dp_accounting.NoOpDpEvent()
  assert budget.how_many_more(noop, 'a') == math.inf
  budget.spend(noop, 'a')
  tiny = accounting.PrivacyBudget(1.0, 1e-200, composition='renyi')
  assert tiny.spend(noop, 'a') == 0


def test_sessions_are_apart_and_the_server_is_not():
  budget = budget_of(2.0, server_epsilon=2.5)
  per_session = budget_of(2.0).how_many_more(CLASSIC, 'x')
  whole = budget_of(2.5).how_many_more(CLASSIC, 'x')
  assert per_session < whole < 2 * per_session
  budget.spend(CLASSIC, 'first', count=per_session)
  with pytest.raises(Exceeded) as refused:
    budget.spend(CLASSIC, 'first')
  assert refused.value.scope == 'session'
  # New names share what is left of the server's budget.
  for number in range(whole - per_session):
    budget.spend(CLASSIC, f'name {number}')
  with pytest.raises(Exceeded, match='of the server') as refused:
    budget.spend(CLASSIC, 'one more name')
  assert refused.value.scope == 'server'
  left = 2.5 - budget.export()['server']['spent']
  assert budget.remaining('a name never seen') == pytest.approx(left)
  assert budget.spent('a name never seen') == 0


def test_export_is_plain_and_complete():
  budget = budget_of(5.0, server_epsilon=9.0)
  budget.spend(CLASSIC, 'a', count=2)
  narrow = dp_accounting.GaussianDpEvent(np.float32(4.8448))
  budget.spend(dp_accounting.SelfComposedDpEvent(narrow, 1), 'b')
  exported = budget.export()
  assert json.loads(json.dumps(exported)) == exported
  assert exported['settings'] == {
    'version': 1, 'caps': {'session': 5.0, 'server': 9.0}, 'delta': DELTA,
    'composition': 'filter', 'neighboring_relation': 'ADD_OR_REMOVE_ONE',
  }  # fmt: skip
  one = {'class_name': 'GaussianDpEvent', 'noise_multiplier': 4.8448}
  rounded = one | {'noise_multiplier': float(np.float32(4.8448))}
  two = {'class_name': 'SelfComposedDpEvent', 'count': 1, 'event': rounded}
  assert exported['ledger'] == [
    {'id': 1, 'session': 'a', 'event': one, 'count': 2},
    {'id': 2, 'session': 'b', 'event': two, 'count': 1},
  ]
  assert list(exported['ledger'][1]['event']) == list(two)
  assert list(exported['sessions']) == ['a', 'b']
  assert exported['server']['spent'] == pytest.approx(
    accounting.gaussian_epsilon(math.sqrt(3) / 4.8448, DELTA)
  )
  accounts = *exported['sessions'].values(), exported['server']
  for cap, account in zip((5.0, 5.0, 9.0), accounts, strict=True):
    assert account['remaining'] == cap - account['spent']


# What each composition charges.


def test_a_budget_for_one_release_takes_one_and_no_more():
  """Calibration and budget meet exactly: rounding refuses nothing."""
  for epsilon in (0.3, 1.0, 2.7, 10.0):
    for count in (1, 7, 100):
      release = Gaussian(
        inference.gaussian_stddev(epsilon, DELTA, math.sqrt(count))
      )
      budget = budget_of(epsilon)
      assert budget.how_many_more(release, 'a') == count
      for _ in range(count):
        spent = budget.spend(release, 'a')
        assert spent <= epsilon
      assert spent == pytest.approx(epsilon, rel=1e-9)
      with pytest.raises(Exceeded):
        budget.spend(release, 'a')
    above = inference.gaussian_stddev(epsilon * (1 + 1.5e-9), DELTA, 1.0)
    assert budget_of(epsilon).how_many_more(Gaussian(above), 'a') == 0


def test_renyi_orders_share_delta():
  """Each of K orders is a filter for delta / K; the best may then be chosen.

  With other orders what a ledger has would cost something else.
  """
  budget = budget_of(8.0, composition='renyi')
  event, count = poisson(1.0, 0.01), 500
  spent = budget.spend(event, 'a', count=count)
  orders = seams.renyi_orders(budget)
  assert orders == (1.942, 3.0, 5.0, 9.0, 16.0, 31.0)
  large = seams.renyi_orders(budget_of(1e3, composition='renyi'))
  assert large == (1.05, 1.065, 1.129, 1.259, 1.518, 2.0)
  alone = [
    rdp.RdpAccountant([order]).compose(event, count).get_epsilon(DELTA / 6)
    for order in orders
  ]
  assert spent == pytest.approx(min(alone), rel=1e-12)


@pytest.mark.parametrize(
  'event',
  [Gaussian(20.0), Laplace(20.0), poisson(2.0, 0.01), dp_event.ZCDpEvent(0.001),
   dp_accounting.ComposedDpEvent([Gaussian(20.0), poisson(2.0, 0.02)])],
)  # fmt: skip
def test_renyi_filter_is_above_the_accountants_and_costs_little(event):
  """It pays for adaptivity: where the budget is used up, some percent."""
  for epsilon in (1.0, 8.0):
    budget = budget_of(epsilon, composition='renyi')
    count = budget.how_many_more(event, 'a')
    spent = budget.spend(event, 'a', count=count)
    # Of a composition that is not adaptive.
    composed = dp_accounting.SelfComposedDpEvent(event, count)
    fixed = accounting.epsilon(composed, DELTA, accountant='rdp')
    assert 0.8 * epsilon < fixed <= spent <= epsilon


def test_filter_takes_the_rule_of_the_first_release():
  doubled = budget_of(
    50.0, neighboring_relation=accounting.NeighboringRelation.REPLACE_ONE
  )
  assert round(doubled.spend(CLASSIC, 'a', count=256), 1) == 49.2
  budget = budget_of(20.0)
  budget.spend(poisson(1.0, 0.01), 'mixed', count=100)
  for event in (CLASSIC, Laplace(3.0), dp_event.ZCDpEvent(0.02)):
    budget.spend(event, 'mixed')
  noop = dp_accounting.SelfComposedDpEvent(dp_accounting.NoOpDpEvent(), 0)
  for event in (noop, CLASSIC):  # Nothing is no release of another kind.
    budget.spend(event, 'gaussian')
  before = budget.export()
  for event in (poisson(1.0, 0.01), Laplace(3.0)):
    with pytest.raises(ValueError, match=r"composition='renyi'"):
      budget.spend(event, 'gaussian')
  with pytest.raises(ValueError, match='Renyi analysis'):
    budget.spend(dp_accounting.UnsupportedDpEvent(), 'mixed')
  assert budget.export() == before


@pytest.mark.parametrize('composition', ['filter', 'renyi'])
def test_no_noise_is_refused(composition):
  budget = budget_of(5.0, composition=composition)
  for event in (Gaussian(0.0), Laplace(0.0), dp_accounting.NonPrivateDpEvent()):
    with pytest.raises(Exceeded):
      budget.spend(event, 'a')
  assert budget.export()['ledger'] == []
