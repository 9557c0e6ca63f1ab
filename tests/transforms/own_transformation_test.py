"""Transformations as a user writes them, with public names alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

import prism_optax
from prism_optax import fixed_rank, transforms
from tests import cases
from tests.transforms import chains

pytestmark = pytest.mark.usefixtures('x64')


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
    chains.clip(), scheduled_privatizer(falling, key), rank_sign(),
    prism_optax.scale_by_learning_rate(0.05), prism_optax.retract(),
  )  # fmt: skip


def test_the_noise_follows_its_schedule():
  """Zeros come in; the entries of the head are the noise itself."""
  params = cases.adapters([(9, 7, 3)], extra=20_000, dtype=jnp.float64)
  tx = scheduled_privatizer(falling, 3)
  zeros = jax.tree.map(np.zeros_like, params)
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
  """The same function without ``adds_noise`` makes no chain private."""
  clip, noise, *rest = _parts()
  assert prism_optax.chain(clip, noise, *rest).sensitivity() == 0.4
  silent = transforms.tangent_transformation(
    'silent', lambda stacks, state, step: (stacks, state)
  )
  for parts in ((clip, *rest), (clip, silent)):
    with pytest.raises(ValueError, match='No noise after'):
      prism_optax.chain(*parts)
