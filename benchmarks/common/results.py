"""Where results are stored, and what they say about the machine."""

import json
import os
import pathlib
import platform
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
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(json.dumps(results, indent=1) + '\n', 'utf-8')


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
