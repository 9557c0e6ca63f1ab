"""What was released before the training, and the head of class means."""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.stats
from dp_accounting import ComposedDpEvent, GaussianDpEvent

from prism_optax import _lattice, _sums_of_records, accounting, heads, lora
from tests.training import problem

N, D, K = 300, 6, 3
_rng = np.random.default_rng(0)
LABELS = _rng.integers(K, size=N)
# Lengths of many sizes: a record's direction is what counts.
FEATURES = np.float32(
  (_rng.normal(size=(N, D)) + 2 * np.eye(K, D)[LABELS] + 1)
  * 10.0 ** _rng.uniform(-30, 15, (N, 1))
)
release = functools.partial(
  heads.class_means, num_classes=K, dataset_size=N, prng_key=1
)


def directions():
  x = np.float64(FEATURES)
  return x / np.linalg.norm(x, axis=1, keepdims=True)


def test_columns_are_the_directions_of_the_class_means():
  means = release([(FEATURES, LABELS)], noise_multiplier=0.0)
  columns = directions().T @ np.eye(K)[LABELS]
  columns /= np.linalg.norm(columns, axis=0)
  expected = columns - columns.mean(1, keepdims=True)
  np.testing.assert_allclose(means.kernel, expected, atol=1e-6)
  assert means.entries == D * K
  right = (directions() @ np.float64(means.kernel)).argmax(1) == LABELS
  assert right.mean() > 0.85


def test_the_same_bits_in_any_batches():
  """Also with padding, labels of no class and features that are not finite."""
  whole = release([(FEATURES, LABELS)], noise_multiplier=2.0)
  # Padding counts as records, which change nothing here but their number.
  odd = np.ones((4, D), np.float32)
  odd[0, 0], odd[1, 2], odd[3] = np.nan, np.inf, 0.0
  parts = [
    (FEATURES[rows], LABELS[rows]) for rows in (slice(200, None), slice(200))
  ]
  found = release(
    [*parts, (odd, np.array([0, 1, -1, 2]))],
    noise_multiplier=2.0,
    dataset_size=N + 4,
  )
  np.testing.assert_array_equal(found.kernel, whole.kernel)
  other = release([(FEATURES, LABELS)], noise_multiplier=2.0, prng_key=2)
  assert not np.array_equal(other.kernel, whole.kernel)


def test_one_key_gives_each_kind_of_release_its_own_noise(monkeypatch):
  released = []
  add_noise = _lattice.add_noise

  def spy(*args):
    released.append(np.ravel(next(iter(add_noise(*args).values()))))
    return add_noise(*args)

  monkeypatch.setattr(_lattice, 'add_noise', spy)
  options = {'noise_multiplier': 1.0, 'dataset_size': 1, 'prng_key': 7}
  zeros = np.zeros((1, 4), np.float32)
  means = heads.class_means([(zeros, np.array([0]))], num_classes=1, **options)
  metrics = [
    lora.input_metric([{'x': zeros}], form=form, **options)
    for form in ('second_moment', 'mean')
  ]
  assert len({x[0] for x in released}) == 3
  assert means.seeded
  assert metrics[0].seeded
  del options['prng_key']
  assert not lora.input_metric([{'x': zeros}], **options).seeded


@pytest.mark.parametrize('label', range(K))
def test_a_record_adds_one_to_its_class(label):
  """And no class of few records has a long column made of noise."""
  row = np.eye(1, D, dtype=np.float32) * 1e30
  means = release([(row, np.array([label]))], noise_multiplier=0.0)
  expected = (np.eye(K)[label] - 1 / K) / heads._FEWEST
  np.testing.assert_allclose(means.kernel[0], expected, rtol=1e-6)
  np.testing.assert_array_equal(means.kernel[1:], 0)


@pytest.mark.parametrize('sigma', [0.5, 20.0])
def test_every_entry_gets_the_noise(sigma, monkeypatch):
  released = []
  release_sums = _sums_of_records.release

  def spy(*args, **options):
    released.append(release_sums(*args, **options)['sums'])
    return {'sums': released[-1]}

  monkeypatch.setattr(_sums_of_records, 'release', spy)
  for _ in range(2):
    means = heads.class_means(
      [(np.zeros((1, 60), np.float32), np.array([0]))],
      num_classes=30,
      noise_multiplier=sigma,
      dataset_size=1,
    )
  noise = np.float64(released[0]).ravel() / sigma
  assert means.entries == noise.size == 60 * 30
  assert scipy.stats.kstest(noise, 'norm').pvalue > 1e-3
  assert not np.array_equal(*released)
  assert means.event == GaussianDpEvent(sigma)


MEANS = heads.ClassMeans(jnp.ones((2, 2)), 5.0, 4, problem.N)


def test_a_training_accounts_for_what_came_before():
  make = functools.partial(problem.make, optax.sgd(0.1))
  private = make(also=[MEANS, MEANS])
  events = [make().event(), MEANS.event, GaussianDpEvent(5.0)]
  assert private.event() == ComposedDpEvent(events)
  assert private.epsilon(0) == pytest.approx(
    accounting.epsilon(ComposedDpEvent(events[1:]), 1e-4), rel=1e-6
  )
  assert private.statement().endswith(
    '3 of 3 steps and 2 releases before; VOID for all who know prng_key'
  )
  # Noise that somebody knows protects from nobody who does, whose ever it is.
  seeded = dataclasses.replace(MEANS, seeded=True)
  for means, void in ((MEANS, False), (seeded, True)):
    statement = make(also=[means], prng_key=None).statement()
    assert ('VOID' in statement) is void
  # After other releases it is another run.
  state = private.init(problem.PARAMS)
  other = heads.ClassMeans(jnp.zeros((2, 2)), 5.0, 4, problem.N)
  with pytest.raises(ValueError, match='state of this training'):
    make(also=[MEANS, other]).adapters(state)


@pytest.mark.parametrize(
  ('also', 'message'),
  [
    ([GaussianDpEvent(1.0)], 'GaussianDpEvent without event, entries'),
    (
      [
        types.SimpleNamespace(
          event=GaussianDpEvent(1.0),
          entries=1,
          dataset_size=problem.N,
          seeded=False,
        )
      ],
      'pytree of arrays, got SimpleNamespace',
    ),
    (
      [heads.ClassMeans(jnp.ones((2, 2)), 5.0, 4, 7)],
      'ClassMeans of 7 for dataset_size',
    ),
  ],
)
def test_releases_that_do_not_fit(also, message):
  with pytest.raises(ValueError, match=message):
    problem.make(optax.sgd(0.1), also=also)


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    ({'batches': []}, 'at least one'),
    ({'batches': [(FEATURES, LABELS)] * 2}, '600 records for dataset_size=300'),
    # Records of fewer users: not theirs.
    ({'dataset_size': 299}, '300 records for dataset_size=299'),
    ({'batches': [(FEATURES, LABELS[1:])]}, r'labels \(B,\)'),
    ({'batches': [(FEATURES, LABELS * 1.0)]}, 'integer'),
    ({'batches': [(FEATURES[0], LABELS)]}, r'features \(B, d\)'),
    (
      {'batches': [(FEATURES[:9], LABELS[:9]), (FEATURES[:9, 1:], LABELS[:9])]},
      'the same in all batches',
    ),
    ({'num_classes': 0}, 'num_classes'),
    ({'noise_multiplier': -1.0}, 'noise_multiplier'),
    ({'dataset_size': 0}, 'dataset_size'),
    ({'prng_key': -1}, 'prng_key'),
  ],
)
def test_bad_arguments(change, message):
  arguments = {'batches': [(FEATURES, LABELS)], 'noise_multiplier': 1.0}
  arguments |= change
  with pytest.raises(ValueError, match=message):
    release(arguments.pop('batches'), **arguments)


def test_it_is_a_pytree():
  means = release([(FEATURES, LABELS)], noise_multiplier=1.0)
  kernel = jax.jit(lambda m: m.kernel * 2)(means)
  np.testing.assert_array_equal(kernel, means.kernel * 2)
