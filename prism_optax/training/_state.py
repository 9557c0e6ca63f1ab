"""The state of a run, and its file: all of it, as secret as the data."""

import json
import os
import pathlib
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax

from prism_optax._types import ArrayTree
from prism_optax.training._fingerprint import Fingerprint


class TrainingState(NamedTuple):
  """Everything that a run needs to continue: save it, restore it, go on.

  Keep it as secret as the data, because it holds the keys of the noise and of
  the batches. You may release only ``params`` and ``held``.

  Attributes:
    params: The trainable parameters.
    optimizer: State of clip, noise and optimizer.
    step: Number of steps done, NumPy, shape ().
    held: Number of steps whose result was not finite, so that parameters and
      moments stayed as they were, int32, shape ().
    seed: Of the batches, NumPy, (4,) uint32.
    fingerprint: Digests of the settings, environment, program and data to which
      the state belongs, NumPy, (8,) uint32 each.
  """

  params: ArrayTree
  optimizer: optax.OptState
  step: np.ndarray
  held: jax.Array
  seed: np.ndarray
  fingerprint: Fingerprint


# What a state may differ in, for messages: nothing private.
PARTS = {
  'settings': 'sizes, clip, noise, steps, delta, stop, shapes of parameters,'
  ' tags',
  'environment': 'backend, devices, layout of batches, versions',
  'program': 'loss, optimizer, frozen weights, shapes of records',
  'data': 'the records, or the users they belong to',
}


_State = TypeVar('_State')
_HEADER = 'header'
_FORMAT = 'prism_optax state 1'


def save_state(path: str | os.PathLike[str], state: ArrayTree) -> None:
  """Writes a state to a file, as a whole or not at all.

  **The file is as secret as the data**, because it holds the keys of the noise
  and of the batches: whoever reads it can subtract the noise from everything
  that the run has released. Only its owner can read it (mode 0600). Delete it
  when the run is complete, also from backups.

  ==============================  =============================================
  the file exists                 it is replaced in one moment; a process that
                                  dies before leaves the old one
  keys of JAX                     their words, with the kind of generator
  bfloat16 and the like           their bits
  several processes               the first one writes; arrays have to be whole
                                  in each (replicated)
  ==============================  =============================================

  Args:
    path: The file, ``.npz`` of NumPy.
    state: Of a training, or any tree of arrays.

  Raises:
    OSError: If it cannot be written.

  Example:
    >>> import os, tempfile
    >>> import jax
    >>> import jax.numpy as jnp
    >>> from prism_optax import training
    >>> state = {'params': jnp.arange(3.0), 'key': jax.random.key(0)}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...   path = os.path.join(folder, 'state_secret.npz')
    ...   training.save_state(path, state)
    ...   training.load_state(path, state)['params'].tolist()
    [0.0, 1.0, 2.0]
  """
  if jax.process_index():
    return
  header: list[list[object]] = []
  arrays: dict[str, ArrayTree] = {}
  for number, (name, leaf) in enumerate(_named(state)):
    array = np.asarray(jax.random.key_data(leaf) if _is_key(leaf) else leaf)
    # As bytes: NumPy has no name for some types of JAX.
    flat = np.frombuffer(np.ascontiguousarray(array).tobytes(), np.uint8)
    arrays[str(number)] = flat
    header.append([name, *_kind(leaf)])
  arrays[_HEADER] = np.array(json.dumps([_FORMAT, header]))
  path = pathlib.Path(path)
  temporary = path.with_name(f'{path.name}.{os.getpid()}.tmp')
  # A file that is there already would keep its owner and its mode.
  temporary.unlink(missing_ok=True)
  opened = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
  try:
    with os.fdopen(opened, 'wb') as file:
      np.savez(file, **arrays)
      file.flush()
      os.fsync(file.fileno())
    os.replace(temporary, path)
    _settle(path.absolute().parent)
  except BaseException:
    temporary.unlink(missing_ok=True)
    raise


def _settle(folder: pathlib.Path) -> None:
  """Waits until the name is on the disk, too, where a system can say so."""
  if hasattr(os, 'O_DIRECTORY'):
    opened = os.open(folder, os.O_DIRECTORY)
    try:
      os.fsync(opened)
    finally:
      os.close(opened)


def load_state(path: str | os.PathLike[str], like: _State) -> _State:
  """Reads what :func:`save_state` wrote.

  Args:
    path: The file.
    like: A state of the same names, shapes and types, such as
      ``private.init(params)``; its numbers and keys are not used. Arrays are
      placed on the same devices.

  Returns:
    The state. ``batches`` and ``step`` of a training check whether it
    belongs there.

  Raises:
    FileNotFoundError: If there is none.
    ValueError: If it is no such file, or its arrays differ from those in
      ``like``; the message names them.

  Example:
    >>> import os, tempfile
    >>> import jax.numpy as jnp
    >>> from prism_optax import training
    >>> with tempfile.TemporaryDirectory() as folder:
    ...   path = os.path.join(folder, 'state_secret.npz')
    ...   training.save_state(path, {'params': jnp.arange(3.0)})
    ...   found = training.load_state(path, {'params': jnp.zeros(3)})
    >>> found['params'].tolist()
    [0.0, 1.0, 2.0]
  """
  try:
    with np.load(path, allow_pickle=False) as stored:
      form, header = json.loads(str(stored[_HEADER]))
      if form != _FORMAT:
        raise ValueError(f'its format is {form!r}')
      data = [stored[str(i)].tobytes() for i in range(len(header))]
  except FileNotFoundError:
    raise
  # A file that is cut or foreign: what is raised differs by its first bytes.
  except Exception as error:
    raise ValueError(
      f'Expected a file of save_state in {path}, got another one, or a part of'
      f' one: {type(error).__name__}: {error}.'
    ) from error
  found = {name: (shape, kind) for name, shape, kind in header}
  wanted = {name: tuple(_kind(leaf)) for name, leaf in _named(like)}
  differing = [
    f'{name}: {found.get(name, "absent")} for {wanted.get(name, "nothing")}'
    for name in sorted({*found, *wanted})
    if found.get(name) != wanted.get(name)
  ]
  if differing:
    raise ValueError(
      f'The state in {path} does not fit: {"; ".join(differing[:3])}'
      f' ({len(differing)} arrays differ).'
    )
  stored_data = dict(zip(found, data, strict=True))
  leaves = [_read(stored_data[name], leaf) for name, leaf in _named(like)]
  state: _State = jax.tree.unflatten(jax.tree.structure(like), leaves)
  return state


def _named(tree: ArrayTree) -> list[tuple[str, ArrayTree]]:
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  return [(jax.tree_util.keystr(path), leaf) for path, leaf in leaves]


def _is_key(x: jax.Array) -> bool:
  return bool(jnp.issubdtype(x.dtype, jax.dtypes.prng_key))


def _kind(x: jax.Array) -> list[object]:
  """Shape and type, in types of JSON; of a key the kind of generator."""
  return [list(x.shape), str(x.dtype)]


def _read(data: bytes, like: ArrayTree) -> ArrayTree:
  """A leaf, in memory of its own: a step takes the arrays of a state over."""
  if _is_key(like):
    words = jax.eval_shape(jax.random.key_data, like)
    array = np.frombuffer(data, words.dtype).reshape(words.shape)
    leaf = jax.random.wrap_key_data(
      jnp.array(array), impl=jax.random.key_impl(like)
    )
  else:
    array = np.frombuffer(data, like.dtype).reshape(like.shape)
    if not isinstance(like, jax.Array):
      return array.copy()
    leaf = jnp.array(array)
  if like.committed:
    leaf = jax.device_put(leaf, like.sharding)
  return leaf
