"""What is compiled for accelerators stays as small as the documentation says.

Needs the compilers, not the devices: ``PRISM_OPTAX_COMPILERS`` names a folder
that ``pip install --no-deps --target`` has put jax-cuda12-plugin,
jax-cuda12-pjrt and libtpu into (``.ci/run`` does).
"""

import json
import os
import subprocess
import sys

import pytest

from benchmarks.common import runner

COMPILERS = os.environ.get('PRISM_OPTAX_COMPILERS')
# A compiler's next version may fuse a little more or less. What it must not do
# is loop over an SVD, or launch a kernel for each module.
SLACK = 1.1


def stored(target: str, modules: str) -> dict:
  store = runner.Store(runner.FOLDER / 'lowered.json')
  return store.find({'target': target, 'modules': modules, 'method': 'prism'})


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
  command = [sys.executable, '-c', code]
  path = os.pathsep.join([str(COMPILERS), str(runner.ROOT)])
  environment = os.environ | {'PYTHONPATH': path, 'XLA_FLAGS': ''}
  done = subprocess.run(
    command, env=environment, capture_output=True, text=True, check=False
  )
  assert done.returncode == 0, done.stderr[-2000:]
  row = json.loads(done.stdout)
  before = stored(target, modules)
  assert row['launches'] <= SLACK * before['launches']
  assert row['loops'] == before['loops'] == 0
  assert row['solvers'] <= 2
  assert row['conditionals'] <= 4
  limit = SLACK * before['temporary megabytes']
  assert row['temporary megabytes'] <= limit
