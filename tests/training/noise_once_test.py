"""Noise of one key is added to one sum, once."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from prism_optax import training
from prism_optax.training import _fingerprint
from tests import cases
from tests.cases import DATA, FROZEN, PARAMS, B, N

SIZE = 4096
# The cosine of two independent normal vectors of this length: six of its
# standard deviations.
UNRELATED = 6 / np.sqrt(SIZE)
OTHER = tuple(np.float32(2) * x for x in DATA)


def noise_alone(**options):
  """A training of one vector whose gradients are zero, whatever the data."""

  def loss(params, frozen, x, y):
    return 0.0 * (jnp.sum(params) * frozen * x[0] + y[0])

  constants = {'loss': loss, 'params': jnp.zeros(SIZE), 'prng_key': None}
  return cases.make(optax.sgd(0.1), **constants | options)


@functools.cache
def private():
  made = noise_alone()
  return made, made.init(jnp.zeros(SIZE))


def forced(change=lambda state: state, data=DATA, frozen=1.0):
  """The noise of the first step with the same keys, and what it started from.

  A state from before the first step is of no program or data yet.
  """
  made, start = private()
  state = change(jax.tree.map(jnp.copy, start))
  state = state._replace(step=np.asarray(0))
  before = np.array(state.params)
  batch = next(iter(made.batches(state, data)))
  after = made.step(state, batch, frozen)
  return np.asarray(after.params) - before, after


def cosine(x, y):
  return np.vdot(x, y) / np.linalg.norm(x) / np.linalg.norm(y)


def test_what_is_done_again_is_the_same_release():
  one, other = forced()[0], forced()[0]
  np.testing.assert_array_equal(one, other)
  assert np.linalg.norm(one) > 0.1


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
  other, _ = forced(**options)
  # Not the noise of before, and not a part of it.
  assert abs(cosine(forced()[0], other)) < UNRELATED


@pytest.mark.parametrize('part', _fingerprint.Fingerprint._fields)
def test_noise_depends_on_each_part_of_the_fingerprint(part):
  """And on the number of the attempt: the digest that the key gets has all."""
  made, start = private()
  fingerprint = forced()[1].fingerprint
  changed = fingerprint._replace(**{part: getattr(fingerprint, part) ^ 1})

  def noise(digest):
    state = jax.tree.map(jnp.copy, (start.params, start.optimizer))
    rows = np.zeros((made.padded_batch_size, 1), np.float32)
    padding = np.ones(len(rows), bool)
    return made._step(*state, 1.0, (rows, rows), padding, None, digest)[0]

  one = noise(_fingerprint.release(fingerprint, 0))
  for digest in (
    _fingerprint.release(changed, 0),
    _fingerprint.release(fingerprint, 1),
  ):
    assert abs(cosine(one, noise(digest))) < UNRELATED


def test_the_noise_of_a_quantile_depends_on_what_is_released():
  private = cases.make(
    optax.sgd(0.1), clipping=training.QuantileClipping(), prng_key=None
  )
  start = private.init(PARAMS)
  rows = tuple(np.zeros_like(x[: private.padded_batch_size]) for x in DATA)
  padding = np.ones(private.padded_batch_size, bool)

  def norm(digest):
    state = jax.tree.map(jnp.copy, (start.params, start.optimizer))
    _, state, _ = private._step(*state, FROZEN, rows, padding, None, digest)
    return float(state[0].l2_clip_norm)

  digests = [_fingerprint.words(name) for name in 'ab']
  one, other = map(norm, digests)
  assert one != other
  assert one == norm(digests[0])


def changed_loss(params, frozen, x, y):
  return 1.001 * cases.loss(params, frozen, x, y)


@functools.cache
def begun():
  """A training, and its state after a step."""
  made = cases.make(optax.adam(0.1), prng_key=None)
  state = made.init(PARAMS)
  return made, made.step(state, next(iter(made.batches(state, DATA))), FROZEN)


def test_other_records_are_refused():
  made, state = begun()
  with pytest.raises(ValueError, match=r'another one: data \(the records'):
    made.batches(state, OTHER)
  # One bit of one record.
  data = tuple(map(np.copy, DATA))
  data[1].view(np.uint32)[7, 3] ^= 1
  with pytest.raises(ValueError, match='another one: data'):
    made.batches(state, data)
  batch = next(iter(made.batches(state, DATA)))
  other = dataclasses.replace(batch, data=batch.data ^ 1)
  with pytest.raises(ValueError, match='another one: data'):
    made.step(state, other, FROZEN)


def test_records_of_other_users_are_refused():
  made = cases.make(
    optax.sgd(0.1),
    examples_per_user=2,
    dataset_size=N // 2,
    expected_batch_size=10,
    prng_key=None,
  )
  state = made.init(PARAMS)
  users = np.arange(N) // 2
  batches = made.batches(state, DATA, users=users)
  state = state._replace(
    fingerprint=state.fingerprint._replace(data=next(iter(batches)).data)
  )
  made.batches(state, DATA, users=users + 5)  # The same under other names.
  with pytest.raises(ValueError, match='who they are of'):
    made.batches(state, DATA, users=np.roll(users, 1))


@pytest.mark.parametrize(
  ('optimizer', 'loss'),
  [
    (optax.adam(0.2), cases.loss),
    (optax.adam(0.1, b1=0.8), cases.loss),
    (optax.adam(0.1), changed_loss),
  ],
  ids=['learning rate', 'decay', 'loss'],
)
def test_another_program_is_refused(optimizer, loss):
  _, state = begun()
  other = cases.make(optimizer, loss=loss, prng_key=None)
  batch = next(iter(other.batches(state, DATA)))
  with pytest.raises(ValueError, match=r'another one: program \(loss, optimi'):
    other.step(state, batch, FROZEN)


def test_other_frozen_weights_are_refused():
  made, state = begun()
  batch = next(iter(made.batches(state, DATA)))
  with pytest.raises(ValueError, match=r'another one: program \(.*frozen'):
    made.step(state, batch, FROZEN + np.float32(1e-6))


def test_a_known_key_is_for_one_run():
  made = cases.make(optax.sgd(0.1))
  made.init(PARAMS)
  with pytest.raises(ValueError, match='a second run would have the keys'):
    made.init(PARAMS)
  fresh = cases.make(optax.sgd(0.1), prng_key='chacha20')
  one, other = fresh.init(PARAMS), fresh.init(PARAMS)
  assert not np.array_equal(one.seed, other.seed)


def test_another_environment_is_refused(monkeypatch):
  _, state = begun()
  found = _fingerprint.environment(None, '')
  monkeypatch.setattr(_fingerprint, 'environment', lambda *_: found + ' ')
  elsewhere = cases.make(optax.adam(0.1), prng_key=None)
  with pytest.raises(ValueError, match=r'another environment .*journal=path'):
    elsewhere.batches(state, DATA)
  # Also before the first step: its releases may be known already.
  made = begun()[0]
  with pytest.raises(ValueError, match='another environment'):
    elsewhere.batches(made.init(PARAMS), DATA)
  # What is released already can be read anywhere.
  assert elsewhere.adapters(state) is state.params


def test_a_gpu_that_may_add_in_any_order_is_another_one_in_each_process(
  monkeypatch,
):
  """So a step that is done again there is refused, or counted by a journal."""
  monkeypatch.setattr(jax, 'default_backend', lambda: 'gpu')
  monkeypatch.delenv('XLA_FLAGS', raising=False)
  one, other = (_fingerprint.environment(None, x) for x in 'ab')
  assert one != other
  monkeypatch.setenv('XLA_FLAGS', '--xla_gpu_deterministic_ops=true')
  one, other = (_fingerprint.environment(None, x) for x in 'ab')
  assert one == other


def test_a_state_of_another_version_is_refused():
  made, state = begun()
  old = state._replace(fingerprint=np.zeros(8, np.uint32))
  with pytest.raises(ValueError, match='state of this training'):
    made.batches(old, DATA)


def program(function, *arguments):
  return _fingerprint.program(jax.make_jaxpr(function)(*arguments))


def test_a_program_is_known_by_what_it_computes():
  x = np.ones((3, 2), np.float32)
  table = np.arange(6.0, dtype=np.float32).reshape(3, 2)

  def make(rate=0.1, table=table, steps=3):
    @jax.custom_vjp
    def inner(z):
      return jnp.sum(z * table) * rate

    inner.defvjp(lambda z: (inner(z), z), lambda z, g: (g * z * rate,))

    def whole(z):
      def body(carry, _):
        return carry + jax.nn.relu(inner(carry)), None

      return jax.lax.scan(jax.checkpoint(body), z, None, length=steps)[0]

    return lambda z: jax.jit(jax.grad(lambda y: whole(y).sum()))(z)

  def one(z):
    return 2 * z

  def renamed(z):
    return 2 * z

  assert program(jax.jit(one), x) == program(jax.jit(renamed), x)
  same = program(make(), x)
  assert program(make(table=jnp.asarray(table)), x) == same
  others = [
    program(make(rate=0.2), x),
    program(make(table=table + 1), x),
    program(make(steps=4), x),
    program(make(table=table.astype(np.float16)), x.astype(np.float16)),
  ]
  assert len({same, *others}) == 5


def test_a_digest_of_arrays_tells_bits_apart():
  of = jax.jit(_fingerprint.of_arrays)
  x = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)
  x[0, 0] = 0.0
  flipped, moved = x.copy(), x.copy()
  flipped.view(np.uint32)[1, 2] ^= 1
  moved[[0, 1]] = moved[[1, 0]]
  signed = np.where(x == 0, np.float32(-0.0), x)
  trees = [[x, 2 * x], [2 * x, x], [flipped, 2 * x], [moved, 2 * x],
           [signed, 2 * x]]  # fmt: skip
  digests = [tuple(np.asarray(of(tree)).tolist()) for tree in trees]
  assert len(set(digests)) == len(trees)
  assert all(len(set(d)) == 8 for d in digests)
  # One word changes all of them: there is no short way to a collision.
  assert not set(digests[0]) & set(digests[2])


@pytest.mark.parametrize(
  'dtype', ['bool', 'int8', 'uint16', 'int4', 'bfloat16', 'float16',
            'float8_e4m3fn', 'complex64', 'key<fry>']
)  # fmt: skip
def test_arrays_of_any_type_have_a_digest(dtype):
  if dtype == 'key<fry>':
    one, other = map(jax.random.key, (0, 1))
  else:
    one, other = (jnp.asarray([i, 1, 0]).astype(dtype) for i in (0, 1))
  one, other = (np.asarray(_fingerprint.of_arrays([x])) for x in (one, other))
  assert one.shape == (8,)
  assert one.dtype == np.uint32
  assert not np.array_equal(one, other)


def test_frozen_weights_are_read_once_unless_they_may_change(monkeypatch):
  calls = []
  digest = _fingerprint.jitted_of_arrays
  monkeypatch.setattr(
    _fingerprint, 'jitted_of_arrays', lambda x: calls.append(1) or digest(x)
  )
  weights = _fingerprint.FrozenWeights()
  x, y = jnp.arange(3.0), np.arange(3.0, dtype=np.float32)
  one = weights.digest([x])
  assert weights.digest([x]) == one
  assert len(calls) == 1
  assert weights.digest([x + 1]) != one
  numpy = weights.digest([y])
  y[0] = 5.0
  assert weights.digest([y]) != numpy


def test_batches_do_not_depend_on_the_data():
  """Which records are drawn is a function of the seed and the step alone."""
  made = cases.make(optax.sgd(0.1), prng_key=None)
  state = made.init(PARAMS)
  one, other = (next(iter(made.batches(state, x))) for x in (DATA, OTHER))
  np.testing.assert_array_equal(2 * one.examples[0], other.examples[0])
  assert int((~one.is_padding_example).sum()) < 3 * B
