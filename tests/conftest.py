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
