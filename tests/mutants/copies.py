"""A copy of the repository in which something is wrong, and its tests."""

import os
import pathlib
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[2]
_FOLDERS = (
  'prism_optax', 'tests', 'examples', 'benchmarks', 'docs', 'notebooks'
)  # fmt: skip
_FILES = ('pyproject.toml', 'README.md', 'SECURITY.md', 'CHANGELOG.md')


def write(folder: pathlib.Path, path: str = '', source: str = '') -> None:
  """Copies what the tests need, with another source of one file.

  Args:
    folder: An empty one.
    path: A file below the package; empty changes nothing.
    source: What stands in it.
  """
  for name in _FOLDERS:
    shutil.copytree(
      ROOT / name, folder / name, ignore=shutil.ignore_patterns('__pycache__')
    )
  for name in _FILES:
    shutil.copy(ROOT / name, folder)
  if path:
    (folder / 'prism_optax' / path).write_text(source)


def run_tests(
  folder: pathlib.Path,
  *arguments: str,
  timeout: float,
  program: tuple[str, ...] = ('pytest',),
) -> subprocess.CompletedProcess[str]:
  """Runs pytest there. What the tests of the original have compiled serves too.

  Args:
    folder: A copy, or the repository.
    arguments: Of pytest.
    timeout: Seconds.
    program: The module that is run, with arguments in front of pytest's.
  """
  command = [sys.executable, '-m', *program, '-q', '-p', 'no:cacheprovider']
  return subprocess.run(
    [*command, '--tb=no', *arguments],
    cwd=folder,
    # CI: else pytest cuts its summary at the terminal's width.
    env=os.environ
    | {'CI': 'true', 'JAX_COMPILATION_CACHE_DIR': str(ROOT / '.jax_cache')},
    capture_output=True,
    text=True,
    timeout=timeout,
    check=False,
  )
