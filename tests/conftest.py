"""What all tests share: the compiler's settings, precision, golden numbers."""

import ctypes
import gc
import importlib.util
import mmap
import os
import pathlib
import subprocess
import sys

# One thread for each process: the matrices are tiny, the threads of BLAS
# would only wait for each other, and pytest-xdist runs processes side by
# side. Set before NumPy starts.
os.environ.setdefault('OMP_NUM_THREADS', '1')
os.environ.setdefault('OPENBLAS_NUM_THREADS', '1')
os.environ.setdefault('MKL_NUM_THREADS', '1')

# Most of the time of a test is compiling, and the programs are tiny: a compiler
# that optimises little takes a third of the time. With XLA_FLAGS set (even to
# nothing) all is compiled as users compile it. An accelerator's compiler is
# left alone.
if not any(
  importlib.util.find_spec(plugin)
  for plugin in ('jax_cuda12_plugin', 'jax_cuda13_plugin', 'libtpu')
):
  os.environ.setdefault(
    'XLA_FLAGS',
    '--xla_cpu_multi_thread_eigen=false --xla_backend_optimization_level=0'
    ' --xla_llvm_disable_expensive_passes=true'
    ' --xla_cpu_use_fusion_emitters=false'
    # Not in parts for threads that a process with one core does not have.
    ' --xla_cpu_parallel_codegen_split_count=1',
  )
# What was compiled once is not compiled again: by the other worker, by the next
# run, by the mutants. Deleting the folder is safe.
os.environ.setdefault(
  'JAX_COMPILATION_CACHE_DIR',
  str(pathlib.Path(__file__).parents[1] / '.jax_cache'),
)
os.environ.setdefault('JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS', '0')
os.environ.setdefault('JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES', '-1')

import jax
import numpy as np
import pytest

# Before 0.8 it had another place. The oldest version allowed is tested too.
if not hasattr(jax, 'enable_x64'):
  from jax.experimental import enable_x64

  jax.enable_x64 = enable_x64

# What is imported stays, and there are few cycles in what tests leave: by
# default the collector walks through all of JAX a few thousand times.
gc.freeze()
gc.set_threshold(50_000, 20, 100)

_ROOT = pathlib.Path(__file__).parents[1]
_GOLDEN = _ROOT / 'tests' / 'golden'


# Of a slow test with many cases each turn has some.
TURNS = 10


def pytest_addoption(parser):
  parser.addoption(
    '--turn', metavar='COMMIT', type=lambda commit: int(commit, 16) % TURNS,
    help=f'of the slow tests one in {TURNS}, chosen by a commit',
  )  # fmt: skip


def pytest_collection_modifyitems(config, items):
  """The longest first, so that no worker waits for the last test of another."""
  turn = config.getoption('--turn')
  if turn is not None:
    slow = [x for x in items if x.get_closest_marker('slow')]
    # Each of them has one turn.
    left_out = [x for i, x in enumerate(slow) if i % TURNS != turn]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [x for x in items if x not in left_out]

  def allowed(item):
    mark = item.get_closest_marker('timeout')
    return mark.args[0] if mark else 0

  items.sort(key=allowed, reverse=True)  # Files stay together.


_PROCESS = pathlib.Path('/proc/self')
_MOST_MAPS, _MOST_MEMORY = 40_000, 1_400_000_000


@pytest.fixture(autouse=True, scope='module')
def few_compiled_programs():
  """Forgets compiled programs before there are too many of them.

  Linux gives a process 65,530 maps. XLA takes several for each program and
  aborts where there is none left. And two workers shall fit in three gigabytes.
  """
  yield
  if not _PROCESS.exists():
    return
  maps = (_PROCESS / 'maps').read_bytes().count(b'\n')
  pages = int((_PROCESS / 'statm').read_text().split()[1])
  # A module takes some thousands; what is forgotten is loaded again.
  if maps > _MOST_MAPS or pages * mmap.PAGESIZE > _MOST_MEMORY:
    jax.clear_caches()
    gc.collect()
    # What is freed stays with glibc until it is told: all but a third of it.
    libc = ctypes.CDLL(None)
    if hasattr(libc, 'malloc_trim'):
      libc.malloc_trim(0)


def devices(count):
  """Environment of a process that has so many CPU devices."""
  flag = f'--xla_force_host_platform_device_count={count}'
  return os.environ | {
    'XLA_FLAGS': f'{os.environ.get("XLA_FLAGS", "")} {flag}',
    'JAX_PLATFORMS': 'cpu',
    'PYTHONPATH': str(_ROOT),
  }


def python(*arguments, count=None, cwd=_ROOT, timeout=280, **environment):
  """What a process prints that ends well, with so many CPU devices if given."""
  known = os.environ if count is None else devices(count)
  done = subprocess.run(
    [sys.executable, *map(str, arguments)], cwd=cwd, capture_output=True,
    env=known | {'PYTHONPATH': str(_ROOT)} | environment, text=True,
    check=False, timeout=timeout,
  )  # fmt: skip
  assert done.returncode == 0, done.stderr[-3000:]
  return done.stdout


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
