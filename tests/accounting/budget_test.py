"""PrivacyBudget: what is refused, what is kept, what is said."""

import json
import math

import dp_accounting
import pytest

from prism_optax import accounting

Gaussian = dp_accounting.GaussianDpEvent
Laplace = dp_accounting.LaplaceDpEvent
Relation = accounting.NeighboringRelation
DELTA = 1e-5
CLASSIC = Gaussian(4.8448)  # The classic formula at epsilon 1, delta 1e-5.


def test_refusal_changes_nothing_and_says_what_is_left():
  budget = accounting.PrivacyBudget(2.0, DELTA)
  spent = budget.spend(CLASSIC, 'alice', count=3)
  before = budget.export()
  with pytest.raises(accounting.BudgetExceeded, match="'alice'") as refused:
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
  events = [CLASSIC, Laplace(9.0), Gaussian(2.0)]
  budget = accounting.PrivacyBudget(
    6.0, DELTA, composition='renyi', server_epsilon=8.0
  )
  budget.spend(CLASSIC, 'b', count=20)  # Leaves less under the server's cap.
  for event in events:
    count = budget.how_many_more(event, 'a')
    assert count > 0
    with pytest.raises(accounting.BudgetExceeded):
      budget.spend(event, 'a', count=count + 1)
  count = budget.how_many_more(CLASSIC, 'a')
  budget.spend(CLASSIC, 'a', count=count)
  assert budget.how_many_more(CLASSIC, 'a') == 0
  noop = dp_accounting.NoOpDpEvent()
  assert budget.how_many_more(noop, 'a') == math.inf
  budget.spend(noop, 'a')


def test_sessions_are_apart_and_the_server_is_not():
  budget = accounting.PrivacyBudget(2.0, DELTA, server_epsilon=2.5)
  alone = accounting.PrivacyBudget(2.0, DELTA)
  per_session = alone.how_many_more(CLASSIC, 'x')
  whole = accounting.PrivacyBudget(2.5, DELTA).how_many_more(CLASSIC, 'x')
  assert per_session < whole < 2 * per_session
  budget.spend(CLASSIC, 'first', count=per_session)
  with pytest.raises(accounting.BudgetExceeded) as refused:
    budget.spend(CLASSIC, 'first')
  assert refused.value.scope == 'session'
  # New names share what is left of the server's budget.
  for number in range(whole - per_session):
    budget.spend(CLASSIC, f'name {number}')
  with pytest.raises(
    accounting.BudgetExceeded, match='of the server'
  ) as refused:
    budget.spend(CLASSIC, 'one more name')
  assert refused.value.scope == 'server'
  assert budget.remaining('a name never seen') == pytest.approx(
    2.5 - budget.export()['server']['spent']
  )
  assert budget.spent('a name never seen') == 0


def test_nothing_gives_budget_back():
  budget = accounting.PrivacyBudget(5.0, DELTA)
  budget.spend(CLASSIC, 'a', count=3)
  before = budget.export()
  refund = dp_accounting.SelfComposedDpEvent(CLASSIC, -3)
  renyi = accounting.PrivacyBudget(5.0, DELTA, composition='renyi')
  # Beside as much as it would give back, a refund adds up to nothing.
  hidden = dp_accounting.ComposedDpEvent([CLASSIC] * 3 + [refund])
  for event in (refund, hidden, Gaussian(-1.0), Gaussian(math.nan)):
    for either in (budget, renyi):
      with pytest.raises(ValueError, match='>= 0'):
        either.spend(event, 'a')
  with pytest.raises(ValueError, match=r'noise_multiplier=-2\.0'):
    renyi.spend(Laplace(-2.0), 'a')
  for count in (0, -1, 1.5, True):
    with pytest.raises(ValueError, match='count'):
      budget.spend(CLASSIC, 'a', count=count)
  assert budget.export() == before


def test_export_is_plain_and_complete():
  budget = accounting.PrivacyBudget(5.0, DELTA, server_epsilon=9.0)
  budget.spend(CLASSIC, 'a', count=2)
  budget.spend(dp_accounting.ComposedDpEvent([CLASSIC]), 'b')
  exported = budget.export()
  assert json.loads(json.dumps(exported)) == exported
  assert exported['settings'] == {
    'version': 1,
    'caps': {'session': 5.0, 'server': 9.0},
    'delta': DELTA,
    'composition': 'filter',
    'neighboring_relation': 'ADD_OR_REMOVE_ONE',
  }
  one = {'event': 'GaussianDpEvent', 'noise_multiplier': 4.8448}
  assert exported['ledger'] == [
    {'id': 1, 'session': 'a', 'event': one, 'count': 2},
    {
      'id': 2,
      'session': 'b',
      'event': {'event': 'ComposedDpEvent', 'events': [one]},
      'count': 1,
    },
  ]
  assert list(exported['sessions']) == ['a', 'b']
  assert exported['server']['spent'] == pytest.approx(
    accounting.gaussian_epsilon(math.sqrt(3) / 4.8448, DELTA)
  )


@pytest.mark.parametrize(
  ('options', 'message'),
  [
    ({'epsilon': 0.0}, 'epsilon=0.0'),
    ({'epsilon': math.nan}, 'epsilon=nan'),
    ({'epsilon': math.inf}, 'epsilon=inf'),
    ({'delta': 0.0}, 'delta=0.0'),
    ({'delta': 1.0}, 'delta=1.0'),
    ({'composition': 'basic'}, "composition='basic'"),
    ({'composition': 'advanced'}, "composition='advanced'"),
    ({'server_epsilon': -1.0}, 'server_epsilon=-1.0'),
    ({'neighboring_relation': 'replace'}, "neighboring_relation='replace'"),
    ({'timeout': 0}, 'timeout=0'),
  ],
)
def test_bad_settings_are_named(options, message):
  options = {'epsilon': 1.0, 'delta': DELTA, **options}
  with pytest.raises(ValueError, match=message):
    accounting.PrivacyBudget(**options)


@pytest.mark.parametrize('session', ['', None, 3])
def test_sessions_have_names(session):
  budget = accounting.PrivacyBudget(5.0, DELTA)
  for call in (
    lambda: budget.spend(CLASSIC, session),
    lambda: budget.spent(session),
    lambda: budget.remaining(session),
    lambda: budget.how_many_more(CLASSIC, session),
  ):
    with pytest.raises(ValueError, match='session'):
      call()
  with pytest.raises(ValueError, match='event'):
    budget.spend(0.5, 'a')
