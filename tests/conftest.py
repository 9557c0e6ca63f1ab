"""What all tests share: threads, double precision, the golden numbers."""

import os
import pathlib

# One thread for each process: the matrices are tiny, the threads of BLAS
# would only wait for each other, and pytest-xdist runs processes side by
# side. Set before NumPy starts.
os.environ.setdefault('OMP_NUM_THREADS', '1')
os.environ.setdefault('OPENBLAS_NUM_THREADS', '1')

import jax
import numpy as np
import pytest

# Before 0.8 it had another place. The oldest version allowed is tested too.
if not hasattr(jax, 'enable_x64'):
  from jax.experimental import enable_x64

  jax.enable_x64 = enable_x64

_GOLDEN = pathlib.Path(__file__).parent / 'golden'


@pytest.fixture(autouse=True, scope='module')
def few_memory_maps():
  """Forgets compiled programs before the kernel runs out of maps for them.

  Linux gives a process 65,530 of them. XLA takes several for each program and
  aborts where there is none left.
  """
  yield
  maps = pathlib.Path('/proc/self/maps')
  if maps.exists() and maps.read_bytes().count(b'\n') > 25_000:
    jax.clear_caches()


@pytest.fixture
def x64():
  """Runs the test with 64-bit types, without touching the global switch."""
  with jax.enable_x64(True):
    yield


@pytest.fixture
def golden():
  """load(name, prefix): arrays of tests/golden by their names without it."""

  def load(name, prefix=''):
    with np.load(_GOLDEN / f'{name}.npz', allow_pickle=False) as arrays:
      return {
        k.removeprefix(prefix): v
        for k, v in arrays.items()
        if k.startswith(prefix)
      }

  return load
