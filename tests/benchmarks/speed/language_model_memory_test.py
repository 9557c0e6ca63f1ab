"""What is measured is a training, and a process."""

import resource
import sys

import jax
import numpy as np
import pytest

from benchmarks.speed import language_model_memory as benchmark
from tests.finetune import conftest, finished_runs, language_models


def test_the_peak_is_that_of_the_process():
  code = 'x = bytes(range(256)) * 2**22'
  size = benchmark.peak([sys.executable, '-c', code])
  # 1 GB and the interpreter, or this process: the system counts from its size,
  # and other tests may have made it larger.
  own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
  assert 1024 < size < max(1050, own + 26)
  with pytest.raises(RuntimeError, match='failed'):
    benchmark.peak([sys.executable, '-c', '1 / 0'])


@pytest.mark.slow
def test_the_plain_run_trains_all_adapters(tmp_path, monkeypatch):
  """Two micro-batches a step, from the rows of the command."""
  model = language_models.write(tmp_path / 'model')
  rows = [
    {'question': row['prompt'], 'rationale': row['response']}
    for row in finished_runs.ROWS
  ]
  data = str(conftest.write_lines(tmp_path / 'a.jsonl', rows * 4))
  monkeypatch.setitem(benchmark.SIZES, 'length', 14)
  monkeypatch.setitem(benchmark.SIZES, 'rank', 2)
  task = benchmark.read(data, data, str(model))
  before = jax.tree.map(np.array, task.params)
  after = benchmark.plain(task, 2, 4, 2)
  for old, new in zip(
    jax.tree.leaves(before), jax.tree.leaves(after), strict=True
  ):
    assert np.isfinite(new).all()
    assert (np.abs(new - old).max(axis=(1, 2)) > 0).all()
