"""What was released before the training: heads, in statements and events."""

import dataclasses
import functools
import gc
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.stats
from dp_accounting import ComposedDpEvent, GaussianDpEvent

import prism_optax
from prism_optax import (
  _lattice,
  _sums_of_records,
  accounting,
  heads,
  lora,
  training,
)
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


def test_columns_are_relieved_of_the_length_of_the_noise(monkeypatch):
  released = []
  release_sums = _sums_of_records.release

  def spy(*args, **options):
    released.append(release_sums(*args, **options))
    return released[-1]

  monkeypatch.setattr(_sums_of_records, 'release', spy)
  means = release([(FEATURES, LABELS)], noise_multiplier=9.0)
  sums = np.float64(released[0]['sums'])
  squares = np.sum(sums**2, 0) - D * 9.0**2
  columns = sums / np.sqrt(np.maximum(squares, heads._FEWEST**2))
  expected = columns - columns.mean(1, keepdims=True)
  np.testing.assert_allclose(means.kernel, expected, atol=1e-6)


@pytest.mark.parametrize('sigma', [0.0, 3.0])
def test_ridge_is_the_solution_of_its_equations(sigma):
  """Dense, in float64, with its noise: what was released is read back."""
  released = {}
  release_sums = _sums_of_records.release
  with pytest.MonkeyPatch.context() as patch:

    def spy(*args, **options):
      released.update(release_sums(*args, **options))
      return released

    patch.setattr(_sums_of_records, 'release', spy)
    head = heads.ridge(
      [(FEATURES, LABELS)],
      num_classes=K,
      noise_multiplier=sigma,
      dataset_size=N,
      prng_key=1,
    )
  noisy = np.zeros((D, D))
  upper = np.triu_indices(D)
  noisy[upper] = np.float64(released['moment']) * 2**0.5
  noisy = (noisy + noisy.T) / np.where(np.eye(D), 2, 2**0.5)
  # The noise is on all of what records add: sums over sqrt(2).
  x, chosen = directions(), np.eye(K)[LABELS]
  sums = np.float64(released['sums']) * 2**0.5
  wrong = (noisy - x.T @ x)[upper], sums - x.T @ chosen
  if sigma:  # Of standard deviation 3.6 in the mean of the matrix, and 4.2.
    assert all(2 < np.std(x) < 6 for x in wrong)
  else:
    np.testing.assert_allclose(np.concatenate(wrong, None), 0, atol=1e-3)
  values, vectors = np.linalg.eigh(noisy)
  ridge = 1 + 0.5 * (2 * D) ** 0.5 * sigma * 2**0.5
  inverse = vectors @ np.diag(1 / (values.clip(0) + ridge)) @ vectors.T
  expected = inverse @ sums
  expected -= expected.mean(1, keepdims=True)
  expected /= np.linalg.norm(expected, axis=0).mean()
  np.testing.assert_allclose(head.kernel, expected, atol=1e-6)
  assert head.entries == D * (D + 1) // 2 + D * K


def test_ridge_sees_past_what_all_features_have_in_common():
  rng = np.random.default_rng(3)
  labels = rng.integers(K, size=3000)
  # A strong direction that tells little of the class, across those that do.
  features = rng.normal(size=(3000, 8))
  features += 6 * rng.normal(size=(3000, 1)) * [0, 1, -1, 1, 0, 0, 0, 0]
  features[np.arange(3000), labels + 1] += 3
  options = {'num_classes': K, 'dataset_size': 3000, 'prng_key': 1}
  right = {
    make: np.mean(
      np.argmax(
        features
        @ np.float64(
          make([(features, labels)], noise_multiplier=2.0, **options).kernel
        ),
        1,
      )
      == labels
    )
    for make in (heads.ridge, heads.class_means)
  }
  assert right[heads.ridge] > right[heads.class_means] + 0.05


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
  means, _ = (
    make([(zeros, np.array([0]))], num_classes=1, **options)
    for make in (heads.class_means, heads.ridge)
  )
  metrics = [
    lora.input_metric([{'x': zeros}], form=form, **options)
    for form in ('second_moment', 'mean')
  ]
  assert len({x[0] for x in released}) == 4
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


@pytest.mark.parametrize('make', [heads.class_means, heads.ridge])
@pytest.mark.parametrize('sigma', [0.5, 20.0])
def test_every_entry_gets_the_noise(sigma, make, monkeypatch):
  released = []
  release_sums = _sums_of_records.release

  def spy(*args, **options):
    sums = release_sums(*args, **options)
    released.append(np.concatenate([np.ravel(x) for x in sums.values()]))
    return sums

  monkeypatch.setattr(_sums_of_records, 'release', spy)
  for _ in range(2):
    means = make(
      [(np.zeros((1, 60), np.float32), np.array([0]))],
      num_classes=30,
      noise_multiplier=sigma,
      dataset_size=1,
    )
  noise = np.float64(released[0]) / sigma
  assert means.entries == noise.size
  assert noise.size == 60 * 30 + (make is heads.ridge) * 30 * 61
  assert scipy.stats.kstest(noise, 'norm').pvalue > 1e-3
  assert not np.array_equal(*released)
  assert means.event == GaussianDpEvent(sigma)


MEANS = heads.LinearHead(jnp.ones((2, 2)), 5.0, 4, problem.N)


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
  other = heads.LinearHead(jnp.zeros((2, 2)), 5.0, 4, problem.N)
  with pytest.raises(ValueError, match='state of this training'):
    make(also=[MEANS, other]).adapters(state)


def test_a_released_head_has_to_be_accounted_for():
  rows = FEATURES[: problem.N], LABELS[: problem.N]
  head = release([rows], noise_multiplier=1.0, dataset_size=problem.N)
  params = problem.PARAMS | {'head': head.kernel}
  make = functools.partial(problem.make, optax.sgd(0.1), params=params)
  make(also=[head])
  with pytest.raises(ValueError, match=r"params\['head'\] .*also=\[head\]"):
    make(also=[MEANS])
  # A copy says that it is of other records.
  make(params=problem.PARAMS | {'head': jnp.copy(head.kernel)})
  place = id(head.kernel)
  assert place in _sums_of_records._released
  del head, params, make
  gc.collect()
  assert place not in _sums_of_records._released


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

  problem.make(taking, l2_clip_norm=2.0, noise_multiplier=1.5)
  assert told['noise_multiplier'] == pytest.approx(1.5)
  assert told['l2_clip_norm'] == 2.0
  assert told['expected_batch_size'] == problem.B
  assert told['steps'] == 3


@pytest.mark.slow
def test_a_small_target_is_met():
  private = problem.make(
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
  private = problem.make(optax.sgd(0.1), also=[MEANS], clipping=clipping)
  monkeypatch.setattr(accounting, 'privacy_statement', statement)
  private.statement()
  private.statement(private.init(problem.PARAMS), stop_was_fixed=True)
  each = 4 + 6 * 2 + 2 * 4 + follows  # A quantile's fraction is one more.
  assert counted == [3 * each + MEANS.entries, MEANS.entries]


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
      [heads.LinearHead(jnp.ones((2, 2)), 5.0, 4, 7)],
      'LinearHead of 7 for dataset_size',
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
