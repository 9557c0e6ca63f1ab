"""A digest of the data: secret, total, and what it misses is what is said."""

import numpy as np
import pytest

from prism_optax.training._data_digest import PLACES, data_digest

SEED = np.arange(4, dtype=np.uint32)
X = np.arange(12, dtype=np.float32).reshape(4, 3)


def same(one, other, **options):
  found = [data_digest(x, SEED, **options) for x in (one, other)]
  assert all(x.shape == (8,) and x.dtype == np.uint32 for x in found)
  return np.array_equal(*found)


class Source:
  """Records that may raise, by place."""

  def __init__(self, records):
    self.records = records

  def __len__(self):
    return len(self.records)

  def __getitem__(self, i):
    if isinstance(self.records[i], Exception):
      raise self.records[i]
    return self.records[i]


def test_of_arrays_every_bit_counts():
  assert same((X, X), (X.copy(), X.copy()))
  assert same(X, np.asfortranarray(X))
  assert same({'a': X}, (X,))  # Other names are another loss.
  changed = X.copy()
  changed.view(np.uint32)[3, 2] ^= 1
  for other in (
    changed,
    X[::-1],
    X[:3],
    X.astype(np.float64),
    X.view(np.int32),
  ):
    assert not same(X, other)
  assert not same((X, 2 * X), (2 * X, X))


def test_blocks_make_no_difference(monkeypatch):
  from prism_optax.training import _data_digest

  one = data_digest(X, SEED)
  monkeypatch.setattr(_data_digest, '_BLOCK', 5)
  np.testing.assert_array_equal(data_digest(X, SEED), one)


def test_it_is_keyed():
  assert not np.array_equal(data_digest(X, SEED), data_digest(X, SEED + 1))


def test_small_sources_are_read_as_a_whole():
  records = [(x, i) for i, x in enumerate(X)]
  assert same(records, Source(list(records)))
  changed = [*records[:2], (X[2] + 1, 2), records[3]]
  assert not same(records, changed)
  assert not same(records, records[:3])


def test_of_large_sources_a_secret_sample_is_read():
  size = 4 * PLACES
  read = []

  class Counted(Source):
    def __getitem__(self, i):
      read.append(i)
      return super().__getitem__(i)

  one = data_digest(Counted(list(range(size))), SEED)
  assert len(set(read)) == len(read) == PLACES
  places = set(read)
  unread = next(i for i in range(size) if i not in places)
  records = list(range(size))
  records[unread] = -1  # What it misses.
  np.testing.assert_array_equal(data_digest(records, SEED), one)
  records[read[0]] = -1
  assert not np.array_equal(data_digest(records, SEED), one)
  # Who has not the seed does not know which.
  read.clear()
  data_digest(Counted(list(range(size))), SEED + 1)
  assert len(places & set(read)) < PLACES / 2


@pytest.mark.parametrize(
  'record',
  [
    None, 'text', b'bytes', object(), [1, 'two'], [[1], [2, 3]], {'a': None},
    float('nan'), np.array([None]), {1: 2, 'b': 3}, ValueError('of a record'),
    KeyError(0), [], np.zeros((0, 3)),
  ],
  ids=lambda x: type(x).__name__,
)  # fmt: skip
def test_no_record_can_stop_it(record):
  """And twice the same one is the same."""
  assert same(Source([X[0], record]), Source([X[0], record]))


def test_objects_do_not_count_by_their_address():
  assert same([X[0], object()], [X[0], object()])


def test_users_count_by_who_they_share_with():
  users = np.array([5, 5, 8, 8])
  assert same(X, X, users=users)
  one = data_digest(X, SEED, users)
  np.testing.assert_array_equal(one, data_digest(X, SEED, users * 10))
  np.testing.assert_array_equal(one, data_digest(X, SEED, list('aabb')))
  assert not np.array_equal(one, data_digest(X, SEED, [5, 8, 8, 8]))
  assert not np.array_equal(one, data_digest(X, SEED))
