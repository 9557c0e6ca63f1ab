"""Truncated and subtracted adapters, against dense matrices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prism_optax import lora
from tests import cases
from tests.oracles import oracles

# Two modules of one shape, one of another.
SHAPES = [(8, 6, 3), (5, 9, 2), (8, 6, 3)]


def _factors(seed=0, condition=4.0):
  rng = np.random.default_rng(seed)
  return [oracles.random_factors(rng, *s, condition) for s in SHAPES]


def _params(dtype=jnp.float32, seed=0):
  return cases.tree_of(_factors(seed), np.ones(4), dtype)


def _ranks(params):
  return [left.shape[-1] for left, _ in cases.factors_of(params)]


@pytest.mark.parametrize('dtype', [jnp.float32, jnp.float64])
def test_truncation_is_the_best_approximation(x64, dtype):
  params = _params(dtype)
  new = jax.jit(lambda p: lora.truncate(p, 2))(params)
  assert _ranks(new) == [2, 2, 2]
  assert {x.dtype for x in jax.tree.leaves(new)} == {jnp.dtype(dtype)}
  for got, z in zip(
    cases.products_of(new), cases.products_of(params), strict=True
  ):
    want = oracles.best_approximation(z, 2)
    assert oracles.relative_error(got, want) < 20 * jnp.finfo(dtype).eps
  np.testing.assert_array_equal(new['extra'], params['extra'])


def test_modules_of_a_lower_rank_keep_it():
  params = _params()
  new = jax.device_get(jax.jit(lambda p: lora.truncate(p, 4))(params))
  assert _ranks(new) == [3, 2, 3]
  for got, z in zip(
    cases.products_of(new), cases.products_of(params), strict=True
  ):
    assert oracles.relative_error(got, z) < 1e-5
  for name in ('m0', 'm1', 'm2'):  # In the balanced gauge now.
    a, b = new[name]['lora_a'], new[name]['lora_b']
    np.testing.assert_allclose(a.T @ a, b @ b.T, atol=1e-6)


def test_stacked_modules_and_other_axes():
  """A scanned module with its stack axis second, as nn.scan can make it."""
  rng = np.random.default_rng(1)
  params = {
    'w_a': np.float32(rng.normal(size=(6, 4, 3))),  # in, L, r
    'w_b': np.float32(rng.normal(size=(3, 4, 2, 5))),  # r, L, *out
  }
  layout = [lora.Pair('w_a', 'w_b', lora.Layout(2, 0, (1,), (1,), scale=4.0))]

  @jax.jit
  def work(params):
    new = lora.truncate(params, 2, layout=layout)
    other = jax.tree.map(jnp.sin, new)
    return new, other, lora.difference(new, other, layout=layout)

  new, other, wider = jax.device_get(work(params))
  assert new['w_a'].shape == (6, 4, 2)
  assert new['w_b'].shape == (2, 4, 2, 5)
  assert wider['w_a'].shape == (6, 4, 4)
  assert wider['w_b'].shape == (4, 4, 2, 5)
  for i in range(4):
    z, got, z0, change = (
      np.asarray(x['w_a'][:, i] @ x['w_b'][:, i].reshape(-1, 10))
      for x in (params, new, other, wider)
    )
    want = oracles.best_approximation(np.float64(z), 2)
    assert oracles.relative_error(got, want) < 3e-6
    np.testing.assert_allclose(change, got - z0, atol=1e-5)


def test_difference_is_the_change_of_the_matrix(x64):
  """Of twice the rank; where that is too much, of all there is."""
  params, initial = _params(jnp.float64, 1), _params(jnp.float64, 2)
  params['wide'] = {'lora_a': np.eye(4, 3), 'lora_b': 2 * np.eye(3, 5)}
  initial['wide'] = {'lora_a': np.ones((4, 3)), 'lora_b': np.ones((3, 5))}
  new = jax.jit(lora.difference)(params, initial)
  new, params, initial = jax.device_get((new, params, initial))
  assert _ranks(new) == [6, 4, 6, 4]
  for name in ('m0', 'm1', 'm2', 'wide'):
    got, z, z0 = (x[name]['lora_a'] @ x[name]['lora_b'] for x in
                  (new, params, initial))  # fmt: skip
    np.testing.assert_allclose(got, z - z0, atol=1e-13)
  np.testing.assert_array_equal(new['extra'], params['extra'])
