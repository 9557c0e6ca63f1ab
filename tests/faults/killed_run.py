"""Runs ``examples/finetune.py`` again and again, killing itself on the way.

    python killed_run.py LOG FOLDER PLACES ARGUMENTS...

PLACES are separated by commas: ``step:3`` is a SIGKILL just before the third
step that a process does, ``save:2`` one in the middle of its second checkpoint,
``end`` none. One process for each of them, all forked from this one (to import
takes longer than to run), the later ones with ``--resume``. Every step that is
done leaves a line in LOG: its number, and what went into it.

Prints the exit status of each process, and after each what is in the ledger.
"""

import hashlib
import json
import os
import pathlib
import signal
import sys
import threading
import time

ROOT = pathlib.Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / 'examples')]

import finetune  # noqa: E402
import jax  # noqa: E402
import numpy as np  # noqa: E402
from finetuning import checkpoints, training  # noqa: E402


def kill():
  os.kill(os.getpid(), signal.SIGKILL)


def digest(tree):
  total = hashlib.sha256()
  for leaf in jax.tree.leaves(tree):
    if jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
      leaf = jax.random.key_data(leaf)
    total.update(np.asarray(leaf).tobytes())
  return total.hexdigest()[:16]


def record(log, last_step):
  """Wraps the compiled step."""
  compile_step = training.compile_step

  def compiled(*args):
    step = compile_step(*args)
    done = []

    def recorded(state, frozen, *batch):
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
        'batch': digest(batch),
        'params': digest(state.params),
        'optimizer': digest(state.optimizer),
      }
      with log.open('a') as file:
        file.write(json.dumps(line) + '\n')
      return step(state, frozen, *batch)

    return recorded

  training.compile_step = compiled


def kill_while_saving(folder, number):
  """A thread that waits for the temporary folder of a checkpoint."""

  def watch():
    seen = set()
    while True:
      for path in (folder / checkpoints.FOLDER).glob('*tmp*'):
        seen.add(path.name)
        if len(seen) == number:
          kill()
      time.sleep(1e-4)

  threading.Thread(target=watch, daemon=True).start()


def main():
  log, folder = map(pathlib.Path, sys.argv[1:3])
  places, argv = sys.argv[3].split(','), sys.argv[4:]
  for place in places:
    child = os.fork()
    if not child:
      kind, _, number = place.partition(':')
      record(log, int(number) if kind == 'step' else 0)
      if kind == 'save':
        kill_while_saving(folder, int(number))
      begun = (folder / 'options.json').exists()
      resume = ['--output', str(folder), '--resume']
      os._exit(finetune.main(resume if begun else argv))
    _, status = os.waitpid(child, 0)
    steps = [
      int(path.name)
      for path in (folder / checkpoints.FOLDER).glob('[0-9]*')
      if path.name.isdigit()
    ]
    spent = None
    if steps:
      stored = folder / checkpoints.FOLDER / str(max(steps)) / 'ledger/metadata'
      spent = json.loads(stored.read_text())['spent_steps']
    lines = log.read_text().splitlines() if log.exists() else []
    done = max((json.loads(line)['step'] + 1 for line in lines), default=0)
    result = {
      'place': place,
      'done': done,
      'status': os.waitstatus_to_exitcode(status),
      'step': max(steps, default=None),
      'spent': spent,
    }
    print('RESULT', json.dumps(result), flush=True)


if __name__ == '__main__':
  main()
