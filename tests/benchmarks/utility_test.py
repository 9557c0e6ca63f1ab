"""Which runs belong to a table, how they are compared, and that they learn."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.accuracy import (
  encoded_text,
  plain_layers,
  problems,
  sentences,
  utility,
  utility_tables,
)
from benchmarks.accuracy.sentences import Setting


def test_differences_are_tested_at_their_level():
  """Without a difference 5 % are called significant, with one nearly all."""
  rng = np.random.default_rng(0)
  rows, seeds, trials = 200, 5, 400

  def p_value(shift):
    base = rng.normal(size=rows)
    of_seed = rng.normal(scale=0.05, size=(2, seeds, 1))
    own = rng.normal(scale=0.5, size=(2, 1, rows))  # Of a method on a row.
    drawn = base + of_seed + own + rng.normal(size=(2, seeds, rows))
    drawn[0] += shift
    return utility_tables.paired(list(drawn[0]), list(drawn[1]))['p']

  wrong = np.mean([p_value(0.0) < 0.05 for _ in range(trials)])
  # Deviation of a share of 400: 1.1 points.
  assert 0.01 < wrong < 0.085
  assert np.mean([p_value(0.4) < 0.05 for _ in range(50)]) > 0.9


class Found:
  """Rows of made-up scores, in the place of a store."""

  def __init__(self, score):
    self.score, self.order = score, []
    self.rows = {}

  def find(self, setting):
    return self.rows.get(json.dumps(setting))

  def run(self, part):
    """All runs of a part, in the order of a worker."""
    while True:
      missing = [
        x for x in utility.plan(self.find, [part]) if self.find(x) is None
      ]
      if not missing:
        return self
      setting = Setting(**missing[0])
      self.order.append(setting)
      rng = np.random.default_rng([setting.seed, len(setting.method)])
      right = (rng.random(16) < 0.7).astype(float)
      self.rows[json.dumps(missing[0])] = {
        'tuning accuracy': self.score(setting),
        'test accuracy': float(right.mean()),
        'scores': sentences.packed(right),
        **missing[0],
      }

  @property
  def reported(self):
    return [x for x in self.order if x.seed != utility.TUNING_SEED]


def test_a_part_is_tuned_and_then_reported(monkeypatch):
  part = ('prism', 'dp-adamw'), {'public': True, 'epsilon': 2.0}, (0, 1)
  monkeypatch.setitem(utility.TUNED, 'made up', part)
  found = Found(lambda x: -abs(np.log10(x.rate / 3e-3))).run('made up')
  assert len(set(found.order)) == len(found.order)
  assert {x.epsilon for x in found.order} == {2.0}
  # The public rows choose no rate, and tuning is of a seed of its own.
  assert {x.public for x in found.order if x not in found.reported} == {False}
  assert [(x.method, x.rate, x.seed) for x in found.reported] == [
    (method, 3e-3, seed) for seed in (0, 1) for method in part[0]
  ]
  assert all(x.public for x in found.reported)
  monkeypatch.setitem(utility_tables.TITLES, 'made up', 'Made up')
  rows = utility_tables.rows_of(found.find, 'made up')
  assert {row.method for row in rows} == set(part[0])
  ours = next(row for row in rows if row.method == 'prism')
  compared = [row.compared(ours) for row in rows]
  assert sorted('p' in x for x in compared) == [False, True]


@pytest.mark.slow
def test_a_run_is_charged_for_its_releases(monkeypatch):
  """Through releases, micro-batches and scores, on made-up sentences."""
  rng = np.random.default_rng(0)
  labels = rng.integers(2, size=320)
  tokens = rng.normal(size=(320, 4, 384)) + 2 * labels[:, None, None]
  rows = np.float16(tokens), np.full(320, 4, np.int32), labels
  parts = [problems.take(rows, np.arange(i, j)) for i, j in
           ((0, 200), (200, 260), (260, 320))]  # fmt: skip
  frozen = {'layers': [plain_layers.weights_of(encoded_text.make_layer(0))]}

  def problem_of(setting, folders):
    found = parts
    if setting.is_probe:
      found = [(np.float32(x[0].mean(1)), *x[1:]) for x in parts]
    return problems.Problem(*found, frozen, encoded_text.row_losses, 2)

  monkeypatch.setattr(sentences, 'problem_of', problem_of)
  seen = []
  made = sentences.training.make_private

  def make_private(*args, **kwargs):
    seen.append(kwargs)
    return made(*args, **kwargs)

  monkeypatch.setattr(sentences.training, 'make_private', make_private)
  setting = Setting(
    'sst2', 'prism', 0.03, seed=1, steps=3, batch=100, head='means', b1=0.5,
    metric='mean',
  )  # fmt: skip
  result = sentences.execute(
    setting, sentences.Folders('of', 'sentences'), smoke=True
  )
  for given in seen:
    (head,) = given['prior_releases']
    assert head.noise_multiplier == sentences.HEAD_NOISE['means']['sst2']
    assert given['change_of_variables'].noise_multiplier == 10.0
  right = sentences.unpacked(result['scores'])
  assert len(right) == 60
  assert right.mean() == pytest.approx(result['test accuracy'])
  assert jnp.isfinite(result['tuning accuracy'])
