"""privatize_hidden_states: what is bounded, what is noised, what is not."""

import math

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy import stats

from prism_optax import accounting, inference
from prism_optax.inference import _mechanism

KEY = jax.random.key(7)
C = 1.5
# The many small operations take longer one by one.
privatize_hidden_states = jax.jit(
  inference.privatize_hidden_states,
  static_argnames=('l2_clip_norm', 'stddev', 'block_ndim'),
)
clip = jax.jit(_mechanism.clip, static_argnames=('l2_clip_norm', 'block_ndim'))


def clipped(hidden, privatize=privatize_hidden_states, **kwargs):
  """What the mechanism adds its noise to."""
  return np.asarray(
    privatize(hidden, KEY, l2_clip_norm=C, stddev=0.0, **kwargs),
    np.float64,
  )


def oracle(hidden, axes):
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


floats = st.floats(width=32, allow_nan=True, allow_infinity=True)


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(hnp.arrays(np.float32, (4, 6), elements=floats))
def test_neighbours_are_never_further_apart_than_the_sensitivity(hidden):
  """Whatever the states are: huge, tiny, infinite, not a number."""
  for block_ndim in (1, 2):
    found = clipped(hidden, block_ndim=block_ndim)
    assert np.all(np.isfinite(found))
    norms = np.linalg.norm(found, axis=-1 if block_ndim == 1 else None)
    assert np.all(norms <= C)
    # Another query: the other way round, the farthest that there is.
    other = clipped(-hidden, block_ndim=block_ndim)
    distance = np.linalg.norm(found - other, axis=-1)
    assert np.max(distance) <= inference.hidden_state_sensitivity(
      C, accounting.NeighboringRelation.REPLACE_ONE
    )


@pytest.mark.parametrize('dtype', [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(
  'shape',
  [(1536,), (400_000,), (64, 3072)],
  ids=lambda s: 'x'.join(map(str, s)),
)
def test_long_vectors_stay_inside_the_bound(shape, dtype):
  """Sums of squares whose small terms get lost beside the large ones."""
  rng = np.random.default_rng(1)
  size = math.prod(shape)
  for large in (1, 16, 256, 1024):
    hidden = np.full(size, np.sqrt(5.5e-8), np.float32)
    hidden[:large] = 1
    for states in (hidden, rng.normal(size=size).astype(np.float32) * 100):
      found = clip(
        jnp.asarray(states.reshape(shape), dtype),
        l2_clip_norm=C,
        block_ndim=len(shape),
      )
      assert np.linalg.norm(np.asarray(found, np.float64)) <= C
      # Nor is anything wasted where the norm is above C.
      if np.linalg.norm(states) > 1.1 * C:
        assert np.linalg.norm(np.asarray(found, np.float64)) > C * (1 - 2e-5)


def test_what_is_not_finite_counts_as_zero_and_harms_nobody():
  hidden = np.ones((5, 3), np.float32)
  hidden[1, 2], hidden[2, 0], hidden[3] = np.nan, np.inf, -np.inf
  found = clipped(hidden)
  np.testing.assert_array_equal(found[1:4], 0)
  np.testing.assert_allclose(
    found[[0, 4]], oracle(np.ones((2, 3)), -1), rtol=2e-5
  )
  np.testing.assert_array_equal(clipped(hidden, block_ndim=2), 0)
  # It is noised like any other: whether it was finite does not show.
  noised = privatize_hidden_states(hidden, KEY, l2_clip_norm=C, stddev=1.0)
  assert np.all(np.isfinite(noised))
  assert np.all(np.asarray(noised) != 0)


@pytest.mark.parametrize(
  'privatize', [privatize_hidden_states, inference.privatize_hidden_states]
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
  np.testing.assert_array_equal(clipped(np.zeros(3, np.float32), privatize), 0)
  # Below the smallest normal number: something harmless, no NaN.
  smallest = clipped(np.full(3, 1e-40, np.float32), privatize)
  assert np.all(np.abs(smallest) <= 1e-35)


def test_masked_vectors_do_not_count_and_are_not_noised():
  rng = np.random.default_rng(2)
  hidden = rng.normal(size=(2, 4, 3)).astype(np.float32) * 9
  mask = np.array([[True, True, False, True], [False] * 4])
  hidden[0, 2] = np.nan  # Padding may hold anything.
  for block_ndim in (1, 2):
    found = np.asarray(
      privatize_hidden_states(
        hidden,
        KEY,
        l2_clip_norm=C,
        stddev=2.0,
        mask=mask,
        block_ndim=block_ndim,
      )
    )
    np.testing.assert_array_equal(found[~mask], 0)
    assert np.all(found[mask] != 0)
  kept = np.where(mask[..., None], hidden, 0)
  np.testing.assert_allclose(
    clipped(hidden, mask=mask, block_ndim=2), oracle(kept, (-2, -1)), rtol=2e-5
  )


@pytest.mark.parametrize('block_ndim', [1, 2])
@pytest.mark.parametrize('dtype', [jnp.float32, jnp.bfloat16])
def test_noise_is_gaussian_white_and_of_the_right_size(dtype, block_ndim):
  stddev = 2.5
  hidden = jnp.full((40, 50, 60), 3.0, dtype)
  noised = privatize_hidden_states(
    hidden, KEY, l2_clip_norm=C, stddev=stddev, block_ndim=block_ndim
  )
  assert noised.dtype == dtype
  assert noised.shape == hidden.shape
  noise = np.asarray(noised, np.float64) - clipped(
    hidden, block_ndim=block_ndim
  )
  size = noise.size
  # chi-square with `size` degrees of freedom, five standard errors: rejects a
  # stddev that is off by two percent, let alone by sqrt(2).
  energy = np.sum(np.square(noise / stddev))
  assert abs(energy - size) < 5 * math.sqrt(2 * size)
  assert abs(noise.mean()) < 5 * stddev / math.sqrt(size)
  # Independent across tokens and coordinates: no axis repeats itself.
  for axis in range(3):
    shifted = np.roll(noise, 1, axis)
    correlation = np.mean(noise * shifted) / stddev**2
    assert abs(correlation) < 5 / math.sqrt(size)
  # bfloat16 lumps values together, which the test would take for structure.
  if dtype == jnp.float32:
    sample = noise.ravel()[::7] / stddev
    assert stats.kstest(sample, 'norm').pvalue > 1e-4


def test_a_key_gives_one_noise_and_other_keys_others():
  hidden = np.ones((4, 6), np.float32)

  def draw(key):
    return privatize_hidden_states(hidden, key, l2_clip_norm=C, stddev=1.0)

  first, second = draw(jax.random.key(1)), draw(jax.random.key(2))
  np.testing.assert_array_equal(first, draw(jax.random.key(1)))
  assert np.all(np.asarray(first) != np.asarray(second))


def test_jit_and_vmap_change_nothing():
  hidden = jax.random.normal(jax.random.key(3), (3, 4, 6)) * 5
  mask = jnp.arange(12).reshape(3, 4) % 5 != 0
  keys = jax.random.split(KEY, 3)

  def one(hidden, key, mask, norm, stddev):
    return inference.privatize_hidden_states(
      hidden, key, l2_clip_norm=norm, stddev=stddev, mask=mask
    )

  # Numbers may be traced, too.
  compiled = jax.jit(jax.vmap(one, in_axes=(0, 0, 0, None, None)))
  found = compiled(hidden, keys, mask, C, 0.7)
  expected = [
    one(*each, C, 0.7) for each in zip(hidden, keys, mask, strict=True)
  ]
  np.testing.assert_allclose(found, jnp.stack(expected), rtol=1e-5, atol=1e-6)


def test_float64_states_are_computed_in_float64(x64):
  hidden = jnp.asarray(np.random.default_rng(4).normal(size=(3, 5)) * 9)
  found = privatize_hidden_states(hidden, KEY, l2_clip_norm=C, stddev=0.0)
  assert found.dtype == jnp.float64
  expected = oracle(hidden, -1) * (1 - 1e-5)
  np.testing.assert_allclose(found, expected, rtol=1e-14)


def test_lora_delta_is_the_dense_product():
  rng = np.random.default_rng(5)
  m, n, r = 5, 7, 2
  left, right = rng.normal(size=(m, r)), rng.normal(size=(n, r))
  hidden = rng.normal(size=(3, 4, n))
  found = jax.jit(inference.lora_delta)(hidden, left, right, scale=0.5)
  expected = 0.5 * np.einsum('...n,mn->...m', hidden, left @ right.T)
  np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
  assert found.shape == (3, 4, m)


def test_delta_of_a_noised_state_is_unbiased_and_as_noisy_as_it_says():
  """delta(h + noise) = delta(h) + noise of energy (s ||Z||_F)^2."""
  rng = np.random.default_rng(6)
  m, n, r, draws = 5, 11, 2, 20_000
  left, right = rng.normal(size=(m, r)), rng.normal(size=(n, r))
  state = rng.normal(size=n)
  state *= C / np.linalg.norm(state) / 2  # Inside the bound: not clipped.
  hidden = jnp.asarray(np.tile(state, (draws, 1)), jnp.float32)
  noised = privatize_hidden_states(hidden, KEY, l2_clip_norm=C, stddev=0.8)
  delta = np.asarray(inference.lora_delta(noised, left, right), np.float64)
  exact = left @ (right.T @ state)
  dense = left @ right.T
  error = delta - exact
  size = 0.8 * np.linalg.norm(dense)
  assert np.linalg.norm(error.mean(0)) < 5 * size / math.sqrt(draws)
  energy = np.sum(np.square(error), -1)
  standard_error = energy.std() / math.sqrt(draws)
  assert abs(energy.mean() - size**2) < 5 * standard_error


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    ({'l2_clip_norm': 0.0}, 'l2_clip_norm=0.0'),
    ({'l2_clip_norm': math.nan}, 'l2_clip_norm=nan'),
    ({'stddev': -1.0}, 'stddev=-1.0'),
    ({'stddev': math.nan}, 'stddev=nan'),
    ({'hidden': jnp.ones((4, 3), int)}, 'hidden'),
    ({'hidden': jnp.ones(())}, r'shape=\(\)'),
    ({'block_ndim': 0}, 'block_ndim=0'),
    ({'block_ndim': 3}, '3 axes'),
    ({'mask': jnp.ones((3,), bool)}, r'mask .*\(4,\)'),
    ({'prng_key': 3}, 'prng_key'),
    ({'prng_key': None}, 'prng_key'),
    ({'prng_key': jax.random.split(KEY, 4)}, 'prng_key'),
  ],
)
def test_bad_arguments_are_named(change, message):
  arguments = {
    'hidden': jnp.ones((4, 3)),
    'prng_key': KEY,
    'l2_clip_norm': 1.0,
    'stddev': 1.0,
    **change,
  }
  with pytest.raises(ValueError, match=message):
    jax.jit(
      lambda: inference.privatize_hidden_states(
        arguments.pop('hidden'), arguments.pop('prng_key'), **arguments
      )
    )()


@pytest.mark.parametrize(
  ('hidden', 'left', 'right'),
  [
    ((4, 7), (5, 2), (7, 3)),
    ((4, 6), (5, 2), (7, 2)),
    ((4, 7), (2,), (7, 2)),
    ((), (5, 2), (7, 2)),
  ],
)
def test_shapes_that_do_not_fit_are_named(hidden, left, right):
  with pytest.raises(ValueError, match='right'):
    inference.lora_delta(jnp.ones(hidden), jnp.ones(left), jnp.ones(right))
