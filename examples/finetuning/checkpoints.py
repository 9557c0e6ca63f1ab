"""Resumable runs: the state, the two secrets and what they belong to.

A checkpoint holds the noise key and the sampling seed. Whoever reads it can
take the noise off everything that was released: it is as secret as the data,
so its folder is private to the user and is deleted when the run is complete.
"""

import hashlib
import pathlib
import shutil
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp

from . import training

FOLDER = 'checkpoints_secret'


class Checkpoint(NamedTuple):
  """What is needed to go on as if nothing had happened.

  Attributes:
    state: Parameters, optimizer (with the noise key) and step.
    sampling_seed: ``(4,)`` uint32, for ``sampling.draw``.
    data_digest: ``(32,)`` uint8, SHA-256 of the private file. The same noise
      on other data would be a second release that cancels the first.
  """

  state: training.TrainState
  sampling_seed: np.ndarray
  data_digest: np.ndarray


def digest(*arrays: np.ndarray) -> np.ndarray:
  """SHA-256 of arrays, as ``(32,)`` uint8."""
  result = hashlib.sha256()
  for array in arrays:
    result.update(str((array.shape, array.dtype)).encode())
    result.update(np.ascontiguousarray(array).tobytes())
  return np.frombuffer(result.digest(), np.uint8).copy()


class Checkpoints:
  """The checkpoints of one run. Saving is atomic: a save that is cut off by
  a crash leaves the one before it."""

  def __init__(self, output: pathlib.Path):
    self.folder = output.resolve() / FOLDER
    self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    self._manager = ocp.CheckpointManager(
      self.folder,
      options=ocp.CheckpointManagerOptions(
        max_to_keep=2, enable_async_checkpointing=False
      ),
    )

  def save(self, checkpoint: Checkpoint) -> None:
    """Saves; a step that is already there is left as it is."""
    step = int(checkpoint.state.step)
    if step not in self._manager.all_steps():
      self._manager.save(step, args=ocp.args.StandardSave(checkpoint))

  def restore(self, like: Checkpoint) -> Checkpoint | None:
    """Returns the latest checkpoint, or None if there is none.

    Args:
      like: A checkpoint of the same structure, shapes and types.
    """
    step = self._manager.latest_step()
    if step is None:
      return None
    restored = self._manager.restore(step, args=ocp.args.StandardRestore(like))
    # Buffers of JAX's own making: what is donated must not be shared with
    # the arrays that were read from disk.
    return restored._replace(state=jax.tree.map(jax.numpy.copy, restored.state))

  def close(self) -> None:
    self._manager.close()


def erase(output: pathlib.Path) -> None:
  """Deletes all checkpoints of a run, and the secrets with them."""
  shutil.rmtree(output / FOLDER, ignore_errors=True)


def check_same_data(found: np.ndarray, stored: Any) -> None:
  """Refuses to go on with another file than the run began with.

  Raises:
    ValueError: If the digests differ.
  """
  if not np.array_equal(found, stored):
    raise ValueError(
      '--resume: --data is not the file that this run began with. Its noise '
      'would be used a second time; begin a new run with another --output.'
    )
