"""A delta that publishing a record at random meets is refused, or warned of."""

import functools
import math
import warnings

import dp_accounting
import numpy as np
import pytest

from prism_optax import accounting

FULL = accounting.dpsgd_event(2.0, 1.0, 3)
SAMPLED = accounting.dpsgd_event(2.0, 1e-4, 3)
CUT_TO = {'truncated_batch_size': 14, 'dataset_size': 300}
CUT = accounting.dpsgd_event(2.0, 0.03, 3, **CUT_TO)


def calibrated(event, delta, **options):
  """The search, for the sampling of one of the events above."""
  sampling = {id(FULL): 1.0, id(SAMPLED): 1e-4, id(CUT): 0.03}[id(event)]
  options = (CUT_TO if event is CUT else {'accountant': 'rdp'}) | options
  return accounting.calibrate_noise_multiplier(
    0.5, delta, sampling, 3, **options
  )


ASK = {
  'epsilon': functools.partial(accounting.epsilon, accountant='rdp'),
  'privacy_statement': functools.partial(
    accounting.privacy_statement, accountant='rdp'
  ),
  'calibrate_noise_multiplier': calibrated,
}
by_name = pytest.mark.parametrize('name', ASK)


@by_name
@pytest.mark.parametrize(
  ('event', 'delta', 'options'),
  [
    (FULL, 1 / 49, {'dataset_size': 49}),
    (FULL, 1e-3, {'dataset_size': np.int64(5000)}),
    (SAMPLED, 1.0 - 1e-9, {'dataset_size': 2}),
    (CUT, 1 / 300, {}),
  ],
)
def test_a_delta_of_a_record_at_random_is_refused(name, event, delta, options):
  """Before any search: this takes no time."""
  size = options.get('dataset_size', 300)
  message = f'delta={delta!r} and dataset_size={size}: publishing one record'
  with pytest.raises(ValueError, match=message):
    ASK[name](event, delta, **options)
  for bad in (0, -3, 2.5, True, '9'):
    with pytest.raises(ValueError, match=f'dataset_size={bad!r}'):
      ASK[name](FULL, 1e-5, dataset_size=bad)


@by_name
@pytest.mark.parametrize(
  ('event', 'delta', 'options', 'warned'),
  [
    (FULL, 1e-3, {}, False),
    (FULL, 1.001e-3, {}, True),
    (SAMPLED, 0.999e-4, {}, False),
    (SAMPLED, 1e-4, {}, True),
    # A size that is known decides alone.
    (FULL, 1.9e-2, {'dataset_size': 50}, False),
  ],
)
def test_a_delta_that_is_too_large_for_most_is_warned_of(
  name, event, delta, options, warned
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


def test_rates_and_sizes_are_found_in_compositions():
  composed = dp_accounting.ComposedDpEvent([FULL, SAMPLED])
  with pytest.warns(UserWarning, match='is met by publishing'):
    accounting.epsilon(composed, 2e-4, accountant='rdp')
  composed = dp_accounting.ComposedDpEvent([composed, CUT])
  with pytest.raises(ValueError, match='dataset_size=300'):
    accounting.epsilon(composed, 4e-3)


def test_epsilon_keeps_its_results_at_both_ends():
  """And a size does not change the answer."""
  with warnings.catch_warnings():
    warnings.simplefilter('error')
    assert accounting.epsilon(FULL, 0.0) == math.inf
    assert accounting.epsilon(FULL, 0.0, dataset_size=9) == math.inf
    nobody = accounting.dpsgd_event(1.0, 0.0, 5)  # Rate 0 says nothing.
    assert accounting.epsilon(nobody, 1e-5) == 0
    accounting.PrivacyBudget(1.0, 1e-3)
  with pytest.warns(UserWarning, match=r'delta=1\.0 is met'):
    assert accounting.epsilon(FULL, 1.0) == 0
  with pytest.warns(UserWarning, match=r'delta=0\.01 is met') as caught:
    accounting.PrivacyBudget(1.0, 0.01)
  assert [warning.filename for warning in caught] == [__file__]
  for ask in ASK.values():
    assert ask(FULL, 1e-5, dataset_size=50) == ask(FULL, 1e-5)
