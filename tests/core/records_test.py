"""Each record is brought to a public form: totally, and exactly if it fits."""

import collections
import dataclasses
import fractions
import uuid
import warnings

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from prism_optax.training import _records
from prism_optax.training._fingerprint import PLACES, data_digest
from prism_optax.training._records import Form, Records
from prism_optax.training._sampling import Sampling
from tests import cases
from tests.cases import PIXELS, WORDS, struct
from tests.training import adversarial

SEED = np.arange(4, dtype=np.uint32)


FORMS = {'pixels': PIXELS, 'words': WORDS, 'truth': struct((), bool)}


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Interval:
  low: float
  high: float


def described(tree):
  return str(jax.tree.map(lambda x: (x.shape, str(x.dtype)), tree))


def plain(tree):
  """In a type whose NaN NumPy knows."""
  return jax.tree.map(lambda x: np.asarray(x).astype(np.complex128), tree)


def test_structures_of_a_form():
  """A list may stand for a tuple; keys of a dict are those of the form."""
  leaf = struct((), np.float32)
  named = collections.namedtuple('Named', 'b a')
  form = Form.declared({'b': (leaf, [leaf]), 'a': named(leaf, leaf)})
  assert form == Form.declared(
    jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), form.tree)
  )
  record = {'b': [1, (2,)], 'a': [3, 4]}
  # In the order of JAX: sorted keys.
  assert [float(x) for x in form.leaves_of(record)] == [3, 4, 1, 2]
  ordered = collections.OrderedDict(b=leaf, a=leaf)
  found = Form.declared(ordered).leaves_of({'a': 1, 'b': 2})
  assert [float(x) for x in found] == [2, 1]
  interval = Interval(leaf, leaf)
  found = Form.declared(interval).leaves_of(Interval(1, 2))
  assert [float(x) for x in found] == [1, 2]
  with pytest.raises(ValueError, match='Interval'):
    Form.declared(interval).leaves_of((1, 2))
  for wrong in (
    {'b': [1, (2,)]},
    record | {'c': 1},
    record | {'b': [1, 2]},
    record | {'a': {'b': 1, 'a': 2}},
    collections.defaultdict(lambda: [1, [2]], a=[3, 4], c=5),
    [record['b'], record['a']],
  ):
    with pytest.raises(_records._DoesNotFit):
      form.leaves_of(wrong)


def test_the_widest_complex_numbers_are_declared():
  assert Form.declared(struct((3,), np.complex128)).leaves[0].dtype == 'c8'


TYPES = (
  *(bool, np.int8, np.uint8, np.int32, np.uint32, np.int64, np.uint64),
  *(np.float16, np.float32, np.float64, np.complex64, np.complex128),
  *(ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.int4),
)


def slowly(value, dtype):
  """The number of a type, by exact arithmetic; None if there is none."""
  value = value.item()
  if jnp.issubdtype(dtype, np.complexfloating):
    return np.asarray(value, np.complex128).astype(dtype)
  if isinstance(value, complex):
    return None
  if jnp.issubdtype(dtype, np.floating):
    return np.asarray(value).astype(dtype)
  info = None if dtype.kind == 'b' else jnp.iinfo(dtype)
  low, high = (0, 1) if info is None else (int(info.min), int(info.max))
  if not np.isfinite(value) or fractions.Fraction(value).denominator != 1:
    return None
  return np.asarray(int(value)).astype(dtype) if low <= value <= high else None


_SIZES = [0, 1, 2, 7, 8, 127, 128, 255, 256, 2**31, 2**32, 2**63, 2**64]
EDGES = np.float64([*_SIZES, *(-x for x in _SIZES), 0.5, np.nan, np.inf, 1])


@pytest.mark.parametrize('new', TYPES, ids=lambda x: np.dtype(x).name)
def test_numbers_are_brought_to_a_type(new):
  """Total, idempotent, exact for what fits; row by row."""
  new, rng = np.dtype(new), np.random.default_rng(0)
  for old in map(np.dtype, TYPES):
    drawn = np.frombuffer(rng.bytes(20 * old.itemsize), old)
    if old.kind in 'bV':  # Not all bytes are numbers of these.
      drawn = drawn[:0]
    with np.errstate(all='ignore'):
      rows = np.concatenate([drawn, EDGES.astype(old)]).reshape(-1, 2)
      found, fits = _records.converted(rows, new)
      again, still = _records.converted(found, new)
    assert (found.shape, found.dtype) == (rows.shape, new)
    for i, row in enumerate(rows):
      with np.errstate(all='ignore'):
        wanted = [slowly(x, new) for x in row]
      assert fits[i] == all(x is not None for x in wanted), (old, row)
      if fits[i]:
        np.testing.assert_array_equal(plain(found[i]), plain(np.array(wanted)))
    np.testing.assert_array_equal(plain(again), plain(found))
    assert still.all()


@pytest.mark.parametrize('name', FORMS)
def test_every_odd_record_fits_or_not_and_stays_what_it_is(name):
  """Bringing a record to a form is total and idempotent."""
  form, count = FORMS[name], 0
  known = Form.declared(form)
  for odd in adversarial.records(form):
    try:
      with warnings.catch_warnings():  # They are silenced by the batch.
        warnings.simplefilter('ignore')
        leaves = known.leaves_of(odd.record)
    except Exception:
      continue
    count += 1
    assert described(leaves) == described(known.leaves)
    whole = jax.tree.unflatten(jax.tree.structure(form), leaves)
    again = known.leaves_of(whole)
    assert described(again) == described(leaves)
    cases.assert_same_bits(plain(again), plain(leaves))
  assert len(adversarial.in_form(form)) <= count < 120


@pytest.mark.parametrize(
  ('ids', 'groups'),
  [
    (['b', 'a', 'b'], [[0, 2], [1]]),  # As they first appear.
    (np.array([9, 5, 9]), [[0, 2], [1]]),
    (np.array([2.5, np.nan, np.nan]), [[0], [1, 2]]),
    (jnp.array([3, 1, 3]), [[0, 2], [1]]),
    (np.array(['2020', '2019'], 'M8[Y]'), [[0], [1]]),
    # NumPy makes floats of these, of which the first two are equal.
    ([2**53, 2**53 + 1, 0.5], [[0], [1], [2]]),
    # And of these texts, of which '1' and '1.0' are not.
    ([1, 1.0, 'x', True], [[0, 1, 3], [2]]),
    (['1', 1], [[0], [1]]),
    (np.array([1, 'x', 1.0, None], object), [[0, 2], [1], [3]]),
    ([np.int8(1), 1, np.array(1), jnp.array(1)], [[0, 1, 2, 3]]),
    ([uuid.UUID(int=1), uuid.UUID(int=1), b'1'], [[0, 1], [2]]),
    # What is no id is one.
    (
      ['a', None, np.nan, [1], (1,), {}, object(), adversarial.NoAttributes(),
       np.ma.masked, jax.random.key(0)],
      [[0], list(range(1, 10))],
    ),
    ([], []),
    (np.array([]), []),
  ],
)  # fmt: skip
def test_ids_of_users(ids, groups):
  found = _records._of_users(ids, len(ids))
  assert [x.tolist() for x in found] == groups


def test_ids_that_are_not_one_for_a_record():
  for ids in ([1, 2], np.zeros((3, 1)), np.array(5), (x for x in 'abc')):
    with pytest.raises(ValueError, match='one id for each record'):
      _records._of_users(ids, 3)


X = np.arange(12, dtype=np.float32).reshape(4, 3)


def test_examples_have_memory_of_their_own():
  """Whoever overwrites the data does not change a batch drawn before."""
  data = X.copy()
  records = Records(Sampling(2, 10**6, 4, None, None), data, None, None)
  examples, _ = records.at(np.arange(4))
  data[:] = 0
  np.testing.assert_array_equal(examples, X)


# A digest of the data: secret, total, and it misses what is said.

ROW = Form.declared(struct((3,), 'float32'))
NUMBER = Form.declared(struct((), 'int32'))


def digest(data, form=None, seed=SEED, users=None):
  sampling = Sampling(2, 10**6, 4, None, None if users is None else 2)
  found = data_digest(Records(sampling, data, users, form), seed)
  assert (found.shape, found.dtype) == ((8,), np.uint32)
  return found.tobytes()


def test_every_record_of_arrays_and_small_sources_counts():
  assert digest((X, X)) == digest((X.copy(), X.copy()))
  changed = X.copy()
  changed.view(np.uint32)[3, 2] ^= 1
  last = np.zeros(5000)
  last[-1] = 1
  others = [
    digest(x)
    for x in (X, changed, X[::-1], X[:3], X.view(np.int32), (X, 2 * X),
              (2 * X, X), np.zeros(5000), last)
  ]  # fmt: skip
  others += [
    digest(X, seed=SEED + 1),  # It is keyed.
    digest([*X[:2], X[2] + 1, X[3]], ROW),
    digest(list(X[:3]), ROW),
  ]
  # A list of three rows is the array of three rows.
  assert len(set(others)) == len(others) - 1
  assert digest(np.asfortranarray(X)) == others[0] == digest(list(X), ROW)


def test_of_large_sources_a_secret_sample_is_read():
  size = 4 * PLACES
  source = adversarial.Source(list(range(size)))
  one = digest(source, NUMBER)
  read = list(source.read)
  assert len(set(read)) == len(read) == PLACES
  unread = next(i for i in range(size) if i not in read)
  records = list(range(size))
  records[unread] = -1  # What it misses.
  assert digest(records, NUMBER) == one
  records[read[0]] = -1
  assert digest(records, NUMBER) != one
  # Who has not the seed does not know which.
  source.read.clear()
  digest(source, NUMBER, seed=SEED + 1)
  assert len(set(read) & set(source.read)) < PLACES / 2


@pytest.mark.filterwarnings('error')
def test_no_record_can_stop_the_digest():
  """Nor warn, nor take long; and what does not fit is a record of zeros."""
  tree = {'x': struct((3,), 'float32'), 'y': struct((), 'uint8')}
  form, usual = Form.declared(tree), adversarial.ordinary(tree)
  for odd in adversarial.records(tree):
    source = adversarial.Source([usual, odd.record])
    assert digest(source, form) == digest(source, form), odd.name
  assert digest([usual, 'text'], form) == digest([usual, None], form)


def test_users_count_by_who_they_share_with():
  users = np.array([5, 5, 8, 8])
  one = digest(X, users=users)
  for ids in (users, users * 10, list('aabb')):
    assert digest(X, users=ids) == one
  for ids in ([5, 8, 8, 8], [None, 'a', 1, 1]):
    assert digest(X, users=ids) != one
  assert digest(X) != one
