"""SIGKILL anywhere: the run that goes on is the run that was never stopped."""

import json
import pathlib

import numpy as np
import pytest

from prism_optax.finetune import run
from tests import conftest
from tests.core import seams
from tests.finetune import finetune_test

PROGRAM = pathlib.Path(__file__).with_name('killed_run.py')
# The program of a run is that of `finetune_test`: it is compiled once for both.
STEPS = finetune_test.STEPS
# In the first checkpoint, before anything is released; between checkpoints; in
# a later one; before the first step after it.
PLACES = 'save:1,step:4,save:2,step:1,end'


def _lines(path):
  return [json.loads(line) for line in path.read_text().splitlines()]


def _stored(output):
  """Every entry of the last checkpoint, and what the journal counts."""
  folder = output / run.FOLDER
  with np.load(folder / 'state.npz') as stored:
    arrays = {name: stored[name].tobytes() for name in stored.files}
  return arrays, seams.releases_of(folder / 'journal.sqlite')


@pytest.mark.slow
def test_killed_anywhere_a_run_ends_as_if_it_had_not_been(
  tiny_files, tiny_model, tmp_path
):
  argv = finetune_test._arguments(
    tiny_files, tiny_model, 'not yet known', '--eval-every', '4'
  )
  printed = conftest.python(PROGRAM, tmp_path, PLACES, *argv)
  _, *results = (
    json.loads(line.removeprefix('RESULT '))
    for line in printed.splitlines()
    if line.startswith('RESULT ')
  )
  whole, killed = (tmp_path / x / 'out' for x in ('whole', 'killed'))
  expected, found = (_lines(x.with_name('log')) for x in (whole, killed))
  assert [r['status'] for r in results] == [-9] * 4 + [0]

  # Each step is a function of the secrets: however often it is done, its key,
  # batch, parameters and moments are those of the uninterrupted run.
  assert [line['step'] for line in expected] == list(range(STEPS))
  by_step = {line['step']: line for line in expected}
  assert len(found) > STEPS  # Some were done twice.
  assert all(line == by_step[line['step']] for line in found)
  # And no two steps have a key or a batch in common.
  for kind in ('key', 'batch'):
    assert len({line[kind] for line in expected}) == STEPS

  # The journal has every step that was done, once, and never goes back.
  spent = [r['spent'] for r in results if r['spent'] is not None]
  assert spent == sorted(spent)
  assert spent[-1] == STEPS
  assert all((r['spent'] or 0) >= r['done'] for r in results)
  # A step that no checkpoint holds had been done when the process died.
  assert any(r['done'] > r['step'] for r in results if r['spent'])

  for name in ('adapter.safetensors', 'metrics.jsonl', 'summary.json'):
    assert (killed / name).read_bytes() == (whole / name).read_bytes()
  (arrays, count), (others, other_count) = map(_stored, (killed, whole))
  assert count == other_count == (STEPS, STEPS)
  assert arrays == others
