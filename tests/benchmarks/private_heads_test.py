"""Heads by method and noise: on made-up vectors."""

import numpy as np
import pytest

from benchmarks.accuracy import private_heads, problems, sentences

SIZE, CLASSES = 600, 3


@pytest.fixture(scope='module')
def problem():
  rng = np.random.default_rng(0)

  def rows(count):
    labels = rng.integers(CLASSES, size=count)
    vectors = rng.normal(size=(count, 6)) + 3 * np.eye(6)[labels]
    return np.float32(vectors), np.ones(count, np.int32), labels

  return problems.Problem(
    rows(SIZE), rows(9), rows(400), {}, lambda: None, CLASSES
  )


@pytest.mark.parametrize('method', private_heads.METHODS)
def test_rows_of_the_table_are_read_from_fresh_noise(
  problem, method, monkeypatch
):
  (clean,) = private_heads.accuracies(problem, method, 0.0, 5)
  assert clean > 0.8
  noisy = private_heads.accuracies(problem, method, 200.0, 4)
  assert len(set(noisy)) > 1
  assert np.mean(noisy) < clean - 0.1
  monkeypatch.setattr(sentences, 'problem_of', lambda *_: problem)
  setting = {'task': 'made up', 'method': method, 'noise multiplier': 2.0}
  row = private_heads.measure(None, **setting)
  assert row['accuracy'] > clean - 0.1
  assert (row['private rows'], row['rows']) == (SIZE, 400)
  assert 1.98 < row['epsilon'] < 2.0
