"""The law of the tangent noise: how much, where, and never twice.

Seeds are fixed, so nothing here is flaky; the sizes are such that the
deviations a bug would cause are far outside of what the law allows.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.stats

import prism_optax
from prism_optax import _modules, fixed_rank
from prism_optax.fixed_rank import _lifts
from tests import cases
from tests.oracles import oracles

SHAPES = [(9, 7, 3), (6, 11, 2)]
STDDEV = 2.0
TRIALS = 2000


def _params(zero_left=False, dtype=jnp.float32):
  rng = np.random.default_rng(0)
  factors = [oracles.random_factors(rng, *shape) for shape in SHAPES]
  if zero_left:
    factors[0] = np.zeros_like(factors[0][0]), factors[0][1]
  return cases.tree_of(factors, np.ones(5), dtype)


def _draws(params, trials=TRIALS, seed=1):
  """Projected noise of ``trials`` fresh keys, leaves (trials, *shape).

  A program for so many keys draws them all.
  """
  keys = jax.random.split(jax.random.key(seed), (trials // TRIALS, TRIALS))
  drawn = [jax.device_get(_drawn(params, k)) for k in keys]
  return jax.tree.map(lambda *x: np.concatenate(x), *drawn)


@jax.jit
def _drawn(params, keys):
  zeros = jax.tree.map(jnp.zeros_like, params)

  def draw(key):
    tx = prism_optax.tangent_privatizer(STDDEV, prng_key=key)
    return tx.update(zeros, tx.init(params), params)[0]

  return jax.lax.map(draw, keys)


@functools.cache
def _usual(trials=TRIALS):
  params = _params()
  return params, _draws(params, trials)


def _embed(params, tree):
  """Dense tangent matrices of each module, (trials, m, n)."""
  return [np.float64(x) for x in _embedded(params, tree)]


@jax.jit
def _embedded(params, tree):
  modules = _modules.ModuleTree(params)
  frames = modules.frames(params)

  def one(tree):
    stacks = modules.coordinates(tree)
    return [
      _lifts.embed(f, t)[0] for f, t in zip(frames, stacks.pairs, strict=True)
    ]

  return jax.vmap(one)(tree)


def _energies(dense):
  return np.sum(dense**2, axis=(-2, -1))


def _dimension(m, n, rank):
  return rank * (m + n - rank)


def test_energy_is_chi_square_with_the_tangent_dimension():
  """||P(Xi)||^2 / s^2 ~ chi2 with r (m + n - r) degrees of freedom."""
  params, draws = _usual()
  for shape, dense in zip(SHAPES, _embed(params, draws), strict=True):
    law = scipy.stats.chi2(_dimension(*shape))
    energy = _energies(dense) / STDDEV**2
    assert scipy.stats.kstest(energy, law.cdf).pvalue > 1e-3
    # The test can fail: another scale, or noise left in the frame itself.
    for wrong in (2 / 3, 3 / 2, 0.97, 1.03):
      assert scipy.stats.kstest(wrong**2 * energy, law.cdf).pvalue < 1e-6
    m, n, rank = shape
    unprojected = scipy.stats.chi2((m + n) * rank)
    assert scipy.stats.kstest(energy, unprojected.cdf).pvalue < 1e-6


def test_covariance_is_the_projector_on_the_tangent_space():
  """Isotropic inside, nothing outside."""
  trials = 20_000
  params, draws = _usual(trials)
  factors = cases.factors_of(params)
  noise = _embed(params, draws)
  for (left, right), dense in zip(factors, noise, strict=True):
    m, n = dense.shape[1:]
    point = oracles.Point.from_factors(left, right, eps=1e-6)
    basis = np.eye(m * n).reshape(m * n, m, n)
    projector = point.project(basis).reshape(m * n, m * n)
    samples = dense.reshape(trials, -1) / STDDEV
    covariance = samples.T @ samples / trials
    # Entries have standard errors of at most sqrt(2 / trials) = 0.01.
    assert np.abs(covariance - projector).max() < 5 * np.sqrt(2 / trials)
    outside = samples - samples @ projector
    assert np.abs(outside).max() < 1e-5  # float32


def test_rank_space_covariance_is_exactly_isotropic_on_both_sides():
  """What the floor of the preconditioner is built on: s^2 I, core counted."""
  trials = 20_000
  params, draws = _usual(trials)

  @jax.jit
  def seen(params, draws):
    modules = _modules.ModuleTree(params)
    stacks = jax.vmap(modules.coordinates)(draws)
    return modules.frames(params), stacks.pairs

  for frame, x in zip(*jax.device_get(seen(params, draws)), strict=True):
    left, right = np.float64(x.left[:, 0]), np.float64(x.right[:, 0])
    q_right = np.float64(frame.right[0])
    core = np.einsum('tnr,ns->trs', right, q_right)  # D = X_R^T Q_R
    outer = right - np.einsum('ns,trs->tnr', q_right, core)
    m, n, rank = left.shape[1], right.shape[1], left.shape[2]
    v_left = np.einsum('tmr,tms->rs', left, left) + np.einsum(
      'tqr,tqs->rs', core, core
    )
    v_right = np.einsum('tnr,tns->rs', outer, outer) + np.einsum(
      'trq,tsq->rs', core, core
    )
    for v, d in ((v_left, m), (v_right, n)):
      error = v / (trials * d * STDDEV**2) - np.eye(rank)
      # Mean of trials * d squares: standard error sqrt(2 / (trials d)).
      assert np.abs(error).max() < 5 * np.sqrt(2 / (trials * d))


def test_other_leaves_get_plain_gaussian_noise():
  noise = np.float64(_usual()[1]['extra']).ravel() / STDDEV
  assert scipy.stats.kstest(noise, 'norm').pvalue > 1e-3
  assert scipy.stats.kstest(1.1 * noise, 'norm').pvalue < 1e-4


def test_masked_directions_are_zero_after_the_noise():
  """A zero factor: nothing is observed on the other side, all on its own."""
  params = _params(zero_left=True)
  draws = _draws(params)
  np.testing.assert_array_equal(draws['m0']['lora_a'], 0)
  m, _, rank = SHAPES[0]
  energy = np.sum(np.float64(draws['m0']['lora_b']) ** 2, axis=(-2, -1))
  law = scipy.stats.chi2(m * rank)
  assert scipy.stats.kstest(energy / STDDEV**2, law.cdf).pvalue > 1e-3


def test_noise_goes_in_on_all_entries_before_projector_and_mask():
  """The sum is projected, not the noise alone: the release is all of X + N."""
  params = _params()
  x = jax.tree.map(np.ones_like, params)  # Not tangent coordinates at all.
  tx = prism_optax.tangent_privatizer(0.0, prng_key=0)
  out, _ = jax.jit(tx.update)(x, tx.init(params), params)

  @jax.jit
  def projected(x, params):
    modules = _modules.ModuleTree(params)
    stacks = modules.coordinates(x)
    pairs = _modules.map_pairs(
      fixed_rank.project, modules.frames(params), stacks.pairs
    )
    return modules.tree(_modules.Stacks(pairs, stacks.others))

  jax.tree.map(np.testing.assert_array_equal, out, projected(x, params))
  assert np.abs(out['m0']['lora_b'] - x['m0']['lora_b']).max() > 0.1


@jax.jit
def _step(state, params):
  """For privatizers of all keys, which are in the state."""
  tx = prism_optax.tangent_privatizer(1.0)
  return tx.update(jax.tree.map(jnp.zeros_like, params), state, params)


def _steps(tx, params, count, state=None):
  """Of a privatizer of standard deviation one."""
  state = tx.init(params) if state is None else state
  out = []
  for _ in range(count):
    noise, state = _step(state, params)
    out.append(
      np.concatenate([np.float64(x).ravel() for x in jax.tree.leaves(noise)])
    )
  return np.array(out), state


def test_steps_modules_and_leaves_are_independent():
  """Sample correlations over many steps: none beyond chance."""
  params = _params()
  noise, _ = _steps(
    prism_optax.tangent_privatizer(1.0, prng_key=3), params, 400
  )
  extra = noise[:, :5]  # Sorted names: 'extra' comes first.
  rest = noise[:, 5:]
  bound = 5.5 / np.sqrt(400)  # Five and a half standard errors.
  cross = np.corrcoef(extra.T, rest.T)
  assert np.abs(cross[:5, 5:]).max() < bound
  assert np.abs(np.corrcoef(extra.T) - np.eye(5)).max() < bound
  lagged = np.mean(noise[1:] * noise[:-1], axis=0)
  assert np.abs(lagged).max() < bound
  m0 = 5 + 9 * 3 + 7 * 3
  between = np.corrcoef(noise[:, 5:m0].T, noise[:, m0:].T)
  size = m0 - 5
  assert np.abs(between[:size, size:]).max() < bound


def test_noise_is_never_drawn_twice():
  """Over steps, restarts from a saved state and fresh inits: all different."""
  params = _params()
  tx = prism_optax.tangent_privatizer(1.0)
  first, state = _steps(tx, params, 5)
  resumed, _ = _steps(tx, params, 5, state)
  fresh, _ = _steps(tx, params, 5)
  rows = np.concatenate([first, resumed, fresh])
  assert len(np.unique(rows, axis=0)) == 15
  values = rows[:, :5].ravel()
  # Noise is on a lattice of some million steps: two of 75 values are equal by
  # chance once in a thousand runs, six hardly ever.
  assert len(np.unique(values)) >= values.size - 2


def test_a_privatizer_of_ones_own_replaces_the_noise():
  """It sees coordinates in the parameters' shapes; its sum is projected."""
  params = _params()
  seen = []

  def update(updates, state, params=None):
    del params
    seen.append(jax.tree.map(jnp.shape, updates))
    return jax.tree.map(lambda x: x + 1, updates), state + 1

  own = optax.GradientTransformation(lambda p: jnp.array(0), update)
  tx = prism_optax.tangent_privatizer(privatizer=own, steps='unlimited')
  zeros = jax.tree.map(jnp.zeros_like, params)
  out, state = jax.jit(tx.update)(zeros, tx.init(params), params)
  assert state.count == state.inner == 1
  assert seen == [jax.tree.map(jnp.shape, params)]
  ones = jax.tree.map(jnp.ones_like, params)
  plain = prism_optax.tangent_privatizer(0.0, prng_key=0)
  want, _ = jax.jit(plain.update)(ones, plain.init(params), params)
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), out, want
  )


def test_a_cryptographic_generator_draws_the_noise():
  """Fresh in each `init`, of the size asked for, moved on by each update."""
  params = {
    'bias': np.zeros(1000, np.float32),
    'm': {'lora_a': jnp.eye(5, 2), 'lora_b': jnp.eye(2, 4)},
  }
  tx = prism_optax.tangent_privatizer(2.0, prng_key='chacha20')
  update = jax.jit(tx.update)
  zeros = jax.tree.map(jnp.zeros_like, params)

  def of(state):
    noise, state = update(zeros, state, params)
    return np.asarray(noise['bias']), state

  one, state = of(tx.init(params))
  two, _ = of(state)
  other, _ = of(tx.init(params))
  assert state.inner.shape == (2,)
  draws = np.stack([one, two, other])
  for i, draw in enumerate(draws):  # Independent: none follows another.
    assert abs(np.corrcoef(draw, draws[i - 1])[0, 1]) < 5 / np.sqrt(1000)
  # Five relative standard errors of a standard deviation.
  assert draws.std() == pytest.approx(2.0, rel=5 / np.sqrt(2 * draws.size))


def test_nothing_is_released_beyond_the_last_step():
  params = _params()
  tx = prism_optax.tangent_privatizer(2.0, prng_key=0, steps=1)
  update = jax.jit(tx.update)
  ones = jax.tree.map(jnp.ones_like, params)
  noisy, state = update(ones, tx.init(params), params)
  assert all(np.any(x) for x in jax.tree.leaves(noisy))
  nothing, _ = update(ones, state, params)
  assert not any(np.any(x) for x in jax.tree.leaves(nothing))
  with pytest.raises(ValueError, match='steps=1 updates.*update 2'):
    tx.update(ones, state, params)
