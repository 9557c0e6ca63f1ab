"""No room on the disk: the run stops, and what was saved stays."""

import contextlib
import json
import resource

import jax.numpy as jnp
import pytest

from prism_optax import training
from prism_optax.finetune import main as finetune
from tests.finetune import finetune_test


@contextlib.contextmanager
def full_disk(largest_file=100):
  """Writes beyond so many bytes fail, in this process and from any library."""
  before = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, before[1]))
  try:
    yield
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_checkpoint_that_cannot_be_written_leaves_the_one_before(tmp_path):
  path = tmp_path / 'state.npz'
  training.save_state(path, {'step': jnp.int32(1)})
  with pytest.raises(OSError, match='File too large'), full_disk():
    training.save_state(path, {'step': jnp.int32(2)})
  assert int(training.load_state(path, {'step': jnp.int32(0)})['step']) == 1
  assert list(tmp_path.iterdir()) == [path]


@pytest.mark.slow
def test_a_run_on_a_full_disk_stops_and_goes_on(
  tiny_files, tiny_model, tmp_path, monkeypatch, capsys
):
  output = tmp_path / 'out'
  save = training.save_state

  def failing(path, state):
    full = int(state.step) == 4
    with full_disk() if full else contextlib.nullcontext():
      save(path, state)

  monkeypatch.setattr(training, 'save_state', failing)
  argv = finetune_test._arguments(
    tiny_files, tiny_model, output, '--optimizer', 'dp-adamw'
  )
  assert finetune.main(argv) == 2
  error = capsys.readouterr().err
  assert 'File too large' in error
  assert 'go on with --resume' in error
  assert not (output / 'adapter.safetensors').exists()
  monkeypatch.undo()
  assert finetune.main(['train', '--output', str(output), '--resume']) == 0
  summary = json.loads((output / 'summary.json').read_text())
  assert summary['final']['step'] == finetune_test.STEPS
