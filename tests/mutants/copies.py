"""A copy of the repository in which something is wrong, and its tests."""

import multiprocessing
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).parents[2]
_FOLDERS = (
  '.ci', '.github', 'prism_optax', 'tests', 'examples', 'benchmarks', 'docs',
  'notebooks',
)  # fmt: skip


def write(folder: pathlib.Path, path: str = '', source: str = '') -> None:
  """Copies what the tests need, with another source of one file.

  A file that a test does not find would be a test that fails whatever is wrong.
  """
  for name in _FOLDERS:
    shutil.copytree(
      ROOT / name, folder / name, ignore=shutil.ignore_patterns('__pycache__')
    )
  for file in ROOT.iterdir():
    if file.is_file() and file.name != '.git':  # A file in a worktree.
      shutil.copy(file, folder)
  if path:
    (folder / path).write_text(source)


# To import what a test needs takes longer than most tests that notice a mutant.
# So one process imports it, all but the package, and is forked for each; it
# starts nothing of JAX that would not survive that.
_FORKS = multiprocessing.get_context('forkserver')
_FORKS.set_forkserver_preload(
  [
    'tests.conftest',  # First: it sets what JAX reads when it is imported.
    'dp_accounting.pld',
    'dp_accounting.rdp',
    'hypothesis.extra.numpy',
    'jax_privacy',
    'optax',
    'scipy.stats',
  ]
)


def _fork(folder: str, arguments: tuple[str, ...], printed: str) -> None:
  """Ends with the exit status of pytest, whose output is in a file."""
  ours = ('prism_optax', 'tests')
  for name in [x for x in sys.modules if x.partition('.')[0] in ours]:
    del sys.modules[name]
  os.chdir(folder)
  sys.path[:] = [folder, *(x for x in sys.path if x not in ('', str(ROOT)))]
  os.environ['CI'] = 'true'  # Else pytest cuts its summary.
  with open(printed, 'wb', buffering=0) as file:
    for stream in (1, 2):
      os.dup2(file.fileno(), stream)
  import pytest

  status = pytest.main(['-q', '-p', 'no:cacheprovider', '--tb=no', *arguments])
  sys.stdout.flush()
  os._exit(status)


def run_tests(
  folder: pathlib.Path, *arguments: str, timeout: float
) -> tuple[int, str]:
  """Runs pytest there, without the time that it takes to import JAX.

  Args:
    folder: A copy.
    arguments: Of pytest.
    timeout: Seconds.

  Returns:
    The exit status, and what was printed.

  Raises:
    subprocess.TimeoutExpired: If it takes longer.
  """
  with tempfile.NamedTemporaryFile('r', errors='replace') as printed:
    args = (str(folder), arguments, printed.name)
    process = _FORKS.Process(target=_fork, args=args)
    process.start()
    process.join(timeout)
    if process.is_alive():
      process.kill()
      raise subprocess.TimeoutExpired(arguments, timeout)
    return process.exitcode, printed.read()
