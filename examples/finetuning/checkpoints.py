"""Resumable runs: the state, the two secrets, and what was spent.

A checkpoint holds the noise key and the sampling seed. Whoever reads it can
take the noise off everything that was released: it is as secret as the data,
so its folder is private to the user and is deleted when the run is complete.
"""

import hashlib
import json
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


class Ledger(NamedTuple):
  """What the run has released, or may have released by now.

  Attributes:
    release: Public constants of the mechanism and of what is done with it, in
      types that JSON knows. The same noise under other constants would be a
      second release that cancels the first.
    spent_steps: No more steps than this have been released, by any process of
      this run: those up to the next checkpoint are written down before they
      are done. It never goes back, and is exact at the end.
  """

  release: dict[str, Any]
  spent_steps: int


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

  def save(self, checkpoint: Checkpoint, ledger: Ledger) -> None:
    """Saves; a step that is already there is left as it is.

    Raises:
      ValueError: If the ledger would go back.
    """
    step = int(checkpoint.state.step)
    last = self._manager.latest_step()
    if last is not None:
      before = self._ledger(last).spent_steps
      if ledger.spent_steps < before:
        raise ValueError(
          f'The ledger of {self.folder} has {before} steps, and cannot go back '
          f'to {ledger.spent_steps}.'
        )
    if step not in self._manager.all_steps():
      stored = {**ledger._asdict(), 'arrays': _arrays(checkpoint)}
      self._manager.save(
        step,
        args=ocp.args.Composite(
          state=ocp.args.StandardSave(checkpoint),
          ledger=ocp.args.JsonSave(stored),
        ),
      )

  def restore(
    self, like: Checkpoint, release: dict[str, Any]
  ) -> tuple[Checkpoint, Ledger] | None:
    """Returns the latest checkpoint, or None if there is none.

    Args:
      like: A checkpoint of the same structure, shapes and types.
      release: Constants of the run that goes on; they must be those it began
        with.

    Raises:
      ValueError: If the checkpoint is of another run, model or optimizer, has
        no noise key, or cannot be read.
    """
    step = self._manager.latest_step()
    if step is None:
      return None
    where = f'--resume: the checkpoint of step {step} in {self.folder}'
    try:
      stored = self._read(step, ledger=ocp.args.JsonRestore())
      ledger = Ledger(stored['release'], int(stored['spent_steps']))
      found = stored['arrays']
    # What Orbax says of a file that is gone, cut or of other entries differs
    # by version (KeyError, ValueError, OSError, those of zarr and TensorStore),
    # and a run must not go on with any of them.
    except Exception as error:
      raise ValueError(f'{where} has no ledger: {_first(error)}') from error
    _check_fits(where, _arrays(like), found)
    changed = {
      key: (ledger.release.get(key), value)
      for key, value in json.loads(json.dumps(release)).items()
      if ledger.release.get(key) != value
    }
    if changed:
      raise ValueError(
        f'{where} belongs to another release; (stored, now): {changed}. Its '
        'noise would be used a second time; begin a new run with another '
        '--output.'
      )
    try:
      restored = self._read(step, state=ocp.args.StandardRestore(like))
    except Exception as error:  # As above.
      raise ValueError(f'{where} cannot be read: {_first(error)}') from error
    # Buffers of JAX's own making: what is donated must not be shared with
    # the arrays that were read from disk.
    state = jax.tree.map(jax.numpy.copy, restored.state)
    return restored._replace(state=state), ledger

  def _read(self, step: int, **item: Any) -> Any:
    (name,) = item
    return self._manager.restore(step, args=ocp.args.Composite(**item))[name]

  def _ledger(self, step: int) -> Ledger:
    stored = self._read(step, ledger=ocp.args.JsonRestore())
    return Ledger(stored['release'], stored['spent_steps'])

  def close(self) -> None:
    self._manager.close()


def _arrays(checkpoint: Checkpoint) -> dict[str, str]:
  """``{'.state.params...': 'float32(8, 2)'}``: what is in a checkpoint."""
  flat, _ = jax.tree_util.tree_flatten_with_path(checkpoint)
  return {
    jax.tree_util.keystr(path): f'{leaf.dtype}{tuple(leaf.shape)}'
    for path, leaf in flat
  }


def _check_fits(
  where: str, expected: dict[str, str], found: dict[str, str]
) -> None:
  """Raises ``ValueError`` unless names, shapes and types are the same."""
  keys = {name for name, kind in expected.items() if kind.startswith('key<')}
  lost = sorted(name for name in keys if found.get(name) != expected[name])
  if lost:
    raise ValueError(
      f'{where} has no noise key ({", ".join(lost)}): to go on with another '
      'one would be a second release.'
    )
  differing = [
    f'{name}: {found.get(name, "absent")} for {expected.get(name, "nothing")}'
    for name in sorted({*expected, *found})
    if found.get(name) != expected.get(name)
  ]
  if differing:
    raise ValueError(
      f'{where} does not fit the model and the optimizer: '
      f'{"; ".join(differing[:3])} ({len(differing)} arrays differ).'
    )


def _first(error: Exception) -> str:
  """The first line of a message: the rest may run over pages."""
  lines = str(error).splitlines()
  return f'{type(error).__name__}: {lines[0] if lines else ""}'[:300]


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
