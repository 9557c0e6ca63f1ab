"""Transformations as a user writes them, with public names alone."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.stats

import prism_optax
from prism_optax import fixed_rank, transforms
from prism_optax.fixed_rank import _lifts
from tests import cases
from tests.oracles import oracles, problems

pytestmark = pytest.mark.usefixtures('x64')

SHAPES = [(8, 6, 3), (8, 6, 3)]


# The two transformations. The documentation shows the same code.


def rank_sign(eps=1e-12):
  """``X (X^T X)^(-1/2)`` on either side: all singular values become one."""

  def sign(x):
    w, v = jnp.linalg.eigh(x.mT @ x)
    root = jnp.where(w > eps, 1 / jnp.sqrt(jnp.where(w > eps, w, 1)), 0)
    return x @ (v * root[..., None, :]) @ v.mT

  def pair(x):
    left, right = fixed_rank.multiply_out(x)
    return fixed_rank.Tangent(sign(left), sign(right))

  def update(stacks, state, step):
    del step
    stacks = stacks.map_pairs(pair)
    others = tuple(jnp.sign(x) for x in stacks.others)
    return stacks._replace(others=others), state

  return transforms.tangent_transformation('rank_sign', update)


def scheduled_privatizer(stddev_of_step, prng_key):
  """Gaussian noise whose standard deviation is a function of the step."""

  def at(count):
    stddev = stddev_of_step(count)
    return prism_optax.tangent_privatizer(stddev, prng_key=prng_key).stacked

  def init(step):
    return jnp.zeros((), jnp.int32), at(0).init(step)

  def update(stacks, state, step):
    count, noise = state
    stacks, noise = at(count).update(stacks, noise, step)
    return stacks, (count + 1, noise)

  return transforms.tangent_transformation(
    'scheduled_privatizer', update, init, adds_noise=True
  )


def falling(count):
  return 2.0 / (1.0 + jnp.asarray(count, jnp.float64))


def _parts(key=7):
  return (
    prism_optax.intrinsic_clip(2.0, normalize_by=5.0),
    scheduled_privatizer(falling, key),
    rank_sign(),
    prism_optax.scale_by_learning_rate(0.05),
    prism_optax.retract(),
  )


def _train(tx, steps=3):
  problem = problems.Problem(SHAPES)
  params = problem.params(*problem.start())
  state = tx.init(params)
  update = jax.jit(tx.update)
  out = []
  for step in range(steps):
    grads = problem.factor_gradients(
      params, problem.gradients(step, problem.dense(params))
    )
    updates, state = update(grads, state, params)
    params = optax.apply_updates(params, updates)
    out.append(params)
  return out


@pytest.mark.slow
def test_they_fuse():
  """The numbers of `optax.chain`, to the rounding of another order of sums."""
  fused, plain = (
    _train(prism_optax.chain(*_parts())),
    _train(optax.chain(*_parts())),
  )
  for x, y in zip(*map(jax.tree.leaves, (fused, plain)), strict=True):
    assert oracles.relative_error(x, y) < 1e-11


@pytest.mark.slow
def test_the_step_is_the_polar_factor_whatever_the_gauge():
  """Against NumPy's SVD; the dense step is the same in every gauge."""
  rng = np.random.default_rng(0)
  factors = oracles.random_factors(rng, 9, 7, 3)
  dense = rng.standard_normal((9, 7))
  tx, steps = rank_sign(), []
  for condition in (1.0, 100.0):
    pair = oracles.change_gauge(
      factors, oracles.random_gauge(rng, 3, condition)
    )
    params = cases.tree_of([pair])
    x = prism_optax.tangent_coordinates(params)(
      cases.factor_gradients([pair], [dense])
    )
    updates, _ = tx.update(x, tx.init(params), params)
    sides = (cases.factors_of(updates)[0], cases.factors_of(x)[0])
    for found, given in zip(*sides, strict=True):
      u, _, vt = np.linalg.svd(given, full_matrices=False)
      np.testing.assert_allclose(found, u @ vt, atol=1e-9)
    frame = fixed_rank.frame(fixed_rank.Factors(*map(jnp.asarray, pair)))
    tangent = fixed_rank.Tangent(*map(jnp.asarray, sides[0]))
    steps.append(np.asarray(_lifts.embed(frame, tangent)))
  # Rounding of factors of condition 100.
  np.testing.assert_allclose(steps[1], steps[0], atol=1e-9)


def test_the_noise_follows_its_schedule():
  """Zeros come in; the entries of the head are the noise itself."""
  params = cases.tree_of(
    [oracles.random_factors(np.random.default_rng(1), 9, 7, 3)], np.ones(20_000)
  )
  tx = scheduled_privatizer(falling, 3)
  zeros = jax.tree.map(jnp.zeros_like, params)
  state, drawn = tx.init(params), []
  update = jax.jit(lambda state: tx.update(zeros, state, params))
  for step in range(3):
    noise, state = update(state)
    noise = np.asarray(noise['extra']) / (2.0 / (1 + step))
    assert scipy.stats.kstest(noise, 'norm').pvalue > 1e-3
    # It can fail: the standard deviation of another step.
    assert scipy.stats.kstest(1.1 * noise, 'norm').pvalue < 1e-6
    drawn.append(noise)
  # Another draw at every step; standard errors of 1 / sqrt(20000).
  assert np.abs(np.corrcoef(drawn) - np.eye(3)).max() < 5 / np.sqrt(20_000)
  assert int(state[0]) == 3


def test_it_is_the_noise_that_a_clip_asks_for():
  clip, noise, *rest = _parts()
  tx = prism_optax.chain(clip, noise, *rest)
  assert tx.sensitivity() == 0.4
  with pytest.raises(ValueError, match='No noise behind intrinsic_clip'):
    prism_optax.chain(clip, *rest)
  with pytest.raises(ValueError, match='scheduled_privatizer must come direc'):
    prism_optax.chain(clip, rank_sign(), noise)
  with pytest.raises(ValueError, match='intrinsic_clip must come first, got r'):
    prism_optax.chain(rank_sign(), clip, noise)


def test_what_says_nothing_of_noise_is_none():
  """The same function without ``adds_noise`` does not make a chain private."""
  silent = transforms.tangent_transformation(
    'silent', lambda stacks, state, step: (stacks, state)
  )
  with pytest.raises(ValueError, match='No noise behind'):
    prism_optax.chain(prism_optax.intrinsic_clip(1.0), silent)


def test_extra_arguments_are_dropped_before_them():
  """An update of one's own takes three arguments, whatever a chain passes."""
  params = cases.tree_of(
    [oracles.random_factors(np.random.default_rng(2), 9, 7, 3)]
  )
  tx = rank_sign()
  update, state = jax.jit(tx.update), tx.init(params)
  plain, _ = update(params, state, params)
  more, _ = update(params, state, params, is_padding_example=None)
  jax.tree.map(np.testing.assert_array_equal, plain, more)
