"""Settings of the digits: each has its row, and each kind of them trains."""

import numpy as np
import pytest

from benchmarks.accuracy import digits
from benchmarks.common import runner
from benchmarks.privacy import audit, low_bits


def test_every_setting_has_one_row():
  """So a table is not measured again, and no row is of another setting."""
  for name, defaults, settings in (
    (
      'digits_cpu',
      digits.DEFAULTS,
      [x for each in digits.EXPERIMENTS.values() for x in each],
    ),
    ('audit', {}, audit.settings()),
    ('low_bits', {}, low_bits.settings()),
  ):
    store = runner.Store(runner.FOLDER / f'{name}.json', defaults)
    found = [store.find(x) for x in settings]
    assert None not in found, name
    assert len({id(x) for x in found}) == len(store.rows), name


@pytest.mark.slow
@pytest.mark.parametrize('experiment', digits.EXPERIMENTS)
def test_a_setting_trains(experiment, monkeypatch):
  """Better than by chance, of ten digits, at the best of two rates."""
  monkeypatch.setattr(digits, 'rates_and_seeds', lambda _: ((0.1, 0.3), 2))
  setting = next(
    x
    for x in digits.EXPERIMENTS[experiment][::-1]
    if x.get('metric') is None and x.get('noise') != 'Poisson'
  )
  row = digits.measure(True, setting)
  assert row['accuracy'] > 0.15
  assert len(row['accuracies by rate']) == len(row['rates']) == 2
  assert row['accuracy'] == pytest.approx(
    np.mean(row['accuracies of the seeds'])
  )
