"""The generator behind all noise: the right bits, the right law, everywhere."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from prism_optax import _randomness

SIZE = 400_000


def _draw(key, shape, dtype=jnp.float32):
  return _randomness.add_normal(key, jnp.zeros(shape, dtype), 1.0)


def test_blocks_are_those_of_threefry():
  """JAX's own generator gives the exclusive or of the two words of a block."""
  with jax.threefry_partitionable(True):
    key = jax.random.key(5, impl='threefry2x32')
    expected = jax.random.bits(key, (1000,), jnp.uint32)
  words = _randomness.threefry2x32(
    tuple(jax.random.key_data(key)),
    jnp.uint32(0),
    jnp.arange(1000, dtype='uint32'),
  )
  np.testing.assert_array_equal(words[0] ^ words[1], expected)


def test_known_answer():
  """The published vector for the key and counter of all ones (Random123)."""
  ones = jnp.uint32(0xFFFFFFFF)
  words = _randomness.threefry2x32((ones, ones), ones, ones)
  assert [hex(w) for w in words] == ['0x1cb996fc', '0xbb002be7']


@pytest.mark.parametrize('dtype', ['float32', 'float64'])
def test_law(dtype):
  with jax.enable_x64(dtype == 'float64'):
    draws = _draw(jax.random.key(0), (SIZE,), jnp.dtype(dtype))
  assert draws.dtype == dtype
  z = np.float64(draws)
  assert scipy.stats.kstest(z, 'norm').pvalue > 1e-3
  # Can fail: a scale or a shift that is off by a per cent.
  for wrong in (1.01 * z, 0.99 * z, z + 0.01):
    assert scipy.stats.kstest(wrong, 'norm').pvalue < 0.05
  # Moments: standard errors sqrt(var / SIZE), five of them.
  for power, mean, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
    error = abs(np.mean(z**power) - mean)
    assert error < 5 * np.sqrt(variance / SIZE), power
  # Tails: as many beyond 4 as there should be (Poisson, mean 25).
  expected = SIZE * 2 * scipy.stats.norm.sf(4)
  assert abs(np.sum(abs(z) > 4) - expected) < 4 * np.sqrt(expected)


def test_extreme_words_give_finite_numbers_far_out():
  words = jnp.array([0, 1, 2**29, 2**31 - 1, 2**31, 2**32 - 1], jnp.uint32)
  z = _randomness._from_words(*jnp.meshgrid(words, words))
  assert jnp.isfinite(z).all()
  np.testing.assert_allclose(
    jnp.abs(z).max(), np.sqrt(66 * np.log(2)), rtol=1e-6
  )


def test_angles_are_exact_to_rounding():
  """Against float64, for words all around the half circle."""
  second = jnp.arange(0, 2**32, 2**32 // 5000, dtype=jnp.uint32)
  z = np.float64(_randomness._from_words(jnp.full_like(second, 12345), second))
  radius = np.sqrt(-2 * np.log((12345 + 0.5) * 2.0**-32))
  angle = np.asarray(second).view(np.int32) * np.pi * 2.0**-32
  assert angle.min() < -1.57
  assert angle.max() > 1.57
  np.testing.assert_allclose(z, radius * np.sin(angle), atol=5e-7 * radius)


def test_radii_are_exact_to_rounding():
  """Against float64, for all sizes of words, and relatively for small radii."""
  words = [np.arange(2000), 2**32 - 1 - np.arange(200_000)]
  words += [np.geomspace(1, 2**32 - 1, 5000), np.arange(0, 2**32, 2**20)]
  first = jnp.asarray(np.concatenate(words).astype(np.uint32))
  # The angle of an int32 of 2^31 - 1, whose sine is one.
  z = _randomness._from_words(first, jnp.full_like(first, 2**31 - 1))
  # Words beyond 2^24 are rounded to 24 bits first.
  uniform = np.float64(np.asarray(first).astype(np.float32) + np.float32(0.5))
  exact = np.sqrt(-2 * np.log(uniform * 2.0**-32))
  np.testing.assert_allclose(np.float64(z), exact, rtol=5e-7)


def test_entries_and_leaves_are_independent():
  """No value twice, no correlation of leaves, shifted entries or keys."""
  like = {
    'a': jnp.zeros((300, 7)),
    'b': jnp.zeros((300, 7)),
    'c': jnp.zeros(()),
  }
  keys = jax.random.split(jax.random.key(1))
  a, b = (_randomness.add_normal(k, like, 1.0) for k in keys)
  arrays = [np.ravel(x) for tree in (a, b) for x in (tree['a'], tree['b'])]
  assert len(np.unique(np.concatenate(arrays))) > 0.999 * 4 * 2100
  arrays.append(np.roll(arrays[0], 1))
  correlations = np.corrcoef(arrays) - np.eye(5)
  assert np.max(np.abs(correlations)) < 5 / np.sqrt(2100)


def test_positions_count_every_entry_once():
  positions = _randomness._positions((3, 4, 5))
  np.testing.assert_array_equal(positions.ravel(), np.arange(60))
  assert _randomness._positions(()).shape == ()


@pytest.mark.parametrize('stddev', [0.0, 0.5, 3.0])
def test_noise_of_the_stddev_asked_for_is_added_to_what_is_there(stddev):
  tree = [jnp.full((50, 40), 7.0), jnp.full(2000, 5.0)]
  noisy = _randomness.add_normal(jax.random.key(4), tree, stddev)
  for x, y in zip(tree, noisy, strict=True):
    assert jnp.std(y - x) == pytest.approx(stddev, rel=0.1)
    assert abs(jnp.mean(y - x)) <= 5 * stddev / 2000**0.5


def test_a_leaf_does_not_depend_on_the_others():
  key = jax.random.key(2)
  x, y = jnp.zeros((2, 3)), jnp.zeros(9)
  both = _randomness.add_normal(key, [x, y], 1.0)
  np.testing.assert_array_equal(
    both[0], _randomness.add_normal(key, [x], 1.0)[0]
  )


@pytest.mark.parametrize('impl', ['rbg', 'unsafe_rbg', 'threefry2x32'])
def test_keys_of_any_generator(impl):
  z = _draw(jax.random.key(3, impl=impl), (1000,))
  assert scipy.stats.kstest(z, 'norm').pvalue > 1e-3


@pytest.mark.parametrize(
  ('struct', 'match'),
  [
    (jax.ShapeDtypeStruct((2,), jnp.bfloat16), 'float32 or float64'),
    (jax.ShapeDtypeStruct((2**16, 2**16), jnp.float32), 'fewer than 2\\^32'),
  ],
)
def test_what_it_does_not_draw_is_refused(struct, match):
  with pytest.raises(ValueError, match=match):
    _randomness.add_normal(jax.random.key(0), struct, 1.0)
