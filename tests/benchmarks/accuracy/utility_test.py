"""Which runs belong to a table, how they are compared, and that they learn."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.accuracy import (
  encoded_text,
  plain_layers,
  problems,
  sentences,
  small_decoder,
  utility,
  utility_tables,
)
from benchmarks.accuracy.sentences import Setting
from benchmarks.common import runner


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


def test_rates_are_compared_with_the_best_one():
  row = utility_tables.Row(
    'prism', 0.1, {}, {0.03: 0.7, 0.1: 0.8, 0.3: 0.75},
    untuned={0.3: 0.76, 0.03: 0.805, 0.1: 0.8, 1.0: 0.1},
  )  # fmt: skip
  assert row.beside == pytest.approx({'rate / 3': 0.005, 'rate * 3': -0.04})


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
  table = utility_tables.table([{'part': 'a', **x} for x in compared], 'a')
  assert table.count('(p = ') == 1


def test_a_change_has_the_rate_that_is_best_without_it(monkeypatch):
  part = ('prism',), ({'rank': 4}, {'rank': 4, 'rungs': 1}), (0,)
  monkeypatch.setitem(utility.VARIED, 'nuisances', part)
  found = Found(lambda x: -abs(np.log10(x.rate / 3e-2)))
  found.run('nuisances')
  assert {(x.rank, x.rate) for x in found.reported} == {(4, 3e-2), (4, 1e-1)}
  assert not list(utility_tables.varied(found.find, 'nuisances'))
  plain = dataclasses.replace(found.reported[0], rank=8)
  key = json.dumps(dataclasses.asdict(plain))
  found.rows[key] = {'test accuracy': 0.5}
  rows = list(utility_tables.varied(found.find, 'nuisances'))
  assert [(x['change'], x['rungs']) for x in rows] == [
    ('rank=4', 0), ('rank=4', 1)
  ]  # fmt: skip
  assert rows[0]['points'] == pytest.approx(100 * (rows[0]['accuracy'] - 0.5))


BEST = {'b1': 0.9, 'weight_decay': 1.0, 'start': 'balanced', 'average': True}


def score(setting):
  """Largest at ``BEST`` and a rate that depends on b1."""
  rate = 1e-3 if setting.b1 == 0.9 else 3e-3
  steps = abs(np.log10(max(setting.rate, 1e-9) / rate))
  return sum(getattr(setting, k) == v for k, v in BEST.items()) - steps


def test_equal_tuning_tries_one_option_after_the_other(monkeypatch):
  rows = ('prism', 'dp-adamw', 'head alone', 'dp-adamw, input metric')
  monkeypatch.setattr(
    utility, 'EQUAL', {row: utility.EQUAL[row] for row in rows}
  )
  found = Found(score).run('equal-sst2')
  of_score = utility.score_of(found.find)
  for row in rows[1::2]:
    best = utility.equally_tuned(of_score, row, 'sst2')
    expected = {**BEST, 'rate': 1e-3}
    assert {k: getattr(best, k) for k in expected} == expected
    assert best.metric == utility.EQUAL[row].get('metric', '')
  # Means of arrays are nothing on the manifold.
  assert not utility.equally_tuned(of_score, 'prism', 'sst2').average
  assert len(found.reported) == len(rows) * len(utility.EQUAL_SEEDS)
  table = utility_tables.equal_table(found.find, ('sst2',)).splitlines()
  assert table[2].startswith('| sst2 | prism | 0.9, 1, balanced, no, 0.001 |')
  assert '| sst2 | dp-adamw | 0.9, 1, balanced, yes, 0.001 |' in table[3]
  # Of a method that is not finished nothing is said.
  first = next(x for x in found.reported if x.method == 'prism')
  del found.rows[json.dumps(dataclasses.asdict(first))]
  assert '| prism |' not in utility_tables.equal_table(found.find, ('sst2',))


def test_every_method_is_tuned_alike():
  compared = 'prism', 'dp-adamw', 'lora+', 'ffa'
  options = [utility.options_of(x) for x in compared]
  assert len({str(x[:3]) for x in options}) == 1
  assert all(dict(x)['b1'] == (0.0, 0.9) for x in options)


def test_scores_are_kept_as_they_are():
  bits = np.array([1.0, 0.0, 1.0] * 7)
  np.testing.assert_array_equal(
    sentences.unpacked(sentences.packed(bits)), bits
  )
  shares = np.array([0.25, 0.5, 1.0])
  found = sentences.unpacked(sentences.packed(shares))
  np.testing.assert_array_equal(found, shares)


def test_the_stored_runs_have_rows_of_their_own():
  path = runner.FOLDER / 'accuracy.json'
  store = runner.Store(path, sentences.DEFAULTS)
  for row in store.rows:
    setting = {k: row.get(k, v) for k, v in sentences.DEFAULTS.items()}
    assert store.find(setting) is row


def of_decoder(monkeypatch, rows, length):
  """A problem of the small decoder, in the place of its data."""
  frozen = jax.jit(small_decoder.initial)(jax.random.key(0))
  given = problems.Problem(
    (rows,), (rows[:8],), (rows[:8],), frozen, small_decoder.row_losses, 0
  )
  monkeypatch.setattr(sentences, 'problem_of', lambda *_: given)
  return frozen, sentences.Folders('of', f'{length}')


@pytest.mark.slow
@pytest.mark.parametrize(
  'method', ['prism, correlated noise', 'dp-muon', 'ffa']
)
def test_other_noise_and_other_parameters_make_a_private_step(
  method, monkeypatch
):
  rows = np.random.default_rng(0).integers(3, 40, (64, 5)).astype(np.int32)
  frozen, folders = of_decoder(monkeypatch, rows, 4)
  setting = Setting(
    'maths', method, 0.03, seed=0, rows=64, batch=32, steps=2,
    start=utility.STARTS.get(method, 'default'),
  )  # fmt: skip
  params, *_ = sentences.train(setting, folders, 1.0)
  given = sentences.problem_of(setting, folders)
  before, _ = sentences.start(setting, given, None)
  moved = jax.tree.map(lambda x, y: np.max(np.abs(x - y)), before, params)
  assert np.isfinite(jax.tree.leaves(moved)).all()
  assert max(jax.tree.leaves(moved)) > 0
  assert len(frozen['layers']) == 2


@pytest.mark.slow
def test_a_decoder_learns_what_it_is_trained_on(monkeypatch):
  """The way of a run through the decoder, on a few made-up rows.

  By the method that compiles in the least time: what learns is the decoder.
  """
  rng = np.random.default_rng(0)
  rows = np.tile(rng.integers(3, 40, 13), (64, 1)).astype(np.int32)
  _, folders = of_decoder(monkeypatch, rows, 12)
  setting = Setting(
    'maths', 'dp-adamw', 0.03, None, 0, rows=64, batch=32, steps=8
  )
  params, _, frozen = sentences.train(setting, folders, 0.0)
  given = sentences.problem_of(setting, folders)
  before, _ = sentences.start(setting, given, None)
  losses = [
    small_decoder.row_losses(x, frozen, rows[:1])[0].item()
    for x in (before, params)
  ]
  assert losses[1] < losses[0] - 0.3


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
