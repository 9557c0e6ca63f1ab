"""Which runs belong to a table, how they are compared, and that they learn."""

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.accuracy import (
  encoded_text,
  plain_layers,
  problems,
  sentences,
  utility_tables,
)
from benchmarks.accuracy.sentences import Setting
from prism_optax import accounting


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
    return problems.Problem(*found, frozen, encoded_text.row_losses, 2, 384)

  monkeypatch.setattr(sentences, 'problem_of', problem_of)
  seen = []
  made = sentences.training.make_private

  def make_private(*args, **kwargs):
    seen.append(kwargs)
    return made(*args, **kwargs)

  monkeypatch.setattr(sentences.training, 'make_private', make_private)
  setting = Setting(
    'sst2', 'prism', 0.03, seed=1, steps=3, batch=100, head='ridge', b1=0.5
  )
  result = sentences.execute(
    setting, sentences.Folders('of', 'sentences'), smoke=True
  )
  for given in seen:
    (head,) = given['prior_releases']
    assert 1.5 < accounting.epsilon(head.event, sentences.DELTA) < 3.0
  right = sentences.unpacked(result['scores'])
  assert len(right) == 60
  assert right.mean() == pytest.approx(result['test accuracy'])
  assert jnp.isfinite(result['tuning accuracy'])
