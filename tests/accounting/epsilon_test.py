"""Events and epsilon: equal to dp-accounting by hand, and its figures."""

import functools
import math

import dp_accounting
import numpy as np
import pytest
from dp_accounting import dp_event, pld, rdp

from prism_optax import accounting

Relation = accounting.NeighboringRelation
ADD, REPLACE = Relation.ADD_OR_REMOVE_ONE, Relation.REPLACE_ONE
Gaussian = dp_accounting.GaussianDpEvent
DELTA = 1e-5
# Ten times the accountant's own grid: ten times as fast, and still a bound.
COARSE = {'value_discretization_interval': 1e-3}


def by_hand(
  event, relation, accountant, count=1, value_discretization_interval=1e-4
):
  makers = {
    'pld': lambda: pld.PLDAccountant(relation, value_discretization_interval),
    'rdp': lambda: rdp.RdpAccountant(neighboring_relation=relation),
  }
  return makers[accountant]().compose(event, count).get_epsilon(DELTA)


def by_rdp(event, relation=REPLACE):
  return accounting.epsilon(
    event, DELTA, accountant='rdp', neighboring_relation=relation
  )


POISSON = dp_accounting.PoissonSampledDpEvent(0.03, Gaussian(0.9))
CUT = {'truncated_batch_size': np.int64(14), 'dataset_size': np.int64(300)}
TRUNCATED = dp_event.TruncatedSubsampledGaussianDpEvent(300, 0.03, 14, 0.9)


@pytest.mark.parametrize(
  ('relation', 'accountant', 'grid', 'theirs'),
  [
    # dp-accounting's own grid.
    pytest.param(ADD, 'pld', {}, POISSON, marks=pytest.mark.slow),
    (ADD, 'pld', COARSE, POISSON),
    (ADD, 'rdp', {}, POISSON),
    (Relation.REPLACE_SPECIAL, 'pld', COARSE, POISSON),
    (Relation.REPLACE_SPECIAL, 'rdp', {}, POISSON),
    (REPLACE, 'pld', COARSE, POISSON),
    (ADD, 'pld', COARSE, TRUNCATED),
  ],
)
def test_equals_dp_accounting_by_hand(relation, accountant, grid, theirs):
  ours = accounting.dpsgd_event(
    0.9, 0.03, np.int64(17), **(CUT if theirs is TRUNCATED else {})
  )
  assert repr(ours) == repr(dp_accounting.SelfComposedDpEvent(theirs, 17))
  options = {'accountant': accountant, 'neighboring_relation': relation, **grid}
  spent = accounting.epsilon(ours, DELTA, **options)
  assert type(spent) is float
  assert spent == by_hand(theirs, relation, accountant, 17, **grid)
  if theirs is TRUNCATED:
    # Cutting one batch in forty is not free: the plain event would be wrong.
    plain = accounting.dpsgd_event(0.9, 0.03, 17)
    assert spent > 1.01 * accounting.epsilon(plain, DELTA, **options)


def test_what_is_known_of_an_event_serves_no_other():
  """Nor another delta or relation: distributions are kept."""

  def epsilon(event, delta=DELTA, relation=ADD):
    return accounting.epsilon(
      event, delta, neighboring_relation=relation, **COARSE
    )

  one = Gaussian(32.1)  # Of no other test.
  fresh = pld.PLDAccountant(ADD, 1e-3).compose(one)
  for delta in (1e-6, 1e-5, 1e-6):
    assert epsilon(one, delta) == fresh.get_epsilon(delta)
  hand = functools.partial(by_hand, accountant='pld', **COARSE)
  assert epsilon(one, relation=REPLACE) == hand(one, REPLACE)
  # A list may grow after its events were counted.
  events = [one]
  composed = dp_event.ComposedDpEvent(events)
  assert epsilon(composed) == epsilon(one)
  events.append(one)
  two = hand(one, ADD, count=2)
  assert math.isclose(epsilon(composed), two, rel_tol=1e-3)  # Other roundings.
  mixture = dp_event.MixtureOfGaussiansDpEvent(9.0, [0.0, 1.0], [0.5, 0.5])
  assert epsilon(mixture) == hand(mixture, ADD)


def test_rdp_doubles_gaussians_under_replace_one_wherever_they_are():
  """RDP may never claim less than the tight accountant."""
  gaussian, halved = Gaussian(4.8448), Gaussian(4.8448 / 2)
  nested = dp_accounting.ComposedDpEvent(
    [gaussian, dp_accounting.SelfComposedDpEvent(gaussian, 3)]
  )
  tight = accounting.epsilon(nested, DELTA, neighboring_relation=REPLACE)
  assert tight <= by_rdp(nested) <= 1.2 * tight
  for of in (
    lambda x: dp_event.SampledWithoutReplacementDpEvent(100, 10, x),
    lambda x: dp_event.RepeatAndSelectDpEvent(x, 2.0, 1.0),
  ):
    assert by_rdp(of(gaussian)) == by_hand(of(halved), REPLACE, 'rdp')
  # RDP has no analysis of it, and says of which event.
  with pytest.raises(ValueError, match='DiscreteLaplace.*sensitivity=6'):
    by_rdp(dp_event.DiscreteLaplaceDpEvent(2.0, 3))


def test_nothing_released_costs_nothing_and_no_noise_costs_everything():
  assert accounting.epsilon(accounting.dpsgd_event(1.0, 0.1, 0), DELTA) == 0
  for sigma, accountant in ((0.0, 'pld'), (0.0, 'rdp'), (1.4e-4, 'pld')):
    event = accounting.dpsgd_event(sigma, 0.1, 3)
    assert accounting.epsilon(event, DELTA, accountant=accountant) == math.inf
  assert '<= inf at' in accounting.privacy_statement(event, DELTA)
  # A little noise neither fills the memory nor lowers the bound: the grid
  # widens. For one Gaussian, mu^2/2 + mu t with t the delta quantile, from
  # below.
  spent = accounting.epsilon(accounting.dpsgd_event(0.02, 1.0, 1), DELTA)
  exact = 50.0**2 / 2 + 50.0 * 4.2649
  assert exact * (1 - 1e-3) < spent < exact * (1 + 1e-2)
  # Much noise leaves the grid fine.
  spent = accounting.epsilon(accounting.dpsgd_event(500.0, 1.0, 1), DELTA)
  exact = accounting.gaussian_epsilon(1 / 500, DELTA)
  assert exact <= spent < exact + 2e-4


def test_joint_noise_multiplier_is_that_of_composed_releases():
  """Gaussian releases about one batch compose as they would in sequence."""
  joint, sigmas = accounting.joint_noise_multiplier, [3.0, 4.0, 7.0]
  composed = dp_accounting.ComposedDpEvent([Gaussian(s) for s in sigmas])
  one, other = by_rdp(Gaussian(joint(sigmas)), ADD), by_rdp(composed, ADD)
  assert one == pytest.approx(other, rel=1e-9)
  assert joint([1.0, 2.0]) == pytest.approx((1 + 1 / 4) ** -0.5, rel=1e-14)
  assert joint(0.7) == 0.7
  assert joint([1.5, math.inf]) == 1.5
  assert joint([1.5, 0.0]) == 0.0
  tiny = joint(s * 1e-200 for s in (1.0, 1.0))
  assert tiny == pytest.approx(1e-200 / math.sqrt(2))
