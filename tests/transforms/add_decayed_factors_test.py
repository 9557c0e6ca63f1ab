"""Decay of Z, exactly and in any gauge."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import prism_optax
from tests import cases
from tests.oracles import oracles

pytestmark = pytest.mark.usefixtures('x64')


@jax.jit
def _decayed(params):
  tx = optax.chain(
    prism_optax.add_decayed_factors(0.5),
    optax.scale_by_learning_rate(0.1),
    prism_optax.retract(),
  )
  zeros = jax.tree.map(jnp.zeros_like, params)
  updates, _ = tx.update(zeros, tx.init(params), params)
  return optax.apply_updates(params, updates)


@pytest.mark.parametrize('condition', [1.0, 1e3])
def test_z_shrinks_by_the_factor_and_nothing_else(condition):
  rng = np.random.default_rng(0)
  factors = [
    oracles.change_gauge(
      oracles.random_factors(rng, 9, 7, 3),
      oracles.random_gauge(rng, 3, condition),
    ),
    oracles.random_factors(rng, 9, 7, 3),
  ]
  params = cases.tree_of(factors, np.ones(4))
  new = _decayed(params)
  for got, old in zip(
    cases.products_of(new), cases.products_of(params), strict=True
  ):
    np.testing.assert_allclose(
      got, 0.95 * old, atol=1e-14 * condition * np.abs(old).max()
    )
  np.testing.assert_array_equal(new['extra'], params['extra'])
