"""No record acts but through its gradient: each is brought to a public form."""

import collections
import errno
import fractions
import functools
import uuid
import warnings

import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from hypothesis import given

from prism_optax import training
from prism_optax.training import _records
from prism_optax.training._records import Form, Records
from prism_optax.training._sampling import Sampling
from tests.properties import cases
from tests.training import adversarial

N = 8


def struct(shape, dtype):
  return jax.ShapeDtypeStruct(shape, dtype)


PIXELS = struct((4,), np.uint8), struct((), np.int32)
WORDS = {'x': struct((2, 3), np.float32), 'y': struct((2,), jnp.bfloat16)}
PARAMS = {'w': np.float32([0.5, -1, 2, 0.25]), 'b': np.zeros(3, np.float32)}


def loss_of_pixels(params, x, label):
  """In uint8 ``x - 128`` is another number than in int32."""
  z = jnp.vdot(params['w'], (x - 128).astype(jnp.float32))
  return jax.nn.softplus(z * params['b'][1]) - params['b'][label % 3] * z


def loss_of_words(params, record):
  z = record['x'] * params['b']
  return jnp.sum(z) + jnp.vdot(params['w'][:2], record['y']) / jnp.sum(
    jnp.abs(record['x'])  # NaN for zeros.
  )


CASES = {
  'pixels': (PIXELS, loss_of_pixels),
  'words': (WORDS, loss_of_words),
}


@functools.cache
def private(name, **options):
  """One step without noise; every place is drawn, unless told otherwise."""
  form, loss = CASES[name]
  constants = {
    'l2_clip_norm': 0.5,
    'expected_batch_size': N,
    'dataset_size': N,
    'execution': training.Execution(padded_batch_size=N),
    'steps': 1,
    'delta': 1e-5,
    'noise_multiplier': 0.0,
    'prng_key': 3,
  }
  return training.make_private(
    loss, PARAMS, optimizer=optax.sgd(1.0), record=form, **constants | options
  )


@functools.cache
def start(made):
  """The one run that a known key is for."""
  return made.init(PARAMS)


def moved(made, data, **options):
  """The parameters after a step, in units of a clip norm; and the batch."""
  state = start(made)  # The step takes its arrays over.
  state = state._replace(
    params=jax.tree.map(jnp.copy, state.params),
    optimizer=jax.tree.map(jnp.copy, state.optimizer),
  )
  with warnings.catch_warnings():
    warnings.simplefilter('error')
    (batch,) = made.batches(state, data, **options)
  params = made.step(state, batch).params
  vector = np.concatenate([np.ravel(x) for x in jax.tree.leaves(params)])
  return np.float64(vector) * N / 0.5, batch


def quietly(name, *args, **options):
  """As `moved`, where an error tells of a record."""
  try:
    return moved(*args, **options)
  except Exception as error:
    raise AssertionError(f'{name}: {error!r}') from error


def described(tree):
  shapes = jax.tree.map(lambda x: (x.shape, str(x.dtype)), tree)
  return jax.tree.structure(tree), jax.tree.leaves(shapes)


def plain(x):
  """In a type whose NaN NumPy knows."""
  return np.asarray(x).astype(np.complex128)


def assert_same(one, other):
  assert described(one) == described(other)
  for x, y in zip(*map(jax.tree.leaves, (one, other)), strict=True):
    np.testing.assert_array_equal(plain(x), plain(y))


@pytest.mark.parametrize('place', [0, N - 1])
@pytest.mark.parametrize('name', CASES)
def test_whatever_a_record_is_it_moves_the_sum_by_a_clip_norm(name, place):
  """And nothing is raised, promoted, warned of, or of another shape."""
  form, _ = CASES[name]
  made = private(name)
  data = [adversarial.ordinary(form, seed) for seed in range(N)]
  without, batch = moved(made, [*data[:place], None, *data[place + 1 :]])
  usual = described(batch.examples)
  far = {}
  for odd in adversarial.records(form):
    records = [*data[:place], odd.record, *data[place + 1 :]]
    found, batch = quietly(odd.name, made, adversarial.Source(records))
    assert described(batch.examples) == usual, odd.name
    far[odd.name] = np.linalg.norm(found - without)
    assert far[odd.name] <= 1.000001, odd.name
  # Some are cut, and what does not fit is not there at all.
  assert max(far.values()) > 0.99
  assert not far['record is text']
  assert sum(x == 0 for x in far.values()) > 80
  if place:  # The last one may be missing altogether.
    np.testing.assert_array_equal(moved(made, data[:place])[0], without)


def test_one_type_of_a_record_is_not_that_of_all():
  """As NumPy stacks them, one int32 makes int32 of all the others."""
  data = [(np.uint8([i] * 4), np.int32(i)) for i in range(N)]
  usual, _ = moved(private('pixels'), data)
  wide = [*data[:3], (np.int32([3] * 4), 3), *data[4:]]
  np.testing.assert_array_equal(moved(private('pixels'), wide)[0], usual)


def test_what_is_not_drawn_does_not_act():
  """Whatever it is, at the first place too: batches read what is drawn."""
  made = private('pixels', expected_batch_size=3, prng_key=0)
  data = [adversarial.ordinary(PIXELS, seed) for seed in range(N)]
  source = adversarial.Source(data)
  usual, batch = moved(made, source)
  assert source.read[:N] == list(range(N))  # A digest of the data.
  drawn = source.read[N:]
  assert sorted(drawn) == [1, 6, 7]
  assert batch.is_padding_example.sum() == N - 3
  for x in jax.tree.leaves(batch.examples):
    assert not np.asarray(x)[batch.is_padding_example].any()
  for odd in adversarial.records(PIXELS)[::20]:
    records = [x if i in drawn else odd.record for i, x in enumerate(data)]
    found, batch = moved(made, adversarial.Source(records))
    np.testing.assert_array_equal(found, usual)


def test_padding_reads_no_record():
  sampling = Sampling(2, N, N, None, None)
  source = adversarial.Source([ValueError('private')] * N)
  records = Records(sampling, source, None, Form.declared(WORDS))
  examples, is_padding, present = records.collect(np.full(5, -1), None)
  assert not source.read
  assert is_padding.all()
  assert present is None
  zeros = jax.tree.map(lambda x: np.zeros((5, *x.shape), x.dtype), WORDS)
  assert_same(examples, zeros)


@pytest.mark.parametrize('kind', ['list', 'arrays'])
def test_places_may_outnumber_records_or_be_too_few(kind):
  """What is drawn depends on the number that was declared, and on no other."""
  data = [adversarial.ordinary(PIXELS, seed) for seed in range(N + 5)]

  def of(count, blank=0):
    if kind == 'list':
      return data[:count] + [None] * blank
    stacked = tuple(map(np.stack, zip(*data, strict=True)))
    wrong = [np.full(blank, 2**40)]  # No int32.
    return stacked[0][: count + blank], np.concatenate(
      [np.int64(stacked[1][:count]), *wrong]
    )

  made = private('pixels', expected_batch_size=5, prng_key=6)
  assert made.nonprivate_misfits(of(N + 5)).tolist() == [*range(N, N + 5)]
  all_of_them, batch = moved(made, of(N))
  np.testing.assert_array_equal(moved(made, of(N + 5))[0], all_of_them)
  fewer, fewer_batch = moved(made, of(3))
  assert_same(fewer_batch.examples, moved(made, of(3, N - 3))[1].examples)
  # Each of the first three is in both batches, or in none.
  here = ~np.asarray(fewer_batch.is_padding_example)
  assert here.sum() == 3
  for x, y in zip(batch.examples, fewer_batch.examples, strict=True):
    np.testing.assert_array_equal(np.asarray(x)[here], np.asarray(y)[here])
  nothing, batch = moved(made, of(0))
  assert batch.is_padding_example.all()
  assert not np.array_equal(fewer, nothing)


def test_arrays_of_another_type_are_converted_record_by_record():
  x = np.arange(4 * N).reshape(N, 4)  # int64.
  wrong = x.copy()
  wrong[2, 1] = 300
  made = private('pixels')
  data = np.uint8(x), np.zeros(N, np.int32)
  _, batch = moved(made, (wrong, np.zeros(N)))
  assert batch.is_padding_example.sum() == 1
  blank = [*zip(*data, strict=True)]
  blank[2] = None
  assert_same(batch.examples, moved(made, blank)[1].examples)
  assert made.nonprivate_misfits((wrong, np.zeros(N))).tolist() == [2]
  assert made.nonprivate_misfits(data).tolist() == []


class _Failing:
  """A source whose reading fails."""

  def __init__(self, error):
    self._error = error

  def __len__(self):
    return N

  def __getitem__(self, place):
    raise self._error


class _Warning(adversarial.Source):
  """A source that warns of its records."""

  def __getitem__(self, place):
    warnings.warn(f'record {place} is private', UserWarning, stacklevel=1)
    return super().__getitem__(place)


def test_a_record_is_read_without_a_warning():
  data = [adversarial.ordinary(PIXELS, seed) for seed in range(N)]
  usual, _ = moved(private('pixels'), data)
  found, _ = moved(private('pixels'), _Warning(data))
  np.testing.assert_array_equal(found, usual)


@pytest.mark.parametrize(
  'error',
  [
    OSError(errno.EIO, 'Input/output error'),
    ConnectionResetError('gone'),
    TimeoutError('slow'),
    KeyboardInterrupt(),
  ],
)
def test_errors_of_disk_and_network_stop_the_run(error):
  with pytest.raises(type(error)):
    moved(private('pixels'), _Failing(error))


def test_what_is_public_is_refused():
  made = private('pixels')
  state = start(made)
  x, y = np.zeros((N, 4), np.uint8), np.zeros(N, np.int32)
  for data, message in (
    ((x[:, :3], y), r"form Form\(.*'uint8\(4,\)'.*got Form.*'uint8\(3,\)'"),
    ({'x': x, 'y': y}, r'which make_private got as record, got Form'),
    ((x, y[:-1]), r'got 2 leaves of 2 lengths'),
    ((x, 5), r'first axis for each record'),
    ((), r'got 0 leaves'),
    ((x.astype(str), y), r'Expected data of numbers.*<U'),
    ((x.astype(object), y), r'Expected data of numbers.*object'),
    ((x.astype('m8[s]'), y), r'Expected data of numbers.*timedelta'),
  ):
    with pytest.raises(ValueError, match=message):
      made.batches(state, data)
  for record, message in (
    ((3, 4), r'Expected record to be a tree of .*record\[0\]=3'),
    ({'x': None}, r'Expected record to have a leaf'),
    (struct((3,), np.dtype('U3')), r'Expected data of numbers'),
  ):
    with pytest.raises(ValueError, match=message):
      Form.declared(record)


def test_arrays_declare_themselves_and_other_data_are_declared():
  form, loss = CASES['pixels']
  options = {'expected_batch_size': N, 'dataset_size': N, 'steps': 1}
  made = training.make_private(
    loss, PARAMS, optimizer=optax.sgd(1.0), l2_clip_norm=0.5, delta=1e-5,
    noise_multiplier=0.0, prng_key=3, **options,
  )  # fmt: skip
  data = [adversarial.ordinary(form, seed) for seed in range(N)]
  arrays = tuple(map(np.stack, zip(*data, strict=True)))
  np.testing.assert_array_equal(
    moved(made, arrays)[0], moved(private('pixels'), data)[0]
  )
  with pytest.raises(ValueError, match=r'record=\.\.\..*list'):
    made.batches(start(made), data)
  # The form is part of what a state is of.
  with pytest.raises(ValueError, match='state of this training'):
    made.batches(start(private('pixels')), arrays)


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


TYPES = (
  *(bool, np.int8, np.uint8, np.int32, np.uint32, np.int64, np.uint64),
  *(np.float16, np.float32, np.float64, np.complex64),
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


def _numbers(dtype):
  edges = [0, 1, 2, 7, 8, 127, 128, 255, 256, 2**31, 2**32, 2**63, 2**64]
  more = *(-x for x in edges), 0.5, np.nan, np.inf
  edges = np.array([*edges, *more], np.float64)
  with np.errstate(all='ignore'):
    at_edges = st.sampled_from(list(edges.astype(dtype)))
  if dtype in TYPES[-3:]:
    return at_edges
  return st.one_of(at_edges, hnp.from_dtype(np.dtype(dtype)))


@cases.settings
@given(st.data(), st.sampled_from(TYPES), st.sampled_from(TYPES))
def test_numbers_are_brought_to_a_type(data, old, new):
  """Total, idempotent, exact for what fits; row by row."""
  values = data.draw(st.lists(_numbers(old), min_size=6, max_size=6))
  rows, new = np.array(values, old).reshape(3, 2), np.dtype(new)
  with np.errstate(all='ignore'):
    found, fits = _records.converted(rows, new)
    assert found.shape == rows.shape
    assert found.dtype == new
    for i, row in enumerate(rows):
      wanted = [slowly(x, new) for x in row]
      assert fits[i] == all(x is not None for x in wanted)
      if fits[i]:
        np.testing.assert_array_equal(plain(found[i]), plain(wanted))
    again, still = _records.converted(found, new)
  np.testing.assert_array_equal(plain(again), plain(found))
  assert still.all()


def test_every_odd_record_fits_or_not_and_stays_what_it_is():
  """Bringing a record to a form is total and idempotent."""
  for form in (*(x[0] for x in CASES.values()), struct((), bool)):
    known, count = Form.declared(form), 0
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
      assert_same(known.leaves_of(whole), leaves)
    assert len(adversarial.in_form(form)) <= count < 120


# Users.

MOST = 3


def of_users(**options):
  return private('words', examples_per_user=MOST, **options)


def test_a_users_missing_records_are_zeros_that_do_not_act():
  """Nor is their loss, which is NaN, a part of the user's gradient."""
  data = [adversarial.ordinary(WORDS, seed) for seed in range(6)]
  made = of_users()
  found, batch = moved(made, data, users=[5, 5, 5, 5, 8, 8])
  present = np.asarray(batch.is_present)
  assert sorted(present.sum(1)) == [0] * (N - 2) + [2, 3]
  np.testing.assert_array_equal(~present.any(1), batch.is_padding_example)
  for x in jax.tree.leaves(batch.examples):
    assert x.shape[:2] == (N, MOST)
    assert not np.asarray(x)[~present].any()
    assert len(np.unique(np.asarray(x)[present].reshape(5, -1), axis=0)) == 5
  assert np.isfinite(found).all()
  # One record makes what it makes as a user of three that are the same.
  one, _ = moved(made, data[:1], users=[5])
  three, _ = moved(made, data[:1] * 3, users=[5] * 3)
  np.testing.assert_allclose(one, three, rtol=1e-5)
  # And beside records that do not fit.
  beside, _ = moved(made, ['odd', data[0], None], users=[5] * 3)
  np.testing.assert_allclose(beside, one, rtol=1e-5)
  start = np.concatenate([np.ravel(x) for x in jax.tree.leaves(PARAMS)])
  assert np.linalg.norm(one - start * N / 0.5) > 0.5
  # Two make the mean of both, not of three.
  grads = [
    jax.tree.leaves(jax.grad(loss_of_words)(PARAMS, x)) for x in data[:2]
  ]
  mean = np.concatenate([(x + y) / 2 for x, y in zip(*grads, strict=True)])
  two, _ = moved(made, data[:2], users=['a', 'a'])
  cut = mean / max(1, np.linalg.norm(mean) / 0.5)
  np.testing.assert_allclose(two - start * N / 0.5, -cut / 0.5, rtol=1e-4)


def test_whatever_a_users_record_is_the_user_moves_the_sum_by_a_clip_norm():
  data = [adversarial.ordinary(WORDS, seed) for seed in range(N)]
  users = [*range(N - 1), 0]
  made = of_users()
  without, _ = moved(made, [None, *data[1:-1], None], users=users)
  for odd in adversarial.records(WORDS):
    for records in ([*data[:-1], odd.record], [odd.record, *data[1:-1], None]):
      source = adversarial.Source(records)
      found, _ = quietly(odd.name, made, source, users=users)
      assert np.linalg.norm(found - without) <= 1.000001, odd.name


def test_users_beyond_the_last_place_are_never_drawn():
  data = [adversarial.ordinary(WORDS, seed) for seed in range(N + 2)]
  users = ['a', 'b', *range(N - 2), 'z', 'b']
  found, _ = moved(of_users(), data, users=users)
  fewer, _ = moved(of_users(), [*data[:N], None, data[-1]], users=users)
  np.testing.assert_array_equal(found, fewer)
  misfits = of_users().nonprivate_misfits([None, *data[1:]], users=users)
  assert misfits.tolist() == [0, N]


def test_one_users_records_do_not_choose_those_of_others():
  sampling = Sampling(2, 2, 2, None, 2)
  for of_first in (1, 2, 7, 5000):
    users = np.repeat([0, 1], [of_first, 9])
    data = np.append(np.zeros(of_first), np.arange(1.0, 10))
    records = Records(sampling, data, users, None)
    seed = np.arange(4, dtype=np.uint32)
    choose = functools.partial(sampling.choose, seed, 6)
    examples, _, present = records.collect(np.array([0, 1]), choose)
    assert present[1].all()
    if of_first == 1:
      usual = examples[1]
      assert len(set(usual)) == 2
      others = {
        tuple(sampling.choose(seed, step, place, 9))
        for step in range(4)
        for place in range(4)
      }
      assert len(others) > 8  # Not the same of all users at all steps.
    np.testing.assert_array_equal(examples[1], usual)


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
      ['a', None, np.nan, [1], (1,), {}, object(), adversarial._NoAttributes(),
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
