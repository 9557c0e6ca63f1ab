"""What was released before the training, in statements and events."""

import dataclasses
import functools
import pickle
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from dp_accounting import ComposedDpEvent, GaussianDpEvent

import prism_optax
from prism_optax import (
  _identity,
  _lattice,
  _randomness,
  accounting,
  contrib,
  training,
)
from prism_optax.contrib import heads
from tests import cases


def made_up(value=1.0, digest='values', key_digest='key', **changes):
  """A release that was never made: what a training asks of one."""
  head = heads.LinearHead(jnp.full((2, 2), value), 5.0, 4, cases.N)
  names = {'digest': digest, 'key_digest': key_digest}
  return dataclasses.replace(head, **names | changes)


MEANS = made_up()
OTHER = made_up(0.0, 'other values', 'other key')


def test_a_training_accounts_for_what_came_before():
  # Nothing is sampled: Gaussians alone are accounted for in no time.
  make = functools.partial(
    cases.make, optax.sgd(0.1), expected_batch_size=cases.N
  )
  private = make(prior_releases=[MEANS, OTHER])
  events = [make().event(), MEANS.event, GaussianDpEvent(5.0)]
  assert private.event() == ComposedDpEvent(events)
  assert private.epsilon(0) == pytest.approx(
    accounting.epsilon(ComposedDpEvent(events[1:]), 1e-4), rel=1e-6
  )
  assert private.statement().endswith(
    '3 of 3 steps and 2 prior releases; no guarantee against anyone who knows'
    ' prng_key'
  )
  # Noise of either kind hides nothing from somebody who knows its key.
  seeded = dataclasses.replace(MEANS, seeded=True)
  for means, void in ((MEANS, False), (seeded, True)):
    statement = make(prior_releases=[means], prng_key=None).statement()
    assert ('no guarantee' in statement) is void
  # After other releases it is another run: other values, or other noise.
  state = private.init(cases.PARAMS)
  for change in ({'digest': 'third'}, {'key_digest': 'third'}):
    third = dataclasses.replace(OTHER, **change)
    with pytest.raises(ValueError, match='state of this training'):
      make(prior_releases=[MEANS, third]).adapters(state)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Scaled:
  """Another's change of variables: nothing here has heard of its class."""

  scale: jax.Array
  event = GaussianDpEvent(5.0)
  entries, dataset_size, seeded = 1, cases.N, False
  digest, key_digest = 'values of another', 'key of another'

  def to_params(self, variables):
    return jax.tree.map(lambda x: self.scale * x, variables)


def test_any_object_with_the_attributes_is_a_change_of_variables():
  change = Scaled(jnp.float32(2))
  make = functools.partial(
    cases.make, optax.sgd(0.1), expected_batch_size=cases.N
  )
  private = make(change_of_variables=change)
  assert private.event() == ComposedDpEvent([make().event(), change.event])
  assert ' steps and a change of variables;' in private.statement()
  found = cases.by_keys_alone(private)

  def loss(variables, *data):
    return cases.loss(change.to_params(variables), *data)

  # One program, but for where it was written: rounding at most.
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6),
    found,
    cases.by_keys_alone(make(loss=loss)),
  )
  jax.tree.map(
    np.testing.assert_array_equal,
    private.parts.adapters(found),
    change.to_params(found),
  )
  # A release that changes nothing is none, and one of both is one release.
  with pytest.raises(ValueError, match='LinearHead without to_params'):
    make(change_of_variables=MEANS)
  with pytest.raises(ValueError, match='are one release'):
    make(change_of_variables=change, prior_releases=[change])


ROWS, CLASSES = 16, 3


@functools.cache
def head_of(make=heads.ridge, prng_key=None, rows=cases.N):
  """A release of records like those of the problem, with noise."""
  rng = np.random.default_rng(1)
  labels = rng.integers(CLASSES, size=rows)
  features = rng.normal(size=(rows, ROWS)) + 2 * np.eye(CLASSES, ROWS)[labels]
  return make(
    [(features, labels)],
    num_classes=CLASSES,
    noise_multiplier=1.0,
    dataset_size=cases.N,
    prng_key=prng_key,
  )


def saved_and_loaded(kernel, tmp_path):
  np.save(tmp_path / 'head.npy', kernel)
  return np.load(tmp_path / 'head.npy')


COPIES = {
  'as it is': lambda x: x,
  'device_put': lambda x: jax.device_put(jnp.copy(x), jax.devices()[0]),
  'times 10': lambda x: 10 * x,
  'times -0.37, in place': lambda x: np.negative(0.37 * np.asarray(x)),
  'bfloat16': lambda x: x.astype(jnp.bfloat16),
  'float16': lambda x: x.astype(jnp.float16),
  'float64': lambda x: np.float64(x),
  'bfloat16, and back': lambda x: x.astype(jnp.bfloat16).astype(jnp.float32),
  'transposed': lambda x: x.T,
  'columns of length one': lambda x: x / jnp.linalg.norm(x, axis=0),
  'a column': lambda x: x[:, 1],
}
# A cast to bfloat16 leaves less: it takes more numbers.
LARGE = _identity.marked(np.random.default_rng(2).normal(size=(60, 3)) / 20)
"""Sixty times three numbers, as a head with sixty features has them."""


@functools.cache
def heads_of():
  """A small head, and one large enough for a cast to bfloat16."""
  small = head_of()
  return small, dataclasses.replace(
    small, kernel=jnp.asarray(LARGE), digest='large', key_digest='large'
  )


@pytest.mark.parametrize('copy', [*COPIES, 'reloaded'])
def test_a_copy_of_a_head_has_to_be_accounted_for(copy, tmp_path):
  """In parameters and in frozen weights; declared, it is used at will."""
  head = heads_of()['bfloat16' in copy]
  change = COPIES.get(copy, lambda x: saved_and_loaded(x, tmp_path))
  tree = {'layer': jnp.ones((2, 3)), 'head': change(head.kernel)}
  check = training._releases.check_declared
  with pytest.raises(
    ValueError, match=r"frozen\['head'\] .*prior_releases=\[head\]"
  ):
    check('frozen', tree, [])
  with pytest.raises(ValueError, match='not accounted for'):
    check('frozen', tree, [MEANS])
  check('frozen', tree, [MEANS, head])


def test_another_head_than_the_declared_one_is_refused():
  """Of the same records, with other noise: two releases, one declared."""
  one, other = head_of(), head_of(heads.class_means)
  again = head_of(prng_key=5)
  for found in (other, again):
    with pytest.raises(ValueError, match='not accounted for'):
      training._releases.check_declared('params', [found.kernel], [one])


def test_what_is_no_copy_passes():
  """And says so: `LinearHead` has the table."""
  kernel = heads_of()[1].kernel
  rng = np.random.default_rng(0)
  other = jnp.asarray(rng.normal(size=kernel.shape), jnp.float32)
  tree = [
    jax.random.key(0),
    np.arange(9),
    jax.ShapeDtypeStruct((3,), jnp.float32),
    *(other, jnp.zeros((5, 5)), jnp.eye(7), np.nan * other, 1.0, 'text'),
    *(kernel + 0.1 * other, kernel.T @ kernel),
    # Quantised weights, windows, all numbers of a type.
    np.round(127 * np.asarray(other)) * np.float32(0.003),
    *(np.linspace(-1, 1, 100), 1 / np.arange(1.0, 200), np.hanning(64)),
    np.arange(2**16, dtype=np.uint16).view(jnp.bfloat16),
    *(other.astype(x) for x in (jnp.bfloat16, jnp.float16, jnp.float8_e4m3fn)),
    head_of().kernel_for_other_records(),
  ]
  training._releases.check_declared('frozen', tree, [])


def test_no_table_of_positions_is_taken_for_a_release():
  """Frequencies are geometric sequences, of which some have whole steps."""
  whole = 2.0 ** (7 / _identity._POINTS)
  for base in (500.0, 1e4, 1e5, 1.6e5, 5e5, 1e6, 1e7, 10.0, 1e3, 2.0**8):
    for size in (3, 4, 8, 16, 20, 32, 40, 48, 56, 64, 128, 256):
      for table in (
        base ** -(np.arange(size) / size),
        base ** -(np.arange(size) / (size - 1)),
        whole ** -np.arange(size),
      ):
        for dtype in (np.float64, np.float32, np.float16, jnp.bfloat16):
          twice = np.stack([table, table]).astype(dtype)
          assert not _identity.is_marked(twice), (base, size, dtype)


def test_no_array_of_random_numbers_is_taken_for_a_release():
  """Of any size and type, by the evidence that is asked for: exp(-18)."""
  rng = np.random.default_rng(0)
  for size in (4, 5, 8, 20, 50, 200, 1000):
    for dtype in (np.float32, np.float16, jnp.bfloat16, jnp.float8_e4m3fn):
      for x in rng.normal(size=(30, size)) * 10.0 ** rng.uniform(
        -3, 3, (30, 1)
      ):
        assert not _identity.is_marked(x.astype(dtype))


def test_a_head_for_other_records_is_near_the_head():
  head = head_of()
  kernel = head.kernel_for_other_records()
  assert kernel.shape == head.kernel.shape
  np.testing.assert_allclose(kernel, head.kernel, rtol=9.12e-3)
  np.testing.assert_array_equal(kernel, head.kernel_for_other_records())


def test_a_head_is_found_wherever_a_training_meets_it():
  """Row by row of the attack: no route around `prior_releases`."""
  # Of four entries by a key that shows: of one in eight it would not.
  head = head_of(prng_key=3)
  kernel = jnp.resize(head.kernel, (6, 4))  # Fits the cases.
  frozen = {'weights': cases.FROZEN, 'head': kernel}

  def loss(params, frozen, x, y):
    weights = frozen['weights'] + frozen['head']
    return cases.loss(params, weights, x, y)

  def closing(params, frozen, x, y):
    return cases.loss(params, frozen + kernel, x, y)

  make = functools.partial(cases.make, optax.sgd(0.1))
  kept = {'loss': loss}
  for release, options, weights, message in (
    (head, kept, frozen, None),
    (None, kept, frozen, r"frozen\['head'\]"),
    (head, {'loss': closing}, cases.FROZEN, None),
    (None, {'loss': closing}, cases.FROZEN, 'the constants of loss'),
  ):
    declared = (
      [] if release is None else [dataclasses.replace(release, kernel=kernel)]
    )
    private = make(prior_releases=declared, **options)
    if message is None:
      cases.trained(private, frozen=weights)
      continue
    with pytest.raises(ValueError, match=message):
      cases.trained(private, frozen=weights)
  # Weights that are exchanged on the way are looked at again.
  private = make(loss=loss)
  state = private.init(cases.PARAMS)
  batches = iter(private.batches(state, cases.DATA))
  ordinary = frozen | {'head': jnp.ones((6, 4))}
  state = private.step(state, next(batches), ordinary)
  with pytest.raises(ValueError, match=r"frozen\['head'\]"):
    private.step(state, next(batches), frozen)
  # Parameters, when the training is made, and when it begins if it was made of
  # shapes.
  params = cases.PARAMS | {'head': head.kernel[:4, 0]}
  with pytest.raises(ValueError, match=r"params\['head'\]"):
    make(params=params)
  with pytest.raises(ValueError, match=r"params\['head'\]"):
    make().init(params)
  column = dataclasses.replace(head, kernel=params['head'])
  make(prior_releases=[column]).init(params)


def test_a_release_object_among_the_weights_is_known_by_its_digest():
  metric = contrib.InputMetric(
    {'q': jnp.eye(3, 1)}, {'q': jnp.ones(1)}, 5.0, 6, 9, None, False, 'd', 'k'
  )
  check = training._releases.check_declared
  with pytest.raises(ValueError, match=r"frozen\['metric'\]"):
    check('frozen', {'metric': metric}, [MEANS])
  check('frozen', {'metric': metric}, [metric])


def test_releases_are_told_apart_by_values_and_by_key():
  one, again = head_of(prng_key=3), head_of.__wrapped__(prng_key=3)
  assert one.digest == again.digest
  assert one.key_digest == again.key_digest
  # The key alone: fewer records, other values, the same noise.
  fewer = head_of(prng_key=3, rows=cases.N - 1)
  assert fewer.digest != one.digest
  assert fewer.key_digest == one.key_digest
  # Another kind of release has noise of its own from one key.
  means = head_of(heads.class_means, prng_key=3)
  assert means.key_digest != one.key_digest
  fresh = [head_of.__wrapped__() for _ in range(2)]
  assert len({x.key_digest for x in fresh} | {one.key_digest}) == 3
  assert len({x.digest for x in fresh}) == 2
  # Seeds are the same key in every form that a key may be given in.
  typed = head_of.__wrapped__(prng_key=jax.random.key(3))
  assert typed.key_digest == one.key_digest
  make = functools.partial(cases.make, optax.sgd(0.1))
  make(prior_releases=[one, means])
  with pytest.raises(
    ValueError, match=r'\[0\] \(LinearHead\) and .*\[1\].* are one release'
  ):
    make(prior_releases=[one, again])
  with pytest.raises(
    ValueError, match=r'\[1\] \(LinearHead\) and .*\[2\].* noise of one key'
  ):
    make(prior_releases=[means, one, fewer])
  assert one.key_digest not in repr(one)


def test_digests_outlive_what_is_done_to_a_release():
  head = head_of()
  for other in (
    pickle.loads(pickle.dumps(head)),
    jax.tree.map(lambda x: 2 * x, head),
    jax.device_put(head),
    jax.jit(lambda x: x)(head),
    jax.tree.unflatten(jax.tree.structure(head), jax.tree.leaves(head)),
  ):
    assert (other.digest, other.key_digest) == (head.digest, head.key_digest)


def test_a_key_of_a_training_shares_no_noise_with_a_release_of_it(monkeypatch):
  """One given key for all: each draws from a key of its own."""
  used = []
  add_noise = _lattice.add_noise

  def spy(key, *args):
    used.append(tuple(np.asarray(x).item() for x in _randomness.key_words(key)))
    return add_noise(key, *args)

  monkeypatch.setattr(_lattice, 'add_noise', spy)
  zeros = np.zeros((1, 4), np.float32)
  options = {'noise_multiplier': 1.0, 'dataset_size': 1, 'prng_key': 7}
  heads.class_means([(zeros, [0])], num_classes=1, **options)
  for form in ('mean', 'second_moment'):
    contrib.input_metric([{'x': zeros}], form=form, **options)
  key = _randomness.resolve_key('key', 7, (), words=4)
  for _ in range(3):  # As a privatizer does, from step to step.
    key, drawn = _randomness.split(key)
    used.append(tuple(np.asarray(jax.random.key_data(drawn)).tolist()))
  assert len(set(used)) == len(used) == 6


def test_an_optimizer_is_told_the_constants_of_the_training():
  told = {}

  def taking(l2_clip_norm, noise_multiplier, expected_batch_size, steps):
    told.update(
      l2_clip_norm=l2_clip_norm,
      noise_multiplier=noise_multiplier,
      expected_batch_size=expected_batch_size,
      steps=steps,
    )
    return prism_optax.prism(0.1, **told)

  cases.make(taking, l2_clip_norm=2.0, noise_multiplier=1.5)
  assert told['noise_multiplier'] == pytest.approx(1.5)
  assert told['l2_clip_norm'] == 2.0
  assert told['expected_batch_size'] == cases.B
  assert told['steps'] == 3


@pytest.mark.slow
def test_a_small_target_is_met():
  private = cases.make(
    optax.sgd(0.1), noise_multiplier=None, target_epsilon=0.2
  )
  assert 0.199 < private.epsilon() <= 0.2


@pytest.mark.parametrize('follows', [False, True])
def test_a_statement_counts_every_entry_that_got_noise(follows, monkeypatch):
  counted = []

  def statement(*args, entries, **options):
    counted.append(entries)
    return ''

  clipping = training.QuantileClipping(quantile=0.5) if follows else None
  private = cases.make(
    optax.sgd(0.1), prior_releases=[MEANS], clipping=clipping
  )
  monkeypatch.setattr(accounting, 'privacy_statement', statement)
  private.statement()
  private.statement(private.init(cases.PARAMS), stop_was_fixed=True)
  each = 4 + 6 * 2 + 2 * 4 + follows  # A quantile's fraction is one more.
  assert counted == [3 * each + MEANS.entries, MEANS.entries]


@pytest.mark.parametrize(
  ('releases', 'message'),
  [
    ([GaussianDpEvent(1.0)], 'GaussianDpEvent without event, entries'),
    (
      [
        types.SimpleNamespace(
          event=GaussianDpEvent(1.0),
          entries=1,
          dataset_size=cases.N,
          seeded=False,
          digest='values',
          key_digest='key',
        )
      ],
      'pytree of arrays, got SimpleNamespace',
    ),
    ([made_up(dataset_size=7)], 'LinearHead of 7 for dataset_size'),
    ([made_up(digest='')], r"prior_releases\[0\] to have a digest.*digest=''"),
    ([MEANS, made_up(key_digest=None)], r'\[1\] to have a key_digest.*=None'),
  ],
)
def test_releases_that_do_not_fit(releases, message):
  with pytest.raises(ValueError, match=message):
    cases.make(optax.sgd(0.1), prior_releases=releases)
