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

from prism_optax import accounting, contrib, training
from prism_optax.contrib import heads
from tests import cases
from tests.core import seams
from tests.core.identity_test import head_of

make = functools.partial(cases.make, optax.sgd(0.1))
# Nothing is sampled: Gaussians alone are accounted for in no time.
unsampled = functools.partial(make, expected_batch_size=cases.N)


def made_up(value=1.0, digest='values', key_digest='key', **changes):
  """A release that was never made: what a training asks of one."""
  kernel = jnp.full((2, 2), value)
  head = heads.LinearHead(
    kernel, 5.0, 4, cases.N, seeded=False, digest=digest, key_digest=key_digest
  )
  return dataclasses.replace(head, **changes)


MEANS = made_up()
OTHER = made_up(0.0, 'other values', 'other key')


@pytest.mark.slow
def test_a_training_accounts_for_what_came_before():
  private = unsampled(prior_releases=[MEANS, OTHER])
  events = [unsampled().event(), MEANS.event, GaussianDpEvent(5.0)]
  assert private.event() == ComposedDpEvent(events)
  assert private.epsilon(0) == pytest.approx(
    accounting.epsilon(ComposedDpEvent(events[1:]), 1e-4), rel=1e-6
  )
  assert private.statement().endswith(
    '3 of 3 steps and 2 prior releases; no guarantee against anyone who knows'
    ' prng_key'
  )
  # Noise of either kind hides nothing from somebody who knows its key.
  for seeded in (False, True):
    means = dataclasses.replace(MEANS, seeded=seeded)
    told = unsampled(prior_releases=[means], prng_key=None).statement()
    assert ('no guarantee' in told) is seeded
  # After other releases it is another run: other values, or other noise.
  state = private.init(cases.PARAMS)
  for change in ({'digest': 'third'}, {'key_digest': 'third'}):
    third = dataclasses.replace(OTHER, **change)
    with pytest.raises(ValueError, match='state of this training'):
      unsampled(prior_releases=[MEANS, third]).adapters(state)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Scaled:
  """Another's change of variables: nothing here has heard of its class."""

  scale: jax.Array
  event = GaussianDpEvent(5.0)
  entries, dataset_size, seeded = 1, cases.N, False
  digest, key_digest = 'values of another', 'key of another'

  def to_params(self, variables):
    # Another thing for a tree of many copies.
    return jax.tree.map(lambda x: self.scale * x[::-1], variables)


@cases.fast_first('batched', [False], [False, True])
def test_any_object_with_the_attributes_is_a_change_of_variables(batched):
  change = Scaled(jnp.float32(2))
  private = unsampled(change_of_variables=change)
  assert private.event() == ComposedDpEvent([unsampled().event(), change.event])
  assert ' steps and a change of variables;' in private.statement()
  state = private.init(cases.PARAMS)
  cases.assert_same_bits(
    private.adapters(state), change.to_params(cases.PARAMS)
  )
  # Of other numbers it is another run, whatever its digest says.
  with pytest.raises(ValueError, match='state of this training'):
    unsampled(change_of_variables=Scaled(jnp.float32(3))).adapters(state)

  options = {'loss': cases.losses, 'batched_loss': True} if batched else {}
  found = cases.by_keys_alone(unsampled(change_of_variables=change, **options))

  def loss(variables, *data):
    return cases.loss(change.to_params(variables), *data)

  # One program, but for where it was written: rounding at most.
  wanted = cases.by_keys_alone(unsampled(loss=loss))
  cases.assert_close(found, wanted, atol=1e-6, rtol=1e-5)
  # A release that changes nothing is none, and one of both is one release.
  with pytest.raises(ValueError, match='LinearHead without to_params'):
    make(change_of_variables=MEANS)
  with pytest.raises(ValueError, match='are one release'):
    make(change_of_variables=change, prior_releases=[change])


def test_a_head_for_other_records_is_near_the_head():
  head = head_of()
  kernel = head.kernel_for_other_records()
  np.testing.assert_allclose(kernel, head.kernel, rtol=9.12e-3)
  np.testing.assert_array_equal(kernel, head.kernel_for_other_records())


@pytest.mark.slow
def test_a_head_is_found_wherever_a_training_meets_it(tmp_path):
  """No route around `prior_releases`; a file keeps what a head is known by."""
  np.save(tmp_path / 'head.npy', head_of().kernel)
  # Of four entries by a key that shows: of one in eight it would not.
  column = jnp.asarray(head_of(prng_key=3).kernel[:4, 0])
  kernel = jnp.resize(np.load(tmp_path / 'head.npy'), (6, 4))
  declared = [dataclasses.replace(head_of(), kernel=kernel)]
  frozen = {'weights': cases.FROZEN, 'head': kernel}

  def loss(params, frozen, x, y):
    weights = frozen['weights'] + frozen['head']
    return cases.loss(params, weights, x, y)

  def closing(params, frozen, x, y):
    return cases.loss(params, frozen + kernel, x, y)

  for function, weights, message in (
    (loss, frozen, r"frozen\['head'\]"),
    (closing, cases.FROZEN, 'the constants of loss'),
  ):
    cases.trained(make(loss=function, prior_releases=declared), frozen=weights)
    with pytest.raises(ValueError, match=message):
      cases.trained(make(loss=function), frozen=weights)
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
  params = cases.PARAMS | {'head': column}
  for call in (lambda: make(params=params), lambda: make().init(params)):
    with pytest.raises(ValueError, match=r"params\['head'\]"):
      call()
  own = dataclasses.replace(head_of(prng_key=3), kernel=column)
  make(prior_releases=[own]).init(params)


def fresh(**options):
  options |= {'noise_multiplier': 1.0, 'dataset_size': cases.N}
  rows = options.pop('rows', 40)
  x = np.random.default_rng(1).normal(size=(rows, 3))
  make = options.pop('make', heads.ridge)
  return make([(x, np.arange(rows) % 2)], num_classes=2, **options)


def test_releases_are_told_apart_by_values_and_by_key():
  one, again = fresh(prng_key=3), fresh(prng_key=3)
  assert (one.digest, one.key_digest) == (again.digest, again.key_digest)
  # The key alone: fewer records, other values, the same noise.
  fewer = fresh(prng_key=3, rows=39)
  assert fewer.digest != one.digest
  assert fewer.key_digest == one.key_digest
  # Another kind of release has noise of its own from one key.
  means = fresh(make=heads.class_means, prng_key=3)
  assert means.key_digest != one.key_digest
  unseeded = [fresh() for _ in range(2)]
  assert len({x.key_digest for x in unseeded} | {one.key_digest}) == 3
  assert len({x.digest for x in unseeded}) == 2
  # Seeds are the same key in every form that a key may be given in.
  assert fresh(prng_key=jax.random.key(3)).key_digest == one.key_digest
  make(prior_releases=[one, means])
  for releases, message in (
    ([one, again], r'\[0\] \(LinearHead\) and .*\[1\].* are one release'),
    ([means, one, fewer], r'\[1\] \(LinearHead\) and .*\[2\].* of one key'),
  ):
    with pytest.raises(ValueError, match=message):
      make(prior_releases=releases)
  assert one.key_digest not in repr(one)
  # Digests outlive what is done to a release.
  for other in (
    pickle.loads(pickle.dumps(one)),
    jax.tree.map(lambda x: 2 * x, one),
    jax.device_put(one),
    jax.jit(lambda x: x)(one),
    jax.tree.unflatten(jax.tree.structure(one), jax.tree.leaves(one)),
  ):
    assert (other.digest, other.key_digest) == (one.digest, one.key_digest)


@pytest.mark.slow
def test_a_key_of_a_training_shares_no_noise_with_a_release_of_it():
  """One given key for all: each draws from a key of its own."""
  zeros = np.zeros((1, 4), np.float32)
  options = {'noise_multiplier': 1.0, 'dataset_size': 1, 'prng_key': 7}
  with seams.noise_replaced(original := seams.Spy()):
    for make_head in (heads.class_means, heads.ridge):
      make_head([(zeros, [0])], num_classes=1, **options)
    for form in ('mean', 'second_moment'):
      contrib.input_metric([{'x': zeros}], form=form, **options)
  used = original.keys + seams.keys_of_steps(7, 3)
  assert len(set(used)) == len(used) == 7


@pytest.mark.parametrize('follows', [False, True])
def test_every_entry_that_got_noise_is_counted(follows, monkeypatch):
  counted = []

  def statement(*args, entries, **options):
    counted.append(entries)
    return ''

  def calibrated(*args, entries, prior_events, **options):
    counted.append(entries)
    assert list(prior_events) == [MEANS.event]
    return 1.0

  clipping = training.QuantileClipping(quantile=0.5) if follows else None
  monkeypatch.setattr(accounting, 'calibrate_noise_multiplier', calibrated)
  private = make(
    prior_releases=[MEANS], clipping=clipping, prng_key='chacha20',
    noise_multiplier=None, target_epsilon=3.0,
  )  # fmt: skip
  for name in ('privacy_statement', 'epsilon'):
    monkeypatch.setattr(accounting, name, statement)
  state = private.init(cases.PARAMS)
  private.statement()
  private.statement(state, stop_was_fixed=True)
  private.epsilon()
  private.epsilon(0)
  each = 4 + 6 * 2 + 2 * 4 + follows  # A quantile's fraction is one more.
  whole = 3 * each + MEANS.entries
  assert counted == [whole, whole, MEANS.entries, whole, MEANS.entries]


NO_TREE = types.SimpleNamespace(
  event=GaussianDpEvent(1.0), entries=1, dataset_size=cases.N, seeded=False,
  digest='values', key_digest='key',
)  # fmt: skip


@pytest.mark.parametrize(
  ('releases', 'message'),
  [
    ([GaussianDpEvent(1.0)], 'GaussianDpEvent without event, entries'),
    ([NO_TREE], 'pytree of arrays, got SimpleNamespace'),
    ([made_up(dataset_size=7)], 'LinearHead of 7 for dataset_size'),
    ([made_up(digest='')], r"prior_releases\[0\] to have a digest.*digest=''"),
    ([MEANS, made_up(key_digest=None)], r'\[1\] to have a key_digest.*=None'),
  ],
)
def test_releases_that_do_not_fit(releases, message):
  with pytest.raises(ValueError, match=message):
    make(prior_releases=releases)
