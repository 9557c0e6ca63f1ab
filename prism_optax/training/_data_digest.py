"""A secret digest of the data of a run: are they those that it began with?"""

import hashlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

# Places of a source that are looked at, and bytes that are hashed at once.
PLACES = 256
_BLOCK = 1 << 24
# Tells the choice of places from the batches, which have the step here.
_SPAWN_KEY = 0x44494745, 0x53540000


def data_digest(data: Any, seed: np.ndarray, users: Any = None) -> np.ndarray:
  """A digest of the records, and of who they belong to, under a secret seed.

  It may be kept beside what is public: nobody without the seed learns anything
  from it (keyed BLAKE2b). It never raises for what a record is, and does the
  same for all of them: what has no numbers or text counts as one constant.

  ==============================  =============================================
  a tree of arrays                every byte counts, read once, in blocks
  a source of records             their number, and ``PLACES`` = 256 records at
                                  places chosen by the seed. A change of k of N
                                  records passes unseen with the probability
                                  ``(1 - k / N)^256``: 8 % for one in a hundred,
                                  and nearly 1 for a single record of many
  a record that cannot be read,   a constant
  or holds objects
  the same data as arrays and     other digests
  as a source
  ==============================  =============================================

  Args:
    data: A tree of arrays (N, ...), or a source with ``len`` and integer
      look-up.
    seed: Words of 32 bits, secret.
    users: None, or an id for each record, (N,). Which records belong together,
      and in which order, counts; not what the ids are.

  Returns:
    (8,) uint32.
  """
  seed = np.ascontiguousarray(seed, np.uint32)
  digest = hashlib.blake2b(key=seed.tobytes(), digest_size=32)
  if isinstance(data, tuple | dict | np.ndarray | jax.Array):
    for leaf in jax.tree.leaves(data):
      _write(digest.update, leaf)
  else:
    size = len(data)
    digest.update(f'{size} records'.encode())
    rng = np.random.default_rng(
      np.random.SeedSequence([int(x) for x in seed], spawn_key=_SPAWN_KEY)
    )
    for place in rng.choice(size, min(size, PLACES), replace=False):
      _write_record(digest.update, data, int(place))
  if users is not None:
    _, numbers = np.unique(np.asarray(users), return_inverse=True)
    _write(digest.update, numbers.astype(np.int64))
  return np.frombuffer(digest.digest(), np.uint32).copy()


def _write_record(
  write: Callable[[bytes], None], data: Any, place: int
) -> None:
  inner = hashlib.blake2b(digest_size=32)
  try:
    for leaf in jax.tree.leaves(data[place]):
      _write(inner.update, leaf)
    found = inner.digest()
  # Whatever a source or a record raises: an error would tell about the record.
  except Exception:
    found = bytes(32)
  write(found)


def _write(write: Callable[[bytes], None], leaf: Any) -> None:
  array = np.asarray(leaf)
  if array.dtype.hasobject:
    write(b'objects')  # Their bytes are addresses.
    return
  write(f'{array.shape}{array.dtype}'.encode())
  array = np.atleast_1d(array)
  row = max(array.nbytes // max(len(array), 1), 1)
  rows = max(_BLOCK // row, 1)
  for start in range(0, len(array), rows):  # May be on the disk, as a memmap.
    write(array[start : start + rows].tobytes())
