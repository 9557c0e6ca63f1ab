"""The balanced SVD gauge: the same Z, orthogonal columns, equal norms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prism_optax import lora
from tests.oracles import oracles


def _tree(left, right, dtype=np.float64):
  return {'lora_a': right.astype(dtype), 'lora_b': left.T.astype(dtype)}


def _grams(tree):
  a, b = np.float64(tree['lora_a']), np.float64(tree['lora_b'])
  return a.T @ a, b @ b.T


@pytest.mark.parametrize('condition', [1.0, 1e3, 1e6])
def test_same_matrix_in_the_balanced_gauge(condition):
  rng = np.random.default_rng(0)
  left, right = oracles.random_factors(rng, 8, 6, 3)
  left, right = oracles.change_gauge(
    (left, right), oracles.random_gauge(rng, 3, condition, 100.0)
  )
  new = lora.canonicalize(_tree(left, right))
  z = left @ right.T
  got = (new['lora_a'] @ new['lora_b']).T
  # Rounding of the given factors, whose product loses the condition.
  assert oracles.relative_error(got, z) < 1e-14 * condition
  gram_a, gram_b = _grams(new)
  np.testing.assert_allclose(gram_a, gram_b, atol=1e-12)
  np.testing.assert_allclose(
    np.sort(np.diag(gram_a))[::-1],
    np.linalg.svd(z, compute_uv=False)[:3],
    rtol=1e-8,
  )
  assert np.abs(gram_a - np.diag(np.diag(gram_a))).max() < 1e-12


@pytest.mark.parametrize('zero', ['lora_a', 'lora_b'])
def test_a_zero_factor_stays_and_the_other_keeps_its_space(zero):
  rng = np.random.default_rng(1)
  left, right = oracles.random_factors(rng, 8, 6, 3, condition=50.0)
  tree = _tree(left, right)
  tree[zero] = np.zeros_like(tree[zero])
  new = lora.canonicalize(tree)
  assert not new[zero].any()
  kept, old = (
    (x['lora_b'].T if zero == 'lora_a' else x['lora_a']) for x in (new, tree)
  )
  np.testing.assert_allclose(
    oracles.projector(kept), oracles.projector(old), atol=1e-12
  )
  gram = kept.T @ kept
  assert np.abs(gram - np.diag(np.diag(gram))).max() < 1e-12


def test_lost_rank_keeps_one_side():
  rng = np.random.default_rng(2)
  left, right = oracles.random_factors(rng, 8, 6, 3)
  left = left @ np.diag([1.0, 1.0, 0.0])
  new = lora.canonicalize(_tree(left, right))
  got = (new['lora_a'] @ new['lora_b']).T
  assert oracles.relative_error(got, left @ right.T) < 1e-13
  assert np.linalg.matrix_rank(new['lora_a']) == 3  # Still trainable.
  assert np.linalg.matrix_rank(new['lora_b']) == 2


def test_stacks_types_scale_and_other_leaves():
  rng = np.random.default_rng(3)
  params = {
    'x': {
      'lora_a': jnp.asarray(rng.normal(size=(4, 6, 2)), jnp.float32),
      'lora_b': jnp.asarray(rng.normal(size=(4, 2, 5)), jnp.bfloat16),
    },
    'head': jnp.ones(3),
  }
  new = lora.canonicalize(params, layout=lora.Layout(scale=8.0))
  jax.tree.map(lambda a, b: np.testing.assert_equal(a.dtype, b.dtype), new,
               params)  # fmt: skip
  np.testing.assert_array_equal(new['head'], params['head'])
  product = [
    np.float64(p['x']['lora_a']) @ np.float64(p['x']['lora_b'])
    for p in (new, params)
  ]
  np.testing.assert_allclose(*product, atol=0.05)  # bfloat16 leaf.
