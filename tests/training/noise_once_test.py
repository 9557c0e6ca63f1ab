"""Noise of one key is added to one sum, once."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from prism_optax import training
from tests import cases
from tests.cases import DATA, FROZEN, PARAMS, N
from tests.core import seams

SIZE = 4096
# The cosine of two independent normal vectors of this length: six of its
# standard deviations.
UNRELATED = 6 / np.sqrt(SIZE)
OTHER = tuple(np.float32(2) * x for x in DATA)
SGD = optax.sgd(0.1)


def no_gradient(params, frozen, x, y):
  return 0.0 * (jnp.sum(params) * frozen * x[0] + y[0])


@functools.cache
def noise_alone(optimizer=SGD, clipping=None):
  """A training of one vector whose gradients are zero, whatever the data."""
  options = {'loss': no_gradient, 'params': jnp.zeros(SIZE), 'prng_key': None}
  made = cases.make(optimizer, clipping=clipping, **options)
  return made, made.init(jnp.zeros(SIZE))


def forced(change=lambda state: state, data=DATA, frozen=1.0):
  """The noise of the first step with the same keys, and what it started from.

  A state from before the first step is of no program or data yet.
  """
  made, start = noise_alone()
  start = change(start)
  after = cases.first_step(made, data, start, frozen)
  return np.asarray(after.params) - start.params, after


def cosine(x, y):
  return np.vdot(x, y) / np.linalg.norm(x) / np.linalg.norm(y)


@pytest.mark.parametrize(
  'options',
  [
    {'data': OTHER},
    {'frozen': 2.0},
    {'change': lambda state: state._replace(params=state.params + 1e-7)},
  ],
  ids=['records', 'frozen weights', 'parameters'],
)
def test_the_same_keys_give_unrelated_noise_for_anything_else(options):
  # Not the noise of before, and not a part of it.
  assert abs(cosine(forced()[0], forced(**options)[0])) < UNRELATED


def first_noise(batch):
  """The noise of a batch, of the keys of one state that is kept."""
  made, start = noise_alone()
  state = jax.tree.map(jnp.copy, start)._replace(step=np.asarray(0))
  return np.asarray(made.step(state, batch, 1.0).params)


def test_data_edited_in_place_give_other_noise():
  """Arrays are not read again when batches are iterated again."""
  made, start = noise_alone()
  data = tuple(map(np.copy, DATA))
  batches = made.batches(start, data)
  one, same = (first_noise(next(iter(batches))) for _ in range(2))
  np.testing.assert_array_equal(one, same)
  data[0][:] *= 2
  assert abs(cosine(one, first_noise(next(iter(batches))))) < UNRELATED


def test_a_record_that_no_digest_has_seen_gives_other_noise():
  """Of a source that is not an array, only some records are compared."""
  made = cases.make(
    optax.sgd(0.1), loss=lambda params, x: 0.0 * jnp.sum(params) * x,
    params=jnp.zeros(SIZE), prng_key=None, dataset_size=4000,
    expected_batch_size=2000, record=jax.ShapeDtypeStruct((), 'float32'),
  )  # fmt: skip
  state = made.init(jnp.zeros(SIZE))
  records = list(range(4000))

  def first(records):
    batch = next(iter(made.batches(state, records)))
    new = made.step(jax.tree.map(jnp.copy, state)._replace(step=0), batch)
    return batch, np.asarray(new.params)

  batch, one = first(records)
  drawn = np.asarray(batch.examples)[~np.asarray(batch.is_padding_example)]
  for record in map(int, drawn[:8]):
    edited = list(records)
    edited[record] = 0.5
    other, noise = first(edited)
    if np.array_equal(other.data, batch.data):  # As for nearly all of them.
      break
  assert np.array_equal(other.data, batch.data)
  assert abs(cosine(one, noise)) < UNRELATED


def test_a_batch_with_other_arrays_gives_other_noise():
  made, start = noise_alone()
  batch = next(iter(made.batches(start, DATA)))
  x, y = batch.examples
  padding = jnp.zeros_like(batch.is_padding_example)
  for other in ({'examples': (2 * x, y)}, {'is_padding_example': padding}):
    noise = first_noise(dataclasses.replace(batch, **other))
    assert abs(cosine(first_noise(batch), noise)) < UNRELATED


@pytest.mark.parametrize('part', seams.FINGERPRINT)
def test_noise_depends_on_each_part_of_the_fingerprint(part):
  """And on the number of the attempt: the digest that the key gets has all."""
  made, start = noise_alone()
  fingerprint = forced()[1].fingerprint
  changed = fingerprint._replace(**{part: getattr(fingerprint, part) ^ 1})
  rows = tuple(np.zeros_like(x[: made.padded_batch_size]) for x in DATA)
  padding = np.ones(len(rows[0]), bool)

  def noise(known, attempt):
    state = jax.tree.map(jnp.copy, (start.params, start.optimizer))
    digest = seams.digest_of(known, np.arange(8, dtype=np.uint32), attempt)
    return seams.run_step(made, *state, 1.0, rows, padding, digest=digest)[0]

  for other in (noise(changed, 0), noise(fingerprint, 1)):
    assert abs(cosine(noise(fingerprint, 0), other)) < UNRELATED


def test_the_noise_of_a_quantile_depends_on_what_is_released():
  """All votes are equal, so that the noise alone moves the clip norm."""
  made, start = noise_alone(clipping=training.QuantileClipping())
  one, again, other = (
    cases.first_step(made, data, start, 1.0).optimizer[0].l2_clip_norm
    for data in (DATA, DATA, OTHER)
  )
  assert one == again != other


def test_gradients_quantile_and_batches_have_keys_of_their_own():
  """Also where the key that is given is zero."""
  state = cases.make(
    optax.sgd(0.1), clipping=training.QuantileClipping(), prng_key=0
  ).init(PARAMS)
  keys = [
    x.tobytes()
    for x in jax.tree.leaves(cases.saved(state))
    if (x.shape, x.dtype) == ((4,), np.uint32)
  ]
  assert len(keys) == len(set(keys)) == 3


def changed_loss(params, frozen, x, y):
  return 1.001 * cases.loss(params, frozen, x, y)


@functools.cache
def begun():
  """A training, and its state after a step."""
  made = cases.make(optax.adam(0.1), prng_key=None)
  return made, cases.first_step(made)


def test_other_records_are_refused():
  made, state = begun()
  one_bit = tuple(map(np.copy, DATA))
  one_bit[1].view(np.uint32)[7, 3] ^= 1
  for data in (OTHER, one_bit):
    with pytest.raises(ValueError, match=r'a difference in data \(the records'):
      made.batches(state, data)
  # A batch of other records of the same run and step, from before it knew any.
  new = state._replace(fingerprint=made.init(PARAMS).fingerprint)
  batch = next(iter(made.batches(new, OTHER)))
  with pytest.raises(ValueError, match='a difference in data'):
    made.step(state, batch, FROZEN)
  # Which records are drawn is a function of the seed and the step alone.
  own = next(iter(made.batches(state, DATA)))
  np.testing.assert_array_equal(2 * own.examples[0], batch.examples[0])


def test_records_of_other_users_are_refused():
  made = cases.make(
    optax.sgd(0.1), examples_per_user=2, dataset_size=N // 2, prng_key=None,
    expected_batch_size=10,
  )  # fmt: skip
  state, users = made.init(PARAMS), np.arange(N) // 2
  data = next(iter(made.batches(state, DATA, users=users))).data
  state = state._replace(fingerprint=state.fingerprint._replace(data=data))
  made.batches(state, DATA, users=users + 5)  # The same under other names.
  with pytest.raises(ValueError, match='users they belong to'):
    made.batches(state, DATA, users=np.roll(users, 1))


@pytest.mark.parametrize(
  ('optimizer', 'loss', 'frozen'),
  [
    (optax.adam(0.2), cases.loss, FROZEN),
    (optax.adam(0.1, b1=0.8), cases.loss, FROZEN),
    (optax.adam(0.1), changed_loss, FROZEN),
    (optax.adam(0.1), cases.loss, FROZEN + np.float32(1e-6)),
  ],
  ids=['learning rate', 'decay', 'loss', 'frozen weights'],
)
def test_another_program_is_refused(optimizer, loss, frozen):
  _, state = begun()
  other = cases.make(optimizer, loss=loss, prng_key=None)
  with pytest.raises(
    ValueError, match=r'a difference in program \(loss, .*frozen'
  ):
    other.step(state, next(iter(other.batches(state, DATA))), frozen)


def test_the_state_of_another_optimizer_is_refused():
  _, start = noise_alone()  # Of SGD, without moments.
  other, _ = noise_alone(optax.adam(0.1))
  with pytest.raises(ValueError, match=r'a difference in program \(loss, opt'):
    other.batches(start, DATA)


def test_a_known_key_is_for_one_run():
  made = cases.make(optax.sgd(0.1))
  made.init(PARAMS)
  with pytest.raises(ValueError, match='a second run would have the keys'):
    made.init(PARAMS)
  fresh = cases.make(optax.sgd(0.1), prng_key='chacha20')
  one, other = fresh.init(PARAMS), fresh.init(PARAMS)
  assert not np.array_equal(one.seed, other.seed)


def test_another_environment_is_refused():
  made, state = begun()
  with seams.elsewhere():
    elsewhere = cases.make(optax.adam(0.1), prng_key=None)
    # Also before the first step: its releases may be known already.
    for old in (state, made.init(PARAMS)):
      with pytest.raises(
        ValueError, match=r'another environment .*journal=path'
      ):
        elsewhere.batches(old, DATA)
  # What is released already can be read anywhere.
  assert elsewhere.adapters(state) is state.params
