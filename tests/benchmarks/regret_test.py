"""Regret on invented rows, of which it is known."""

from benchmarks.accuracy import regret

BEST = {'prism': 0.03, 'dp-adamw': 0.03, 'linear probe': 0.1}


def accuracy(task, method, rate):
  if method == regret.RIDGE:
    return 0.7
  # What the tasks that choose say is wrong for one method on one task.
  best = 0.01 if (task, method) == ('intents', 'dp-adamw') else BEST[method]
  return 0.8 - abs(rate - best) - (0.05 if method == 'linear probe' else 0)


def test_regret_is_that_of_the_recipe(monkeypatch):
  monkeypatch.setattr(regret, 'planned', lambda rows, epsilon: (120, 512))
  stored = {}
  fields = 'task', 'method', 'rate', 'weight_decay', 'epsilon', 'seed'

  def find(setting):
    return stored.get(tuple(setting[x] for x in fields))

  def rows(task):
    del task
    return 7_000

  for _ in range(3):  # Choices, what they decide, and no more.
    for x in regret.plan(find, rows):
      found = accuracy(x['task'], x['method'], x['rate'])
      less = 0.01 if x['weight_decay'] == 1.0 else 0.0
      stored[tuple(x[name] for name in fields)] = {
        'tuning accuracy': found - less,
        'test accuracy': found,
      }
  assert all(find(x) for x in regret.plan(find, rows))
  for task in regret.CHOOSE + regret.REPORT:
    found = regret.regrets(find, rows, task, 3.0)
    wrong = 2.0 if task == 'intents' else 0.0
    assert {k: round(v, 6) for k, v in found.items()} == {
      'best': 0.8, 'prism': 0.0, 'dp-adamw': wrong,
      'linear probe': 5.0, 'ridge': 10.0,
    }  # fmt: skip
  last = regret.table(find, rows).splitlines()[-1]
  assert last.replace('|', ' ').split() == [
    'worst',
    '0.0',
    '2.0',
    '5.0',
    '10.0',
  ]
