"""Runs ``prism-optax train`` again and again, killing itself on the way.

    python killed_run.py FOLDER PLACES ARGUMENTS...

PLACES are separated by commas: ``step:3`` is a SIGKILL just before the third
step that a process does, ``save:2`` one in the middle of its second checkpoint,
``end`` none. One process for each of them, all forked from this one (to import
takes longer than to run), the later ones with ``--resume``; before them one of
another run that is not killed. Every step that is done leaves a line in the log
of its run: its number, and what went into it.

Prints the exit status of each process, and after each what is in the journal.
"""

import json
import os
import pathlib
import signal
import sys

ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

import jax  # noqa: E402
import numpy as np  # noqa: E402

from prism_optax.finetune import main as finetune  # noqa: E402
from prism_optax.finetune import run  # noqa: E402
from prism_optax.training import PrivateTraining  # noqa: E402
from tests.core import seams  # noqa: E402
from tests.replay.harness import digest  # noqa: E402


def kill():
  os.kill(os.getpid(), signal.SIGKILL)


def record(log, last_step):
  """Wraps the step."""
  step, done = PrivateTraining.step, []

  def recorded(self, state, batch, frozen=None):
    if len(done) + 1 == last_step:
      kill()
    done.append(1)
    keys = [
      leaf
      for leaf in jax.tree.leaves(state.optimizer)
      if jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    ]
    line = {
      'step': int(state.step),
      'key': digest(keys),
      'batch': digest((batch.examples, batch.is_padding_example)),
      'params': digest(state.params),
      'optimizer': digest(state.optimizer),
    }
    with log.open('a') as file:
      file.write(json.dumps(line) + '\n')
    return step(self, state, batch, frozen)

  PrivateTraining.step = recorded


def kill_while_saving(number):
  """In the middle of a checkpoint: half of its file is written."""
  save, done = np.savez, []

  def half(file, **arrays):
    done.append(1)
    save(file, **arrays)
    if len(done) == number:
      file.flush()
      os.ftruncate(file.fileno(), file.tell() // 2)
      kill()

  np.savez = half


def step_of(path):
  """The number of the step in a file of a state."""
  with np.load(path) as stored:
    _, header = json.loads(str(stored['header']))
    number = [name for name, *_ in header].index('.step')
    return int(np.frombuffer(stored[str(number)].tobytes(), np.int64)[0])


def keep_checkpoints():
  """What a run deletes at its end, the test looks at."""
  run.shutil.rmtree = lambda *_, **__: None


def main():
  root, places, *argv = sys.argv[1:]
  train(pathlib.Path(root, 'whole'), ['end'], argv)
  train(pathlib.Path(root, 'killed'), places.split(','), argv)


def train(run_folder, places, argv):
  folder, log = run_folder / 'out', run_folder / 'log'
  run_folder.mkdir()
  for place in places:
    child = os.fork()
    if not child:
      keep_checkpoints()
      kind, _, number = place.partition(':')
      record(log, int(number) if kind == 'step' else 0)
      if kind == 'save':
        kill_while_saving(int(number))
      begun = (folder / 'options.json').exists()
      resume = ['train', '--output', str(folder), '--resume']
      given = resume if begun else [*argv, '--output', str(folder)]
      os._exit(finetune.main(given))
    _, status = os.waitpid(child, 0)
    secret = folder / run.FOLDER
    saved = (secret / 'state.npz').exists()
    step = step_of(secret / 'state.npz') if saved else None
    spent = seams.releases_of(secret / 'journal.sqlite')[0] if saved else None
    lines = log.read_text().splitlines() if log.exists() else []
    done = max((json.loads(line)['step'] + 1 for line in lines), default=0)
    result = {
      'place': place,
      'done': done,
      'status': os.waitstatus_to_exitcode(status),
      'step': step,
      'spent': spent,
    }
    print('RESULT', json.dumps(result), flush=True)


if __name__ == '__main__':
  main()
