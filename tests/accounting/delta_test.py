"""A delta that publishing a record at random meets is refused, or warned of."""

import math
import warnings

import dp_accounting
import numpy as np
import pytest

from prism_optax import accounting
from prism_optax.accounting import _epsilon

FULL = accounting.dpsgd_event(2.0, 1.0, 3)
SAMPLED = accounting.dpsgd_event(2.0, 1e-4, 3)
CUT = accounting.dpsgd_event(
  2.0, 0.03, 3, truncated_batch_size=14, dataset_size=300
)


def of_an_event(function):
  def asked(event, delta, **options):
    return function(event, delta, accountant='rdp', **options)

  return asked


def calibrated(event, delta, **options):
  """The search, for the sampling of one of the events above."""
  sampling = {id(FULL): 1.0, id(SAMPLED): 1e-4, id(CUT): 0.03}[id(event)]
  if event is CUT:
    options = {'truncated_batch_size': 14, 'dataset_size': 300, **options}
  return accounting.calibrate_noise_multiplier(
    0.5, delta, sampling, 3, **options
  )


ASK = {
  'epsilon': of_an_event(accounting.epsilon),
  'privacy_statement': of_an_event(accounting.privacy_statement),
  'calibrate_noise_multiplier': calibrated,
}


@pytest.fixture
def no_search(monkeypatch):
  """Where the question is whether there was a warning, not the answer."""
  monkeypatch.setattr(_epsilon, 'epsilon_at', lambda *_: 0.25)
  monkeypatch.setattr(_epsilon, '_solve', lambda *_, **__: 1.0)


@pytest.mark.parametrize('name', ASK)
@pytest.mark.parametrize(
  ('event', 'delta', 'options'),
  [
    (FULL, 1 / 49, {'dataset_size': 49}),
    (FULL, 1e-3, {'dataset_size': np.int64(5000)}),
    (SAMPLED, 0.1, {'dataset_size': 1000}),
    (SAMPLED, 1.0 - 1e-9, {'dataset_size': 2}),
    (CUT, 1 / 300, {}),
    (CUT, 0.01, {}),
  ],
)
def test_a_delta_of_a_record_at_random_is_refused(name, event, delta, options):
  """Before any search: this takes no time."""
  size = options.get('dataset_size', 300)
  message = f'delta={delta!r} and dataset_size={size}: publishing one record'
  with pytest.raises(ValueError, match=message):
    ASK[name](event, delta, **options)


@pytest.mark.parametrize('name', ASK)
@pytest.mark.parametrize(
  ('event', 'delta', 'options', 'warned'),
  [
    (FULL, 1e-3, {}, False),
    (FULL, 1.001e-3, {}, True),
    (SAMPLED, 0.999e-4, {}, False),
    (SAMPLED, 1e-4, {}, True),
    # A size that is known decides alone.
    (FULL, 1.9e-2, {'dataset_size': 50}, False),
    (SAMPLED, 2e-4, {'dataset_size': 4000}, False),
    (CUT, 3e-3, {}, False),
  ],
)
def test_a_delta_that_is_too_large_for_most_is_warned_of(
  name, event, delta, options, warned, no_search
):
  with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter('always')
    ASK[name](event, delta, **options)
  assert len(caught) == warned
  for warning in caught:
    assert warning.category is UserWarning
    assert warning.filename == __file__  # Not a line of the library.
    assert f'delta={delta!r} is met by publishing' in str(warning.message)
    assert f'one of {math.ceil(1 / delta)} records' in str(warning.message)


def test_rates_and_sizes_are_found_in_compositions(no_search):
  composed = dp_accounting.ComposedDpEvent([FULL, SAMPLED])
  with pytest.warns(UserWarning, match='is met by publishing'):
    accounting.epsilon(composed, 2e-4)
  composed = dp_accounting.ComposedDpEvent([composed, CUT])
  with pytest.raises(ValueError, match='dataset_size=300'):
    accounting.epsilon(composed, 4e-3)


def test_epsilon_keeps_its_results_at_both_ends():
  with warnings.catch_warnings():
    warnings.simplefilter('error')
    assert accounting.epsilon(FULL, 0.0) == math.inf
    assert accounting.epsilon(FULL, 0.0, dataset_size=9) == math.inf
    nobody = accounting.dpsgd_event(1.0, 0.0, 5)  # Rate 0 says nothing.
    assert accounting.epsilon(nobody, 1e-5) == 0
  with pytest.warns(UserWarning, match=r'delta=1\.0 is met'):
    assert accounting.epsilon(FULL, 1.0) == 0


def test_a_size_does_not_change_the_answer():
  assert accounting.epsilon(FULL, 1e-5, dataset_size=50) == accounting.epsilon(
    FULL, 1e-5
  )
  found = accounting.calibrate_noise_multiplier(
    0.5, 1e-5, 1.0, 3, accountant='rdp', dataset_size=50
  )
  assert found == accounting.calibrate_noise_multiplier(
    0.5, 1e-5, 1.0, 3, accountant='rdp'
  )


@pytest.mark.parametrize('size', [0, -3, 2.5, True, '9'])
@pytest.mark.parametrize('name', ASK)
def test_bad_sizes_are_named(name, size):
  with pytest.raises(ValueError, match=f'dataset_size={size!r}'):
    ASK[name](FULL, 1e-5, dataset_size=size)


def test_a_budget_warns_too():
  with pytest.warns(UserWarning, match=r'delta=0\.01 is met') as caught:
    accounting.PrivacyBudget(1.0, 0.01)
  assert [warning.filename for warning in caught] == [__file__]
  with warnings.catch_warnings():
    warnings.simplefilter('error')
    accounting.PrivacyBudget(1.0, 1e-3)
