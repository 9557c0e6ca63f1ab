"""Settings become rows once, whoever is interrupted."""

import dataclasses
import json

import numpy as np
import pytest

from benchmarks.common import runner

DEFAULTS = {'rate': 0.1, 'options': (), 'seed': 0}


def test_a_row_is_found_whatever_its_defaults(tmp_path):
  store = runner.Store(tmp_path / 'rows.json', DEFAULTS)
  setting = {'method': 'prism', 'rate': 0.1, 'options': (('b1', 0.5),)}
  assert store.find(setting) is None
  store.put(setting, {'accuracy': 0.7})
  assert store.rows == [
    {'method': 'prism', 'options': (('b1', 0.5),), 'accuracy': 0.7}
  ]
  again = runner.Store(store.path, DEFAULTS)
  for other in (setting, {**setting, 'seed': 0}):
    assert again.find(other)['accuracy'] == 0.7
  for name, value in (('seed', 1), ('rate', 0.3), ('options', ())):
    assert again.find({**setting, name: value}) is None
  assert json.loads(store.path.read_text())['environment']['platform'] == 'cpu'


def test_an_interrupted_benchmark_goes_on(tmp_path):
  measured = []

  def measure(setting):
    if len(measured) == 2:
      raise RuntimeError('stopped')
    measured.append(setting['seed'])
    return [{'part': part, 'accuracy': 0.5} for part in 'ab']

  plan = runner.fixed({'seed': seed} for seed in range(4))
  with pytest.raises(RuntimeError, match='stopped'):
    runner.run(runner.Store(tmp_path / 'rows.json'), plan, measure)
  measured.clear()
  store = runner.Store(tmp_path / 'rows.json')
  runner.run(store, plan, measure)
  assert measured == [2, 3]
  assert [(x['seed'], x['part']) for x in store.rows] == [
    (seed, part) for seed in range(4) for part in 'ab'
  ]
  runner.run(store, plan, measure, minutes=0.0)
  assert measured == [2, 3]


@dataclasses.dataclass(frozen=True)
class Setting:
  rate: float = 0.0


@pytest.mark.parametrize('best', [3e-4, 1e-2, 1.0])
def test_tuning_ends_with_a_neighbour_on_both_sides(best):
  """Wherever the best rate is, and it says what has to be run first."""
  scores, runs = {}, 0
  while True:
    try:
      found = runner.best_rate(Setting(), (1e-2, 3e-2), scores.get)
      break
    except runner.Missing as missing:
      runs += len(missing.settings)
      for setting in missing.settings:
        scores[setting] = -abs(np.log10(setting.rate / best))
  assert found.rate == best
  at = runner.LADDER.index(best)
  beside = {Setting(runner.LADDER[i]) for i in (at - 1, at + 1)}
  assert beside <= scores.keys()
  assert runs == len(scores)
