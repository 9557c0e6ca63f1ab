"""Regret on invented rows, of which it is known."""

from benchmarks.accuracy import digits, regret

BEST = {'prism': 0.03, 'dp-adamw': 0.03, 'linear probe': 0.1}
SPREAD = {'prism': 0.001, 'dp-adamw': -0.001, 'linear probe': 0, 'ridge': 0}
RATES = [0.003, 0.01, 0.03, 0.1]


def accuracy(task, method, rate):
  if method == regret.RIDGE:
    return 0.7
  # The tasks that choose mislead one method on one task.
  best = 0.01 if (task, method) == ('intents', 'dp-adamw') else BEST[method]
  return 0.8 - abs(rate - best) - (0.05 if method == 'linear probe' else 0)


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
  monkeypatch.setattr(regret, 'planned', lambda rows, epsilon: (120, 512))
  monkeypatch.setattr(
    digits,
    'planned',
    lambda method, epsilon, decay: {'method': method, 'weight_decay': decay},
  )
  stored = {}
  fields = (
    'task', 'method', 'rate', 'weight_decay', 'epsilon', 'seed', 'head',
    'pooled',
  )  # fmt: skip

  def find(setting):
    return stored.get(tuple(setting[x] for x in fields))

  for _ in range(4):  # Rates, heads, what they decide, and no more.
    for x in regret.plan(find):
      found = accuracy(x['task'], x['method'], x['rate'])
      less = 0.01 if x['weight_decay'] == 1.0 else 0.0
      # A head from a release is better, which one seed of the tasks that
      # choose does not show.
      released = 0.02 if x['head'] == 'ridge' else 0.0
      shown = released if x['task'] in regret.REPORT else -released
      stored[tuple(x[name] for name in fields)] = {
        'tuning accuracy': found - less + shown,
        'test accuracy': found
        + released
        + (x['seed'] - 2) * SPREAD[x['method']],
      }
  assert all(find(x) for x in regret.plan(find))
  cells = regret.cells(find, of_digits)
  assert len(cells) == 13
  for cell in cells:
    found = {k: round(v, 6) for k, v in cell.regrets.items()}
    if cell.task == regret.DIGITS:
      assert found == {'prism': 7.0, 'dp-adamw': 0.0}
    elif cell.task in regret.REPORT:
      wrong = 2.0 if cell.task == 'intents' else 0.0
      assert found == {
        'prism': 0.0, 'dp-adamw': wrong, 'linear probe': 5.0, 'ridge': 12.0,
      }  # fmt: skip
      assert round(cell.lead[0], 6) == wrong
  *_, means, _, _, last = regret.table(cells).splitlines()
  for row, word in ((means, 'mean'), (last, 'worst, all tokens')):
    numbers = ['0.0', '1.0' if row is means else '2.0', '5.0', '12.0']
    assert [x.strip() for x in row.split('|') if x.strip()] == [word, *numbers]


def test_holm_multiplies_by_the_tests_that_are_left():
  assert regret.holm([0.04, 0.01, 0.03]) == [0.06, 0.03, 0.06]
