"""A secret digest of the data of a run: are they those that it began with?"""

import hashlib

import jax
import numpy as np

from prism_optax.training._records import Records

# Records of a source that are looked at.
PLACES = 256
_BLOCK = 1024  # Records that are read at once.
# Tells the choice of places from the batches, which have the step here.
_SPAWN_KEY = 0x44494745, 0x53540000


def data_digest(records: Records, seed: np.ndarray) -> np.ndarray:
  """A digest of the records, and of who they belong to, under a secret seed.

  Nobody without the seed learns anything from it (keyed BLAKE2b). Records are
  read as batches read them, in their declared form: what does not fit is one
  constant, and no record raises, warns, or takes more than its form.

  ==============================  =============================================
  arrays                          every record counts, in one pass
  another source                  ``PLACES`` = 256 records at places chosen by
                                  the seed. A change of k of N records passes
                                  unseen with the probability
                                  ``(1 - k / N)^256``: 8 % for one in a hundred,
                                  and nearly 1 for a single record of many
  users                           which records belong together, and in which
                                  order; not what the ids are
  ==============================  =============================================

  Args:
    records: The data of a run.
    seed: Words of 32 bits, secret.

  Returns:
    (8,) uint32.
  """
  seed = np.ascontiguousarray(seed, np.uint32)
  digest = hashlib.blake2b(key=seed.tobytes(), digest_size=32)
  digest.update(f'{records.size} records of {records.form}'.encode())
  places = np.arange(records.size)
  if records.is_source and records.size > PLACES:
    rng = np.random.default_rng(
      np.random.SeedSequence([int(x) for x in seed], spawn_key=_SPAWN_KEY)
    )
    places = rng.choice(records.size, PLACES, replace=False)
  for part in np.array_split(places, len(places) // _BLOCK + 1):
    examples, fits = records.at(part)
    for x in (*jax.tree.leaves(examples), fits):
      digest.update(np.ascontiguousarray(x).tobytes())
  for own in records.of_user or ():
    digest.update(f'{len(own)} records of a user'.encode() + own.tobytes())
  return np.frombuffer(digest.digest(), np.uint32).copy()
