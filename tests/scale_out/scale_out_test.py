"""On many devices the result is that of one, and the noise is drawn once.

The programs run in processes of their own: the number of host devices is fixed
when JAX starts.
"""

import socket
import subprocess
import sys

import jax
import numpy as np
import pytest

from tests import conftest
from tests.scale_out import training


def _start(devices, *command):
  return subprocess.Popen(
    [sys.executable, '-m', *map(str, command)],
    env=conftest.devices(devices), text=True,
    stdout=subprocess.PIPE, stderr=subprocess.PIPE,
  )  # fmt: skip


def _finish(*processes):
  try:
    done = [process.communicate(timeout=280) for process in processes]
  finally:
    for process in processes:
      process.kill()
  for process, printed in zip(processes, done, strict=True):
    assert process.returncode == 0, [x[-3000:] for x in printed]


@pytest.mark.slow
def test_on_eight_devices():
  file = training.__file__.replace('training.py', 'eight_devices.py')
  _finish(_start(8, 'pytest', '-q', '-p', 'no:cacheprovider', file))


@pytest.mark.slow
def test_two_processes_train_one_model_with_one_noise(tmp_path):
  with socket.socket() as free:
    free.bind(('localhost', 0))
    port = free.getsockname()[1]
  names = [tmp_path / f'{i}.npz' for i in range(2)]
  _finish(
    *(
      _start(4, 'tests.scale_out.two_processes', port, 2, i, names[i])
      for i in range(2)
    )
  )
  one, other = (dict(np.load(name)) for name in names)
  # A fresh seed, but the same for both.
  seeds = [x.pop('seed') for x in (one, other)]
  np.testing.assert_array_equal(*seeds)
  alone, _ = training.train(training.optimizer_of('prism'))
  for path, value in jax.tree_util.tree_flatten_with_path(alone)[0]:
    found = one[jax.tree_util.keystr(path)]
    np.testing.assert_array_equal(found, other[jax.tree_util.keystr(path)])
    difference = np.max(np.abs(found - value))
    assert difference < training.ROUNDING * np.max(np.abs(value)), path
