"""The law of the tangent noise: how much, where, and never twice.

Seeds are fixed, so nothing here is flaky; the sizes are such that the
deviations a bug would cause are far outside of what the law allows.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.stats

import prism_optax
from prism_optax import _modules, fixed_rank
from tests.oracles import oracles, test_utils

SHAPES = [(9, 7, 3), (6, 11, 2)]
STDDEV = 2.0
TRIALS = 2000


def _params(zero_left=False, dtype=jnp.float32):
  rng = np.random.default_rng(0)
  factors = [oracles.random_factors(rng, *shape) for shape in SHAPES]
  if zero_left:
    factors[0] = np.zeros_like(factors[0][0]), factors[0][1]
  return test_utils.tree_of(factors, np.ones(5), dtype)


def _draws(params, trials=TRIALS, stddev=STDDEV, seed=1):
  """Projected noise of ``trials`` fresh keys, leaves (trials, *shape)."""
  zeros = jax.tree.map(jnp.zeros_like, params)

  def draw(key):
    tx = prism_optax.tangent_privatizer(stddev, prng_key=key)
    return tx.update(zeros, tx.init(params), params)[0]

  keys = jax.random.split(jax.random.key(seed), trials)
  return jax.jit(lambda k: jax.lax.map(draw, k))(keys)


def _embed(params, tree):
  """Dense tangent matrices of each module, (trials, m, n)."""
  modules = _modules.ModuleTree(params)
  frames = modules.frames(params)

  def one(tree):
    stacks = modules.coordinates(tree)
    return [
      fixed_rank.embed(f, t)[0]
      for f, t in zip(frames, stacks.pairs, strict=True)
    ]

  return [np.float64(x) for x in jax.jit(jax.vmap(one))(tree)]


def _energies(dense):
  return np.sum(dense**2, axis=(-2, -1))


def _dimension(m, n, rank):
  return rank * (m + n - rank)


def test_energy_is_chi_square_with_the_tangent_dimension():
  """||P(Xi)||^2 / s^2 ~ chi2 with r (m + n - r) degrees of freedom."""
  params = _params()
  for shape, dense in zip(SHAPES, _embed(params, _draws(params)), strict=True):
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
  params = _params()
  factors = test_utils.factors_of(params)
  trials = 20_000
  noise = _embed(params, _draws(params, trials))
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
  params = _params()
  trials = 20_000
  draws = _draws(params, trials)
  modules = _modules.ModuleTree(params)
  for i, frame in enumerate(modules.frames(params)):
    x = jax.vmap(lambda t, i=i: modules.coordinates(t).pairs[i])(draws)
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
  noise = np.float64(_draws(_params())['extra']).ravel() / STDDEV
  assert scipy.stats.kstest(noise, 'norm').pvalue > 1e-3
  assert scipy.stats.kstest(1.1 * noise, 'norm').pvalue < 1e-4


def test_masked_directions_are_zero_after_the_noise():
  """A zero factor: nothing is observed on the other side, all on its own."""
  params = _params(zero_left=True)
  draws = _draws(params, 200)
  np.testing.assert_array_equal(draws['m0']['lora_a'], 0)
  m, _, rank = SHAPES[0]
  energy = np.sum(np.float64(draws['m0']['lora_b']) ** 2, axis=(-2, -1))
  law = scipy.stats.chi2(m * rank)
  assert scipy.stats.kstest(energy / STDDEV**2, law.cdf).pvalue > 1e-3


def test_noise_goes_in_on_all_entries_before_projector_and_mask():
  """The sum is projected, not the noise alone: the release is all of X + N."""
  params = _params()
  x = jax.tree.map(jnp.ones_like, params)  # Not tangent coordinates at all.
  tx = prism_optax.tangent_privatizer(0.0, prng_key=0)
  out, _ = tx.update(x, tx.init(params), params)
  modules = _modules.ModuleTree(params)
  stacks = modules.coordinates(x)
  pairs = _modules.map_pairs(
    fixed_rank.project, modules.frames(params), stacks.pairs
  )
  want = modules.tree(_modules.Stacks(pairs, stacks.others))
  jax.tree.map(np.testing.assert_array_equal, out, want)
  assert np.abs(out['m0']['lora_b'] - x['m0']['lora_b']).max() > 0.1


def _steps(tx, params, count, state=None):
  zeros = jax.tree.map(jnp.zeros_like, params)
  state = tx.init(params) if state is None else state
  out = []
  update = jax.jit(lambda s: tx.update(zeros, s, params))
  for _ in range(count):
    noise, state = update(state)
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
  assert len(np.unique(values)) == values.size


def test_a_seed_reproduces_and_a_saved_state_continues_it():
  params = _params()
  tx = prism_optax.tangent_privatizer(1.0, prng_key=11)
  whole, _ = _steps(tx, params, 6)
  head, state = _steps(tx, params, 3)
  tail, _ = _steps(tx, params, 3, state)
  np.testing.assert_array_equal(whole, np.concatenate([head, tail]))
  typed = prism_optax.tangent_privatizer(1.0, prng_key=jax.random.key(11))
  np.testing.assert_array_equal(whole, _steps(typed, params, 6)[0])


def test_bfloat16_parameters_get_float32_noise():
  """Noise of 8 bits would have atoms: fewer than 2^16 values in all."""
  params = _params(dtype=jnp.bfloat16)
  tx = prism_optax.tangent_privatizer(1.0, prng_key=0)
  zeros = jax.tree.map(jnp.zeros_like, params)
  noise, _ = tx.update(zeros, tx.init(params), params)
  for leaf in jax.tree.leaves(noise):
    assert leaf.dtype == jnp.float32
    rounded = leaf.astype(jnp.bfloat16).astype(jnp.float32)
    assert np.mean(np.asarray(rounded != leaf)) > 0.9


def test_a_privatizer_of_ones_own_replaces_the_noise():
  """It sees coordinates in the parameters' shapes; its sum is projected."""
  params = _params()
  seen = []

  def update(updates, state, params=None):
    del params
    seen.append(jax.tree.map(jnp.shape, updates))
    return jax.tree.map(lambda x: x + 1, updates), state + 1

  own = optax.GradientTransformation(lambda p: jnp.array(0), update)
  tx = prism_optax.tangent_privatizer(privatizer=own)
  zeros = jax.tree.map(jnp.zeros_like, params)
  out, state = tx.update(zeros, tx.init(params), params)
  assert state.count == state.inner == 1
  assert seen == [jax.tree.map(jnp.shape, params)]
  ones = jax.tree.map(jnp.ones_like, params)
  plain = prism_optax.tangent_privatizer(0.0, prng_key=0)
  want, _ = plain.update(ones, plain.init(params), params)
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), out, want
  )


def test_bad_arguments_are_named():
  make = prism_optax.tangent_privatizer
  noop = optax.identity()
  with pytest.raises(ValueError, match='exactly one of stddev and privatizer'):
    make()
  with pytest.raises(ValueError, match='exactly one of stddev and privatizer'):
    make(1.0, privatizer=noop)
  with pytest.raises(ValueError, match='a privatizer has its own'):
    make(privatizer=noop, prng_key=1)
  with pytest.raises(ValueError, match=r'stddev=-1\.0'):
    make(-1.0)
  with pytest.raises(ValueError, match='stddev=nan'):
    make(float('nan'))
  with pytest.raises(ValueError, match='Expected prng_key'):
    make(1.0, prng_key=jax.random.PRNGKey(0))
  params = _params()
  with pytest.raises(ValueError, match='needs `params`'):
    make(1.0).update(params, make(1.0).init(params))
  with pytest.raises(ValueError, match='outside of jit'):
    jax.jit(make(1.0).init)(params)
