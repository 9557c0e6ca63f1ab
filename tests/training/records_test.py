"""Records of any number, form and user; what they are is not seen: `replay`."""

import errno
import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from prism_optax import training
from tests import cases
from tests.cases import PIXELS, WORDS
from tests.training import adversarial

N, MOST, C = 8, 3, 0.5


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


KINDS = {'pixels': (PIXELS, loss_of_pixels), 'words': (WORDS, loss_of_words)}


@functools.cache
def private(name, **options):
  """One step without noise; every place is drawn, unless told otherwise."""
  form, loss = KINDS[name]
  constants = {
    'l2_clip_norm': C, 'expected_batch_size': N, 'dataset_size': N,
    'execution': training.Execution(padded_batch_size=N), 'steps': 1,
    'noise_multiplier': 0.0, 'record': form, 'loss': loss, 'params': PARAMS,
  }  # fmt: skip
  return cases.make(optax.sgd(1.0), **constants | options)


of_users = functools.partial(private, 'words', examples_per_user=MOST)


@functools.cache
def start(made):
  """The one run that a known key is for."""
  return made.init(PARAMS)


def listed(form, count=N):
  return [adversarial.ordinary(form, seed) for seed in range(count)]


def moved(made, data, name='', **options):
  """The parameters after a step, in units of a clip norm; and the batch."""
  state = start(made)  # The step takes its arrays over.
  params, optimizer = jax.tree.map(jnp.copy, (state.params, state.optimizer))
  state = state._replace(params=params, optimizer=optimizer)
  try:
    # As an error it would be one of the record, and silenced as that.
    with warnings.catch_warnings(record=True) as warned:
      warnings.simplefilter('always')
      (batch,) = made.batches(state, data, **options)
    assert not warned
    params = made.step(state, batch).params
  except Exception as error:
    raise AssertionError(f'{name}: {error!r}') from error
  vector = np.concatenate(jax.tree.leaves(params), None)
  return np.float64(vector) * N / C, batch


@pytest.mark.parametrize('kind', ['list', 'arrays'])
def test_places_may_outnumber_records_or_be_too_few(kind):
  """What is drawn depends on the number that was declared, and on no other."""
  data = listed(PIXELS, N + 5)

  def of(count, blank=0):
    if kind == 'list':
      return data[:count] + [None] * blank
    x, y = map(np.stack, zip(*data, strict=True))
    wrong = np.full(blank, 2**40)  # No int32.
    return x[: count + blank], np.append(np.int64(y[:count]), wrong)

  made = private('pixels', expected_batch_size=5, prng_key=6)
  assert made.nonprivate_misfits(of(N + 5)).tolist() == [*range(N, N + 5)]
  all_of_them, batch = moved(made, of(N))
  np.testing.assert_array_equal(moved(made, of(N + 5))[0], all_of_them)
  fewer, fewer_batch = moved(made, of(3))
  blank = moved(made, of(3, N - 3))[1].examples
  cases.assert_same_bits(fewer_batch.examples, blank)
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
  x[-1, -1] = 255  # The largest that fits.
  wrong = x.copy()
  wrong[2, 1] = 300
  made, wrong = private('pixels'), (wrong, np.zeros(N))
  _, batch = moved(made, wrong)
  assert batch.is_padding_example.sum() == 1
  data = np.uint8(x), np.zeros(N, np.int32)
  blank = [*zip(*data, strict=True)]
  blank[2] = None
  cases.assert_same_bits(batch.examples, moved(made, blank)[1].examples)
  assert made.nonprivate_misfits(wrong).tolist() == [2]
  assert made.nonprivate_misfits(data).tolist() == []
  wide = data[0], np.arange(N) << 31  # JAX would cut it to int32.
  undeclared = private('pixels', record=None)
  assert undeclared.nonprivate_misfits(wide).tolist() == [*range(1, N)]


@pytest.mark.parametrize('error', [
  OSError(errno.EIO, 'Input/output error'), ConnectionResetError('gone'),
  TimeoutError('slow'), KeyboardInterrupt(),
])  # fmt: skip
def test_errors_of_disk_and_network_stop_the_run(error):
  made = private('pixels')
  with pytest.raises(type(error)):
    made.batches(start(made), adversarial.Source([error] * N))


X, Y = np.zeros((N, 4), np.uint8), np.zeros(N, np.int32)


@pytest.mark.parametrize(
  ('data', 'message'),
  [
    ((X[:, :3], Y), r"form Form\(.*'uint8\(4,\)'.*got Form.*'uint8\(3,\)'"),
    ({'x': X, 'y': Y}, r'which make_private got as record, got Form'),
    ((X, Y[:-1]), r'got 2 leaves of 2 lengths'),
    ((X, 5), r'first axis for each record'),
    ((), r'got 0 leaves'),
    ((X.astype(str), Y), r'Expected data of numbers.*<U'),
    ((X.astype(object), Y), r'Expected data of numbers.*object'),
    ((X.astype('m8[s]'), Y), r'Expected data of numbers.*timedelta'),
    ((np.ma.array(X), Y), r'without a mask'),
  ],
)
def test_what_is_public_is_refused(data, message):
  made = private('pixels')
  with pytest.raises(ValueError, match=message):
    made.batches(start(made), data)


def test_arrays_declare_themselves_and_other_data_are_declared():
  made, data = private('pixels', record=None), listed(PIXELS)
  arrays = tuple(map(np.stack, zip(*data, strict=True)))
  np.testing.assert_array_equal(
    moved(made, arrays)[0], moved(private('pixels'), data)[0]
  )
  with pytest.raises(ValueError, match=r'record=\.\.\..*list'):
    made.batches(start(made), data)
  # The form is part of what a state is of.
  with pytest.raises(ValueError, match='state of this training'):
    made.batches(start(private('pixels')), arrays)


# Users.


@pytest.mark.slow
def test_a_users_missing_records_are_zeros_that_do_not_act():
  """Nor is their loss, which is NaN, a part of the user's gradient."""
  data, made = listed(WORDS, 6), of_users()
  found, batch = moved(made, data, users=[5, 5, 5, 5, 8, 8])
  present = np.asarray(batch.is_present)
  assert sorted(present.sum(1)) == [0] * (N - 2) + [2, 3]
  np.testing.assert_array_equal(~present.any(1), batch.is_padding_example)
  for x in map(np.asarray, jax.tree.leaves(batch.examples)):
    assert x.shape[:2] == (N, MOST)
    assert not x[~present].any()
    assert len(np.unique(x[present].reshape(5, -1), axis=0)) == 5
  assert np.isfinite(found).all()
  # One record makes what it makes as a user of three that are the same.
  one, _ = moved(made, data[:1], users=[5])
  three, _ = moved(made, data[:1] * 3, users=[5] * 3)
  np.testing.assert_allclose(one, three, rtol=1e-5)
  # And beside records that do not fit.
  beside, _ = moved(made, ['odd', data[0], None], users=[5] * 3)
  np.testing.assert_allclose(beside, one, rtol=1e-5)
  begin = np.concatenate(jax.tree.leaves(PARAMS), None) * N / C
  assert np.linalg.norm(one - begin) > 0.5
  # Two make the mean of both, not of three.
  gradient = jax.jit(jax.grad(loss_of_words))
  grads = [jax.tree.leaves(gradient(PARAMS, x)) for x in data[:2]]
  mean = np.concatenate([(x + y) / 2 for x, y in zip(*grads, strict=True)])
  two, _ = moved(made, data[:2], users=['a', 'a'])
  cut = mean / max(1, np.linalg.norm(mean) / C)
  np.testing.assert_allclose(two - begin, -cut / C, rtol=1e-4)


def test_whatever_a_users_record_is_the_user_moves_the_sum_by_a_clip_norm():
  data, users, made = listed(WORDS), [*range(N - 1), 0], of_users()
  without, _ = moved(made, [None, *data[1:-1], None], users=users)
  for i, odd in enumerate(adversarial.records(WORDS)):
    # Beside another record, or alone.
    records = [[*data[:-1], odd.record], [odd.record, *data[1:-1], None]][i % 2]
    source = adversarial.Source(records)
    found, _ = moved(made, source, odd.name, users=users)
    assert np.linalg.norm(found - without) <= 1, odd.name


def test_users_beyond_the_last_place_are_never_drawn():
  data = listed(WORDS, N + 2)
  users = ['a', 'b', *range(N - 2), 'z', 'b']
  found, _ = moved(of_users(), data, users=users)
  fewer, _ = moved(of_users(), [*data[:N], None, data[-1]], users=users)
  np.testing.assert_array_equal(found, fewer)
  misfits = of_users().nonprivate_misfits([None, *data[1:]], users=users)
  assert misfits.tolist() == [0, N]
