"""No room on the disk: the run stops, and what was saved stays."""

import contextlib
import json
import resource

import finetune
import pytest
from finetuning import checkpoints

from tests.examples import finetune_test
from tests.faults import checkpoint_test


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
  store = checkpoints.Checkpoints(tmp_path)
  release = checkpoint_test.RELEASE
  store.save(checkpoint_test._checkpoint(1), checkpoints.Ledger(release, 2))
  two = checkpoint_test._checkpoint(2), checkpoints.Ledger(release, 4)
  with pytest.raises(OSError, match='File too large'), full_disk():
    store.save(*two)
  store.close()
  store = checkpoints.Checkpoints(tmp_path)
  found, ledger = store.restore(checkpoint_test._checkpoint(), release)
  assert (int(found.state.step), ledger.spent_steps) == (1, 2)
  store.save(*two)
  assert int(store.restore(two[0], release)[0].state.step) == 2
  store.close()


@pytest.mark.slow
def test_a_run_on_a_full_disk_stops_and_goes_on(
  tiny_files, tiny_model, tmp_path, monkeypatch, capsys
):
  output = tmp_path / 'out'
  save = checkpoints.Checkpoints.save

  def failing(self, checkpoint, ledger):
    full = int(checkpoint.state.step) == 4
    with full_disk() if full else contextlib.nullcontext():
      save(self, checkpoint, ledger)

  monkeypatch.setattr(checkpoints.Checkpoints, 'save', failing)
  argv = finetune_test._arguments(
    tiny_files, tiny_model, output, '--optimizer', 'dp-adamw'
  )
  assert finetune.main(argv) == 2
  error = capsys.readouterr().err
  assert 'File too large' in error
  assert 'go on with --resume' in error
  assert not (output / 'adapter.safetensors').exists()
  monkeypatch.undo()
  assert finetune.main(['--output', str(output), '--resume']) == 0
  summary = json.loads((output / 'summary.json').read_text())
  assert summary['final']['step'] == finetune_test.STEPS
