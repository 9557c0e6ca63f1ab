"""Heads of one release: what records add, the noise, and what is refused."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prism_optax.contrib import heads
from tests.contrib import cases
from tests.core import seams

N, D, K = 300, 6, 3
_rng = np.random.default_rng(0)
LABELS = _rng.integers(K, size=N)
# Lengths of many sizes: a record's direction is what counts.
FEATURES = np.float32(
  (_rng.normal(size=(N, D)) + 2 * np.eye(K, D)[LABELS] + 1)
  * 10.0 ** _rng.uniform(-30, 15, (N, 1))
)
release = functools.partial(
  heads.class_means, num_classes=K, dataset_size=N, prng_key=0
)


def assert_kernel(found, expected):
  """Half a step of the grid is 2^(1 / 76.4): 0.912 %."""
  np.testing.assert_allclose(found, expected, rtol=9.12e-3, atol=1e-6)


def directions():
  x = np.float64(FEATURES)
  return x / np.linalg.norm(x, axis=1, keepdims=True)


@pytest.mark.parametrize('sigma', [0.0, 9.0])
def test_columns_are_the_directions_of_the_class_means(sigma):
  """Relieved of the length of the noise."""
  with seams.one_shot_sums() as released:
    parts = zip(
      *(np.split(x, [N // 3]) for x in (FEATURES, LABELS)), strict=True
    )
    means = release(parts, noise_multiplier=sigma)
  sums = released[0]['sums']
  squares = np.sum(sums**2, 0) - D * sigma**2
  columns = sums / np.sqrt(np.maximum(squares, 20**2))
  assert_kernel(means.kernel, columns - columns.mean(1, keepdims=True))
  assert means.entries == D * K
  if not sigma:
    exact = directions().T @ np.eye(K)[LABELS]
    np.testing.assert_allclose(sums, exact, atol=1e-3)
    right = (directions() @ np.float64(means.kernel)).argmax(1) == LABELS
    assert right.mean() > 0.85


@pytest.mark.parametrize('sigma', [0.0, 3.0, 90.0])
def test_ridge_is_the_solution_of_its_equations(sigma):
  """Dense, in float64, with its noise: what was released is read back."""
  scale = 4.0 if sigma else 1.0
  options = {'logit_scale': scale} if sigma else {}
  with seams.one_shot_sums() as found:
    head = heads.ridge(
      [(FEATURES, LABELS)], num_classes=K, noise_multiplier=sigma,
      dataset_size=N, prng_key=1, **options,
    )  # fmt: skip
  (released,) = found
  noisy = np.zeros((D, D))
  upper = np.triu_indices(D)
  share = 1 / (1 + (K / 10) ** 0.5)
  noisy[upper] = released['moment'] / share**0.5
  noisy = (noisy + noisy.T) / np.where(np.eye(D), 2, 2**0.5)
  # The noise is on all of what records add: both, one in norm.
  x, chosen = directions(), np.eye(K)[LABELS]
  sums = released['sums'] / (1 - share) ** 0.5
  wrong = (noisy - x.T @ x)[upper], sums - x.T @ chosen
  if sigma:  # Of standard deviation 1.0 sigma in the mean of both, and 1.7.
    assert all(0.7 < np.std(x) / sigma < 2.7 for x in wrong)
  else:
    np.testing.assert_allclose(np.concatenate(wrong, None), 0, atol=1e-3)
  edge = (2 * D) ** 0.5 * sigma / share**0.5
  values, vectors = np.linalg.eigh(noisy)
  kept = [(v**2 - edge**2) ** 0.5 if v > edge else 0 for v in values]
  inverse = vectors @ np.diag(1 / (np.array(kept) + 1 + edge)) @ vectors.T
  expected = inverse @ sums
  expected -= expected.mean(1, keepdims=True)
  # The noise of a class is in its column, less its share of the mean.
  variance = sigma**2 / (1 - share) * (1 - 1 / K)
  squares = np.sum(expected**2, 0)
  of_noise = variance * np.trace(inverse @ inverse)
  lengths = np.sqrt(np.maximum(squares - of_noise, squares / 4))
  expected /= lengths
  expected -= expected.mean(1, keepdims=True)
  # Less what it adds on average to a logit of its class, which it is in twice.
  logits = np.sum(expected * sums) / N
  logits -= variance * np.trace(inverse) * np.sum(1 / lengths) / N
  least = 0.1 * np.linalg.norm(expected, axis=0).mean()
  assert (logits < least) == (sigma == 90)
  expected *= 2 * np.log(K) / max(logits, least) / scale
  assert_kernel(head.kernel, expected)
  if sigma < 90:  # So is the true mean.
    own = scale * np.sum(head.kernel * (x.T @ chosen)) / N
    np.testing.assert_allclose(own, 2 * np.log(K), rtol=0.01 + 0.05 * sigma)
  assert head.entries == D * (D + 1) // 2 + D * K


@pytest.mark.parametrize('label', range(K))
def test_a_record_adds_one_to_its_class(label):
  """And no class of few records has a long column made of noise."""
  row = np.eye(1, D, dtype=np.float32) * -1e30
  means = release([(row, np.array([label]))], noise_multiplier=0.0)
  expected = (np.eye(K)[label] - 1 / K) / 20
  assert_kernel(-means.kernel[0], expected)
  np.testing.assert_array_equal(means.kernel[1:], 0)


@pytest.mark.parametrize('make', [heads.class_means, heads.ridge])
@pytest.mark.parametrize('sigma', [0.5, 20.0])
def test_every_entry_gets_the_noise(sigma, make):
  zeros = [(np.zeros((1, 60), np.float32), np.array([0]))]
  entries = 60 * 30 + (make is heads.ridge) * 30 * 61
  of_zeros = functools.partial(make, zeros, num_classes=30)
  cases.assert_noisy(of_zeros, sigma, entries)
  # One class leaves nothing to tell.
  alone = make(zeros, num_classes=1, noise_multiplier=sigma, dataset_size=1)
  np.testing.assert_array_equal(alone.kernel, 0)


class Strange:
  """A label of somebody's own making."""

  def __index__(self):
    raise RuntimeError('one record could tell that it is there')


def test_a_label_that_is_no_class_adds_nothing():
  """In a list each record has a type of its own: nothing tells which."""
  rows = np.ones((3, D), np.float32) * np.arange(1, 4)[:, None]
  rows[1] = -5
  make = functools.partial(release, noise_multiplier=0.0)
  wanted = make([(rows[::2], [0, 2])]).kernel  # Without the record.
  for label in (
    *(-1, -(2**31), K, 2**31, 2**32, 2**32 + 1, 2**63, 2**64 + 1, 10**400),
    *(1.0, np.nan, np.inf, np.float32(1), '1', 'text', b'1', None, [1], (), {}),
    *(np.ones(3, int), np.datetime64('now'), object(), complex(1), Strange()),
  ):
    for labels in ([0, label, 2], (0, label, 2)):
      np.testing.assert_array_equal(make([(rows, labels)]).kernel, wanted)
    of_objects = np.empty(3, object)
    of_objects[:] = [0, label, 2]
    np.testing.assert_array_equal(make([(rows, of_objects)]).kernel, wanted)
  # What Python takes for an index is a class, of any type of integers.
  wanted = make([(rows, [0, 1, 2])]).kernel
  for label in (True, np.int8(1), np.uint64(1), jnp.ones((), jnp.int32)):
    np.testing.assert_array_equal(make([(rows, [0, label, 2])]).kernel, wanted)
  # An array has one type, in which a class of 300 may not exist.
  for dtype in (np.uint8, np.int8, np.int64, np.uint64, np.uint32):
    for array in (np.asarray, jnp.asarray):
      labels = array(np.array([0, 1, 2], dtype))
      means = make([(rows, labels)], num_classes=300)
      assert np.count_nonzero(np.abs(means.kernel).max(0) > 0.01) == 3
  for labels in ([0, 2**32 + 1, 2], [0, 2**63 - 1, 2]):
    for dtype in (np.int64, np.uint64):
      found = make([(rows, np.array(labels, dtype))]).kernel
      np.testing.assert_array_equal(found, make([(rows, [0, -1, 2])]).kernel)


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    ({'batches': []}, 'at least one'),
    ({'batches': [(FEATURES, LABELS)] * 2}, '600 records for dataset_size=300'),
    # Records of fewer users: not theirs.
    ({'dataset_size': 299}, '300 records for dataset_size=299'),
    ({'batches': [(FEATURES, LABELS[1:])]}, r'labels \(B,\)'),
    # A type of the whole batch is public.
    ({'batches': [(FEATURES, LABELS * 1.0)]}, 'integers, got .* float64'),
    ({'batches': [(FEATURES, LABELS > 0)]}, 'integers, got .* bool'),
    ({'batches': [(FEATURES, LABELS.astype(str))]}, 'integers, got .* <U21'),
    ({'batches': [(FEATURES.tolist(), LABELS)]}, 'features .* got list'),
    ({'batches': [(FEATURES.astype(object), LABELS)]}, 'real .* object'),
    ({'batches': [(FEATURES * 1j, LABELS)]}, 'real .* complex'),
    ({'batches': [(FEATURES[0], LABELS)]}, r'features \(B, d\)'),
    (
      {'batches': [(FEATURES[:9], LABELS[:9]), (FEATURES[:9, 1:], LABELS[:9])]},
      'the same in all batches',
    ),
  ],
)
def test_bad_arguments(change, message):
  arguments = {'batches': [(FEATURES, LABELS)], 'noise_multiplier': 1.0}
  arguments |= change
  with pytest.raises(ValueError, match=message):
    release(arguments.pop('batches'), **arguments)


def test_it_is_a_pytree():
  views = map(memoryview, (FEATURES, LABELS))  # As good as arrays.
  means = release(
    [tuple(views)], noise_multiplier=np.float32(1), dataset_size=np.int64(N)
  )
  assert means.seeded
  assert type(means.noise_multiplier) is float
  assert type(means.dataset_size) is int
  # Numbers that float32 does not have are infinite, and nothing warns.
  huge = np.where(np.arange(N)[:, None] == 5, 1e300, np.float64(FEATURES))
  with warnings.catch_warnings(action='error'), jax.enable_x64(True):
    release([(huge, LABELS)], noise_multiplier=1.0)
  assert [x is means.kernel for x in jax.tree.leaves(means)] == [True]
  kernel = jax.jit(lambda m: m.kernel * 2)(means)
  np.testing.assert_array_equal(kernel, means.kernel * 2)
