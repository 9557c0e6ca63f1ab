"""The law of the tangent noise: how much, where, and never twice.

Seeds are fixed, so nothing here is flaky; the sizes are such that the
deviations a bug would cause are far outside of what the law allows.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import scipy.stats

import prism_optax
from prism_optax import fixed_rank
from tests import cases
from tests.oracles import oracles, problems

SHAPES = [(9, 7, 3), (6, 11, 3)]
STDDEV = 2.0
TRIALS = 5_000
PARAMS = cases.adapters(SHAPES)
ZEROS = jax.tree.map(np.zeros_like, PARAMS)
ONES = jax.tree.map(np.ones_like, PARAMS)


def test_noise_is_white_in_the_tangent_space_and_on_other_leaves():
  """Isotropic inside, nothing outside."""

  def draw(key):
    tx = prism_optax.tangent_privatizer(STDDEV, prng_key=key)
    return tx.update(ZEROS, tx.init(PARAMS), PARAMS)[0]

  keys = jax.random.split(jax.random.key(1), TRIALS)
  drawn = jax.device_get(jax.jit(lambda x: jax.lax.map(draw, x))(keys))
  for pair, dense in zip(
    cases.factors_of(PARAMS), problems.embed(PARAMS, drawn), strict=True
  ):
    m, n = dense.shape[1:]
    point = oracles.Point.from_factors(*pair, eps=1e-6)
    basis = np.eye(m * n).reshape(m * n, m, n)
    projector = point.project(basis).reshape(m * n, m * n)
    samples = dense.reshape(TRIALS, -1) / STDDEV
    covariance = samples.T @ samples / TRIALS
    # Entries have standard errors of at most sqrt(2 / TRIALS) = 0.02.
    assert np.abs(covariance - projector).max() < 5 * np.sqrt(2 / TRIALS)
    outside = samples - samples @ projector
    assert np.abs(outside).max() < 1e-5  # float32
  noise = np.float64(drawn['extra']).ravel() / STDDEV
  assert scipy.stats.kstest(noise, 'norm').pvalue > 1e-3
  assert scipy.stats.kstest(1.1 * noise, 'norm').pvalue < 1e-4


def test_noise_goes_in_on_all_entries_before_projector_and_mask():
  """The sum is projected, not the noise alone: the release is all of X + N."""
  tx = prism_optax.tangent_privatizer(0.0, prng_key=0)
  out, _ = jax.jit(tx.update)(ONES, tx.init(PARAMS), PARAMS)
  # Ones are not tangent coordinates at all.
  for frame, pair in zip(
    problems.frames(PARAMS), cases.factors_of(out), strict=True
  ):
    ones = fixed_rank.Tangent(*map(np.ones_like, pair))
    cases.assert_close(pair, fixed_rank.project(frame, ones), 1e-6)
    assert np.abs(pair[0] - 1).max() > 0.1
  np.testing.assert_array_equal(out['extra'], 1)


def test_steps_modules_and_leaves_are_independent():
  """Sample correlations over many steps: none beyond chance."""
  tx = prism_optax.tangent_privatizer(1.0, prng_key=3)
  params, zeros = (x | {'no entry': np.zeros((0, 3))} for x in (PARAMS, ZEROS))
  update, state, noise = jax.jit(tx.update), tx.init(params), []
  for _ in range(400):
    drawn, state = update(zeros, state, params)
    noise.append(np.concatenate(jax.tree.leaves(drawn), None))
  noise = np.float64(noise)
  extra, rest = noise[:, :5], noise[:, 5:]  # Sorted names.
  bound = 5.5 / np.sqrt(400)  # Five and a half standard errors.
  cross = np.corrcoef(extra.T, rest.T)
  assert np.abs(cross[:5, 5:]).max() < bound
  assert np.abs(np.corrcoef(extra.T) - np.eye(5)).max() < bound
  lagged = np.mean(noise[1:] * noise[:-1], axis=0)
  assert np.abs(lagged).max() < bound
  size = 9 * 3 + 7 * 3
  between = np.corrcoef(rest[:, :size].T, rest[:, size:].T)
  assert np.abs(between[:size, size:]).max() < bound


def test_a_privatizer_of_ones_own_replaces_the_noise():
  """It sees coordinates in the parameters' shapes; its sum is projected."""
  seen = []

  def update(updates, state, params=None):
    del params
    seen.append(jax.tree.map(jnp.shape, updates))
    return jax.tree.map(lambda x: x + 1, updates), state + 1

  def init(params):
    seen.append(jax.tree.map(jnp.shape, params))
    return jnp.array(0)

  own = optax.GradientTransformation(init, update)
  tx = prism_optax.tangent_privatizer(privatizer=own, steps='unlimited')
  out, state = jax.jit(tx.update)(ZEROS, tx.init(PARAMS), PARAMS)
  assert state.count == state.inner == 1
  assert seen == [jax.tree.map(jnp.shape, PARAMS)] * 2
  plain = prism_optax.tangent_privatizer(0.0, prng_key=0)
  want, _ = jax.jit(plain.update)(ONES, plain.init(PARAMS), PARAMS)
  cases.assert_close(out, want, 1e-6)
