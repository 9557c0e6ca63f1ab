"""Where results are stored, and what they say about the machine."""

import contextlib
import fcntl
import json
import os
import pathlib
import platform
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import metadata
from typing import Any

import jax

ROOT = pathlib.Path(__file__).parents[2]
FOLDER = ROOT / 'benchmarks' / 'results'


def path_of(name: str) -> pathlib.Path:
  """The file of results of this name on this kind of device."""
  return FOLDER / f'{name}_{jax.default_backend()}.json'


def save(name: str, results: Any) -> pathlib.Path:
  """Writes results beside those of other devices, and returns the file."""
  path = path_of(name)
  write(path, results)
  return path


def write(path: pathlib.Path, results: Any) -> None:
  """Writes results as indented JSON."""
  write_text(path, json.dumps(results, indent=1))


def write_text(path: pathlib.Path, text: str) -> None:
  """Writes a file all at once: who stops halfway leaves the old one."""
  path.parent.mkdir(parents=True, exist_ok=True)
  partial = path.with_suffix(f'.{os.getpid()}')
  partial.write_text(text + '\n', 'utf-8')
  partial.replace(path)


def add_rows(
  path: pathlib.Path,
  names: Sequence[str],
  keys: Iterable[tuple[Any, ...]],
  measure: Callable[..., dict[str, Any]],
) -> list[dict[str, Any]]:
  """The rows of a file, after measuring those that it does not have.

  Each is written when it is there: an interrupted script goes on with the next.

  Args:
    path: JSON with ``'environment'`` and ``'rows'``.
    names: What tells rows apart, keys of a row.
    keys: Their values in the wanted rows.
    measure: From these values to the row.
  """
  rows = json.loads(path.read_text('utf-8'))['rows'] if path.exists() else []
  done = {tuple(row[name] for name in names) for row in rows}
  for key in keys:
    if key not in done:
      rows.append(measure(*key))
      write(path, {'environment': environment(), 'rows': rows})
      print(*key, 'is done', flush=True)
  return rows


@contextlib.contextmanager
def locked(path: pathlib.Path) -> Iterator[None]:
  """For workers that add to one file: read and write it inside of this."""
  path.parent.mkdir(parents=True, exist_ok=True)
  with path.with_suffix('.lock').open('w') as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)
    yield


def environment() -> dict[str, Any]:
  """Versions and device, for a file of results."""
  device = jax.devices()[0]
  names = ('jax', 'jaxlib', 'optax', 'flax', 'jax-privacy', 'numpy')
  versions = {}
  for name in names:
    try:
      versions[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
      versions[name] = None
  return {
    'platform': device.platform,
    'device': device.device_kind,
    'processor': platform.machine(),
    'cores': len(os.sched_getaffinity(0)),
    'XLA_FLAGS': os.environ.get('XLA_FLAGS', ''),
    'python': platform.python_version(),
    'versions': versions,
  }
