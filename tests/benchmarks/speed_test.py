"""Processes and programs of the benchmarks of speed.

Accelerators need their compilers, not the devices: ``PRISM_OPTAX_COMPILERS``
names a folder that ``pip install --no-deps --target`` has put
jax-cuda12-plugin, jax-cuda12-pjrt and libtpu into (RELEASING.md).
"""

import json
import os
import resource
import sys

import jax
import numpy as np
import pytest

from benchmarks.common import runner
from benchmarks.speed import language_model_memory, make_private, no_hang, steps
from tests import conftest


@pytest.mark.slow
def test_the_peak_is_that_of_the_process():
  code = 'x = bytes(range(256)) * 2**22'
  size = language_model_memory.peak([sys.executable, '-c', code])
  # 1 GB and the interpreter, or this process: the system counts from its size,
  # and other tests may have made it larger.
  own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
  assert 1024 < size < max(1050, own + 26)
  with pytest.raises(RuntimeError, match='failed'):
    language_model_memory.peak([sys.executable, '-c', '1 / 0'])


@pytest.mark.slow
@pytest.mark.parametrize('batched', [False, True])
def test_by_hand_and_make_private_do_the_same(batched):
  """Two steps with the same keys, bit for bit.

  Without the digest that makes the noise of each program another one.
  """
  problem = steps.digits(rows=8)
  private = make_private.PrivateStep(problem, batched)
  by_hand = make_private.by_hand(problem, batched, private.batch)
  found, state = private.state.params, private.state.optimizer
  for _ in range(2):
    found, state = private.training._step(
      found, state, problem.frozen, private.batch.examples,
      private.batch.is_padding_example, None,
    )[:2]  # fmt: skip
    by_hand()
  params, _ = by_hand._carried
  jax.tree.map(np.testing.assert_array_equal, found, params)
  assert not np.array_equal(
    params['last']['lora_b'], problem.params['last']['lora_b']
  )


# Of each kind of frame; the program above goes through every environment.
STEPS = 300


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize('frames', ['cheap', 'align'])
def test_many_steps_finish(frames):
  """`align` destroys orthogonal columns: each frame is a QR and an SVD."""
  # The compiler's settings of the tests, but with all threads of a user.
  flags = os.environ.get('XLA_FLAGS', '').replace('eigen=false', 'eigen=true')
  done = no_hang.run(frames, STEPS, flags)
  assert done.returncode == 0, done.stderr[-2000:]
  assert done.stdout.splitlines()[-1] == 'done'


COMPILERS = os.environ.get('PRISM_OPTAX_COMPILERS')


# A compiler's next version may fuse a little more or less. What it must not do
# is loop over an SVD, or launch a kernel for each module.
SLACK = 1.1


@pytest.mark.slow
@pytest.mark.skipif(
  COMPILERS is None, reason='PRISM_OPTAX_COMPILERS is not set'
)
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
  ('target', 'modules'),
  [('h200', 'small'), ('h200', 'gemma, stacked'), ('tpu', 'small')],
)
def test_an_update_is_few_kernels(target, modules):
  """In a process of its own: there the compilers are devices that fail."""
  code = (
    f'import json; from benchmarks.speed import lowered;'
    f' print(json.dumps(lowered.measure({target!r}, {modules!r}, "prism")))'
  )
  path = os.pathsep.join([str(COMPILERS), str(runner.ROOT)])
  row = json.loads(conftest.python('-c', code, PYTHONPATH=path, XLA_FLAGS=''))
  before = runner.Store(runner.FOLDER / 'lowered.json').find(
    {'target': target, 'modules': modules, 'method': 'prism'}
  )
  fewest = before['launches'] / 2  # Fewer are not counted rightly.
  assert fewest < row['launches'] <= SLACK * before['launches']
  assert row['loops'] == before['loops'] == 0
  assert row['solvers'] <= 2
  assert row['conditionals'] <= 4
  limit = SLACK * before['temporary megabytes']
  assert row['temporary megabytes'] <= limit
