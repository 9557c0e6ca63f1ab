"""A digest of the data: secret, total, and what it misses is what is said."""

import jax
import numpy as np
import pytest

from prism_optax.training._data_digest import PLACES, data_digest
from prism_optax.training._records import Form, Records
from prism_optax.training._sampling import Sampling
from tests.training import adversarial

SEED = np.arange(4, dtype=np.uint32)
X = np.arange(12, dtype=np.float32).reshape(4, 3)
ROW = Form.declared(jax.ShapeDtypeStruct((3,), 'float32'))
NUMBER = Form.declared(jax.ShapeDtypeStruct((), 'int32'))


def digest(data, form=None, seed=SEED, users=None):
  most = None if users is None else 2
  sampling = Sampling(2, 10**6, 4, None, most)
  found = data_digest(Records(sampling, data, users, form), seed)
  assert found.shape == (8,)
  assert found.dtype == np.uint32
  return found


def same(one, other, form=None):
  return np.array_equal(digest(one, form), digest(other, form))


def test_of_arrays_every_record_counts():
  assert same((X, X), (X.copy(), X.copy()))
  assert same(X, np.asfortranarray(X))
  changed = X.copy()
  changed.view(np.uint32)[3, 2] ^= 1
  others = changed, X[::-1], X[:3], X.view(np.int32)
  for other in others:
    assert not same(X, other)
  assert not same((X, 2 * X), (2 * X, X))
  many = np.zeros(5000)
  last = many.copy()
  last[-1] = 1
  assert not same(many, last)


def test_it_is_keyed():
  assert not np.array_equal(digest(X), digest(X, seed=SEED + 1))


def test_small_sources_are_read_as_a_whole():
  records = list(X)
  assert same(records, X, ROW)
  assert not same(records, [*X[:2], X[2] + 1, X[3]], ROW)
  assert not same(records, records[:3], ROW)


def test_of_large_sources_a_secret_sample_is_read():
  size = 4 * PLACES
  source = adversarial.Source(list(range(size)))
  one = digest(source, NUMBER)
  read = list(source.read)
  assert len(set(read)) == len(read) == PLACES
  unread = next(i for i in range(size) if i not in read)
  records = list(range(size))
  records[unread] = -1  # What it misses.
  np.testing.assert_array_equal(digest(records, NUMBER), one)
  records[read[0]] = -1
  assert not np.array_equal(digest(records, NUMBER), one)
  # Who has not the seed does not know which.
  source.read.clear()
  digest(source, NUMBER, seed=SEED + 1)
  assert len(set(read) & set(source.read)) < PLACES / 2


@pytest.mark.filterwarnings('error')
def test_no_record_can_stop_it():
  """Nor warn, nor take long; and what does not fit is a record of zeros."""
  tree = {
    'x': jax.ShapeDtypeStruct((3,), 'float32'),
    'y': jax.ShapeDtypeStruct((), 'uint8'),
  }
  form, usual = Form.declared(tree), adversarial.ordinary(tree)
  blank = digest([usual, None], form)
  for odd in adversarial.records(tree):
    source = adversarial.Source([usual, odd.record])
    found = digest(source, form)
    np.testing.assert_array_equal(found, digest(source, form), odd.name)
  text = digest([usual, 'text'], form)
  np.testing.assert_array_equal(text, blank)


def test_users_count_by_who_they_share_with():
  users = np.array([5, 5, 8, 8])
  one = digest(X, users=users)
  for ids in (users, users * 10, list('aabb')):
    np.testing.assert_array_equal(one, digest(X, users=ids))
  for ids in ([5, 8, 8, 8], [None, 'a', 1, 1]):
    assert not np.array_equal(one, digest(X, users=ids))
  assert not np.array_equal(one, digest(X))
