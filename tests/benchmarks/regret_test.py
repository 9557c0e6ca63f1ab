"""Regret on invented rows, of which it is known."""

import pytest

from benchmarks.accuracy import digits, digits_network, regret, sentences
from prism_optax import training

BEST = {
  'prism': 0.03, regret.ADAPTED: 0.01, 'dp-adamw': 0.03, 'linear probe': 0.03,
}  # fmt: skip
SPREAD = {
  'prism': 0.001, regret.ADAPTED: 0, 'dp-adamw': -0.001, 'linear probe': 0,
  'ridge': 0,
}  # fmt: skip
RATES = [0.003, 0.01, 0.03, 0.1]


def accuracy(task, method, rate):
  if method == regret.RIDGE:
    return 0.7
  # One method wants another rate on one task, so much that it decides for all
  # tasks of other texts.
  if (task, method) == ('intents', 'dp-adamw'):
    return 0.8 - 10 * abs(rate - 0.01)
  lower = 0.05 if method == 'linear probe' else 0.0
  return 0.8 - abs(rate - BEST[method]) - lower


def of_digits(setting):
  """Rows of digits, where `prism` wants another rate."""
  best = 0.1 if setting['method'] == 'prism' else 0.03
  found = [0.9 - abs(rate - best) for rate in RATES]
  return {
    'rates': RATES,
    'accuracies by rate and seed': [
      [x + (seed - 4.5) * SPREAD[setting['method']] for seed in range(10)]
      for x in found
    ],
    'accuracy': max(found),
    'tuning accuracy': max(found) - setting['weight_decay'],
  }


def test_regret_is_that_of_the_recipe(monkeypatch):
  monkeypatch.setattr(
    digits,
    'planned',
    lambda method, epsilon, decay: {'method': method, 'weight_decay': decay},
  )
  stored = {}

  def find(setting):
    return stored.get(str(setting))

  for _ in range(2):  # What chooses, and what it decides.
    for x in regret.plan(find):
      found = accuracy(x['task'], x['method'], x['rate'])
      # A head from a release is better.
      found += 0.02 * (x['head'] == 'ridge')
      stored[str(x)] = {
        'tuning accuracy': found - 0.01 * (x['weight_decay'] == 1.0),
        'test accuracy': found + (x['seed'] - 2) * SPREAD[x['method']],
      }
  assert all(map(find, regret.plan(find)))
  cells = regret.cells(find, of_digits)
  assert len(cells) == 19
  # DP-AdamW's points by its recipe, which no other labels of its texts choose.
  lost = {'sst2': 2.0, 'clinc150': 0.0, 'banking77': 2.0, 'intents': 20.0}
  for cell in cells:
    found = {k: round(v, 6) for k, v in cell.regrets.items()}
    if cell.task == regret.DIGITS:
      assert found == {regret.ADAPTED: 2.0, 'dp-adamw': 2.0}
    else:
      assert found == {
        regret.ADAPTED: 0.0, 'dp-adamw': lost[cell.task], 'linear probe': 5.0,
        'ridge': 12.0,
      }  # fmt: skip
      assert round(cell.lead[0], 6) == lost[cell.task]
  *_, means, _, _, last = regret.table(cells).splitlines()
  for row, word in ((means, 'mean'), (last, 'worst, all tokens')):
    numbers = ['0.0', '6.0' if row is means else '20.0', '5.0', '12.0']
    assert [x.strip() for x in row.split('|') if x.strip()] == [word, *numbers]


def test_holm_multiplies_by_the_tests_that_are_left():
  assert regret.holm([0.04, 0.01, 0.03]) == [0.06, 0.03, 0.06]


@pytest.mark.slow
def test_steps_and_batches_are_the_advice_of_the_plan():
  def advice(rows, epsilon, delta):
    found = training.plan(
      rows, target_epsilon=epsilon, delta=delta, example_gradients=30_720
    )
    return found.chosen.steps, found.chosen.expected_batch_size

  # The fewest rows of a text (banking77), and the least epsilon, have the
  # smallest batch.
  text = sentences.Setting()
  least = advice(7003, min(regret.EPSILONS), sentences.DELTA)
  assert least == (text.steps, text.batch)
  for epsilon, batch in digits.BATCHES.items():
    found = advice(digits_network.SIZE, epsilon, 1e-4)
    assert found == (digits.STEPS, batch)
