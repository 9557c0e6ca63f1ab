"""What is published: the adapters and the head, as safetensors."""

import json
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import safetensors.numpy
from flax import nnx

from . import files


def names(params: Any) -> dict[str, Any]:
  """``{'encoder.layers.0.attention.query.lora.lora_a': array, ...}``."""
  flat = nnx.to_flat_state(params)
  return {'.'.join(map(str, path)): leaf[...] for path, leaf in flat}


def save(path: pathlib.Path, params: Any, metadata: dict[str, Any]) -> None:
  """Writes all leaves and a JSON header of public facts."""
  # One entry: safetensors would write several in a random order.
  write(path, names(params), {'facts': json.dumps(metadata)})


def write(
  path: pathlib.Path, arrays: Mapping[str, Any], header: dict[str, str]
) -> None:
  """Writes a safetensors file of arrays with any strides."""
  # It stores the memory of an array from its beginning, whatever the strides.
  dense = {name: np.ascontiguousarray(x) for name, x in arrays.items()}
  with files.replacing(path) as temporary:
    safetensors.numpy.save_file(dense, temporary, header)


def load(path: pathlib.Path, params: Any) -> Any:
  """Reads leaves written by ``save`` into a state of the same structure.

  Raises:
    ValueError: If the file is no safetensors file, or names or shapes differ.
  """
  try:
    stored = safetensors.numpy.load_file(path)
  except (safetensors.SafetensorError, ValueError, KeyError) as error:
    raise ValueError(f'{path}: no safetensors file ({error}).') from error
  expected = {name: value.shape for name, value in names(params).items()}
  found = {name: value.shape for name, value in stored.items()}
  if expected != found:
    differing = sorted(set(expected.items()) ^ set(found.items()))
    raise ValueError(f'{path}: names or shapes do not fit: {differing[:6]}.')
  leaves = [jax.numpy.asarray(stored[name]) for name in names(params)]
  return jax.tree.unflatten(jax.tree.structure(params), leaves)


def have_moved(found: Any, start: Any) -> bool:
  """Whether training changed an adapter or a head.

  An adapter starts as no change of its matrix, whatever its ``lora_a`` is.
  """
  was = names(start)
  return any(
    not name.endswith('lora_a') and np.any(x != was[name])
    for name, x in names(found).items()
  )
