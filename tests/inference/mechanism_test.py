"""Releases of hidden states, on device and host: clip, mask, noise.

More laws, of any states and masks: `tests/properties/inference_test.py`.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from prism_optax import inference

KEY = jax.random.key(7)
C = 0.75
# The many small operations take longer one by one.
compiled = jax.jit(
  inference.privatize_hidden_states,
  static_argnames=('l2_clip_norm', 'stddev', 'block_ndim'),
)


def on_host(hidden, key, **options):
  del key
  return inference.privatize_on_host(hidden, **options)


def clipped(hidden, privatize=compiled, **options):
  """What the mechanism adds its noise to."""
  found = privatize(hidden, KEY, l2_clip_norm=C, stddev=0.0, **options)
  return np.asarray(found, np.float64)


def oracle(hidden, axes=-1):
  """min(1, C / norm) times the state, in float64."""
  hidden = np.asarray(hidden, np.float64)
  norm = np.sqrt(np.sum(np.square(hidden), axis=axes, keepdims=True))
  return hidden * np.minimum(1, C / np.where(norm, norm, 1))


@pytest.mark.parametrize('block_ndim', [1, 2])
@pytest.mark.parametrize('dtype', [jnp.float32, jnp.bfloat16, jnp.float16])
def test_clip_agrees_with_the_dense_oracle(dtype, block_ndim):
  rng = np.random.default_rng(0)
  scales = np.geomspace(1e-3, 1e3, 6).reshape(2, 3, 1, 1)
  hidden = jnp.asarray(rng.normal(size=(2, 3, 5, 7)) * scales, dtype)
  found = clipped(hidden, block_ndim=block_ndim)
  expected = oracle(hidden, tuple(range(-block_ndim, 0)))
  # The bound is 1e-5 below C; then the result is rounded to its type.
  tolerance = 2e-5 + float(jnp.finfo(dtype).eps)
  np.testing.assert_allclose(found, expected, rtol=tolerance, atol=1e-7)


@pytest.mark.parametrize('dtype', [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize('shape', [(400_000,), (64, 3072)], ids=str)
def test_long_vectors_stay_inside_the_bound(shape, dtype):
  """Sums of squares whose small terms get lost beside the large ones."""
  rng = np.random.default_rng(1)
  size = math.prod(shape)
  rounding = 0 if dtype == jnp.float32 else 2**-9  # Of what comes out.
  for large in (1, 16, 256, 1024):
    small = np.full(size, np.sqrt(5.5e-8), np.float32)
    small[:large] = 1
    for states in (small, rng.normal(size=size).astype(np.float32) * 100):
      hidden = jnp.asarray(states.reshape(shape), dtype)
      found = np.linalg.norm(clipped(hidden, block_ndim=len(shape)))
      assert found <= C * (1 + rounding)
      # Nor is anything wasted where the norm is above C.
      if np.linalg.norm(states) > 1.1 * C:
        assert found > C * (1 - 2e-5 - rounding)


@pytest.mark.parametrize(
  'privatize', [compiled, inference.privatize_hidden_states]
)
def test_extreme_magnitudes_keep_their_direction(privatize):
  """Compiled and not: compilers cancel what only guards against overflow."""
  direction = np.array([3.0, -4.0, 0.0])
  for size in (8e37, 1e30, 1.0):
    huge = np.asarray(direction * size, np.float32)
    np.testing.assert_allclose(
      clipped(huge, privatize), C * direction / 5, rtol=2e-5
    )
  # Their squares underflow; they are below C and stay as they are.
  small = np.asarray(direction * 1e-30, np.float32)
  np.testing.assert_allclose(clipped(small, privatize), small, rtol=1e-6)
  # Below the smallest normal number: something harmless, no NaN.
  smallest = clipped(np.full(3, 1e-40, np.float32), privatize)
  assert np.all(np.abs(smallest) <= 1e-35)


@pytest.mark.filterwarnings('error')
@pytest.mark.parametrize('privatize', [compiled, on_host])
def test_masked_vectors_do_not_count_and_are_not_noised(privatize):
  """A vector that is not finite counts as zero, and is noised."""
  hidden = np.random.default_rng(2).normal(size=(2, 4, 3)) * 9
  hidden = hidden.astype(np.float32)
  mask = np.array([[True, True, False, True], [False] * 4])
  hidden[0, 2], hidden[0, 1, 1] = np.nan, np.inf  # Padding may hold anything.
  before = hidden.copy()
  for block_ndim in (1, 2):
    options = {'mask': mask, 'block_ndim': block_ndim}
    found = np.asarray(
      privatize(hidden, KEY, l2_clip_norm=C, stddev=2.0, **options)
    )
    np.testing.assert_array_equal(found[~mask], 0)
    assert np.all(found[mask] != 0)
    assert np.isfinite(found).all()
    # Of a block it takes all away, of vectors itself.
    kept = np.where(mask[..., None] & np.isfinite(hidden), hidden, 0)
    kept[0] *= np.float32([1, 0, 0, 1])[:, None] * (block_ndim == 1)
    np.testing.assert_allclose(
      clipped(hidden, privatize, **options), oracle(kept), rtol=2e-5
    )
  np.testing.assert_array_equal(hidden, before)  # The caller's array.


@pytest.mark.parametrize('block_ndim', [1, 2])
@pytest.mark.parametrize('where', [jnp.float32, jnp.bfloat16, 'host'], ids=str)
def test_noise_is_gaussian_white_and_of_the_right_size(where, block_ndim):
  stddev, hidden = 2.5, np.full((40, 50, 60), 3.0)
  privatize = on_host if where == 'host' else compiled
  if where != 'host':
    hidden = jnp.asarray(hidden, where)
  options = {'l2_clip_norm': C, 'stddev': stddev, 'block_ndim': block_ndim}
  noised = privatize(hidden, KEY, **options)
  assert (noised.dtype, noised.shape) == (hidden.dtype, hidden.shape)
  noise = np.asarray(noised, np.float64)
  noise -= clipped(hidden, privatize, block_ndim=block_ndim)
  # chi-square with `size` degrees of freedom, five standard errors: rejects a
  # stddev that is off by two percent, let alone by sqrt(2).
  size, energy = noise.size, np.sum(np.square(noise / stddev))
  assert abs(energy - size) < 5 * math.sqrt(2 * size)
  assert abs(noise.mean()) < 5 * stddev / math.sqrt(size)
  # Independent across tokens and coordinates: no axis repeats itself.
  for axis in range(3):
    correlation = np.mean(noise * np.roll(noise, 1, axis)) / stddev**2
    assert abs(correlation) < 5 / math.sqrt(size)
  # bfloat16 lumps values together, which the test would take for structure.
  if where != jnp.bfloat16:
    sample = noise.ravel()[::7] / stddev
    assert stats.kstest(sample, 'norm').pvalue > 1e-6
  # Another key; on the host nobody can choose it, and integers may meet.
  other = privatize(hidden, jax.random.key(2), **options)
  assert np.mean(np.asarray(other) == np.asarray(noised)) < 0.02


def test_float64_states_are_computed_in_float64(x64):
  hidden = jnp.asarray(np.random.default_rng(4).normal(size=(3, 5)) * 9)
  found = compiled(hidden, KEY, l2_clip_norm=C, stddev=0.0)
  assert found.dtype == jnp.float64
  np.testing.assert_allclose(found, oracle(hidden) * (1 - 1e-5), rtol=1e-14)
