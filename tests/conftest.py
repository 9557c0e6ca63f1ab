"""What all tests share: threads, and double precision on request."""

import os

# One thread for each process: the matrices are tiny, the threads of BLAS and
# of XLA would only wait for each other, and pytest-xdist runs processes side
# by side. Set before JAX or NumPy starts.
os.environ.setdefault('OMP_NUM_THREADS', '1')
os.environ.setdefault('OPENBLAS_NUM_THREADS', '1')

import jax
import pytest


@pytest.fixture
def x64():
  """Runs the test with 64-bit types, without touching the global switch."""
  with jax.enable_x64(True):
    yield
