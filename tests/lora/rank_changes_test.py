"""Truncated, padded and subtracted adapters, against dense matrices."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import prism_optax
from prism_optax import fixed_rank, lora
from tests.oracles import oracles, test_utils

# Two modules of one shape, one of another.
SHAPES = [(8, 6, 3), (5, 9, 2), (8, 6, 3)]


def _factors(seed=0, condition=4.0):
  rng = np.random.default_rng(seed)
  return [oracles.random_factors(rng, *s, condition) for s in SHAPES]


def _params(dtype=jnp.float32, seed=0):
  return test_utils.tree_of(_factors(seed), np.ones(4), dtype)


def _ranks(params):
  return [left.shape[-1] for left, _ in test_utils.factors_of(params)]


@pytest.mark.parametrize('dtype', [jnp.float32, jnp.float64])
def test_truncation_is_the_best_approximation(x64, dtype):
  params = _params(dtype)
  new = jax.jit(lambda p: lora.truncate(p, 2))(params)
  assert _ranks(new) == [2, 2, 2]
  assert {x.dtype for x in jax.tree.leaves(new)} == {jnp.dtype(dtype)}
  for got, z in zip(
    test_utils.products_of(new), test_utils.products_of(params), strict=True
  ):
    want = oracles.best_approximation(z, 2)
    assert oracles.relative_error(got, want) < 20 * jnp.finfo(dtype).eps
  np.testing.assert_array_equal(new['extra'], params['extra'])


def test_truncation_by_patterns_leaves_the_others_alone():
  params = _params()
  new = lora.truncate(params, {'m0': 1, 'm*': 2})
  assert _ranks(new) == [1, 2, 2]
  new = lora.truncate(params, {'m1': 1})
  assert _ranks(new) == [3, 1, 3]
  for name in ('m0', 'm2'):  # In the balanced gauge now.
    a, b = new[name]['lora_a'], new[name]['lora_b']
    np.testing.assert_allclose(a.T @ a, b @ b.T, atol=1e-6)


def test_stacked_modules_and_other_axes():
  """A scanned module with its stack axis second, as nn.scan can make it."""
  rng = np.random.default_rng(1)
  params = {
    'w_a': jnp.asarray(rng.normal(size=(6, 4, 3)), jnp.float32),  # in, L, r
    'w_b': jnp.asarray(
      rng.normal(size=(3, 4, 2, 5)), jnp.float32
    ),  # r, L, *out
  }
  layout = [lora.Pair('w_a', 'w_b', lora.Layout(2, 0, (1,), (1,), scale=4.0))]
  new = lora.truncate(params, 2, layout=layout)
  assert new['w_a'].shape == (6, 4, 2)
  assert new['w_b'].shape == (2, 4, 2, 5)
  padded = lora.pad_rank(new, 4, 0, layout=layout)
  assert padded['w_a'].shape == (6, 4, 4)
  assert padded['w_b'].shape == (4, 4, 2, 5)
  for i in range(4):
    z, got, same = (
      np.asarray(x['w_a'][:, i] @ x['w_b'][:, i].reshape(-1, 10))
      for x in (params, new, padded)
    )
    want = oracles.best_approximation(np.float64(z), 2)
    assert oracles.relative_error(got, want) < 3e-6
    np.testing.assert_allclose(same, got, atol=1e-6)


@pytest.mark.parametrize('method', ['one_sided', 'zero'])
@pytest.mark.parametrize('dtype', [jnp.float32, jnp.bfloat16])
def test_padding_changes_no_old_number(method, dtype):
  params = _params(dtype)
  new = lora.pad_rank(params, {'m[02]': 5}, 3, method=method)
  assert _ranks(new) == [5, 2, 5]
  for name in ('m0', 'm2'):
    a, b = new[name]['lora_a'], new[name]['lora_b']
    assert a.dtype == b.dtype == dtype
    np.testing.assert_array_equal(a[:, :3], params[name]['lora_a'])
    np.testing.assert_array_equal(b[:3], params[name]['lora_b'])
    assert not b[3:].any()
    assert bool(a[:, 3:].any()) == (method == 'one_sided')


def test_new_columns_are_orthogonal_and_as_long_as_the_old():
  params = _params()
  new = lora.pad_rank(params, {'m[02]': 5}, 3)
  old, more = np.split(np.asarray(new['m0']['lora_a']), [3], 1)
  length = np.linalg.norm(old, axis=0).mean()
  np.testing.assert_allclose(more.T @ more, np.eye(2) * length**2, atol=1e-6)
  np.testing.assert_allclose(old.T @ more, 0, atol=1e-6)
  # Other columns for every module and every key, the same for the same key.
  other = lora.pad_rank(params, {'m[02]': 5}, 4)
  assert np.abs(other['m0']['lora_a'] - new['m0']['lora_a']).max() > 0.01
  assert np.abs(new['m2']['lora_a'] - new['m0']['lora_a'])[:, 3:].max() > 0.01
  again = lora.pad_rank(params, {'m[02]': 5}, jax.random.key(3))
  jax.tree.map(np.testing.assert_array_equal, again, new)


def test_frames_see_the_new_input_directions_only():
  """What the docstring says of the tangent space at a padded point."""
  params = _params()
  ranks = {}
  for method in ('one_sided', 'zero'):
    new = lora.pad_rank(params, {'m0': 5}, 3, method=method)
    left, right = test_utils.factors_of(new)[0]
    frame = fixed_rank.frame(
      fixed_rank.Factors(jnp.asarray(left), jnp.asarray(right))
    )
    ranks[method] = [
      round(float(jnp.sum(jnp.square(q)))) for q in (frame.left, frame.right)
    ]
  assert ranks == {'one_sided': [3, 5], 'zero': [3, 3]}


@pytest.mark.parametrize('method', ['one_sided', 'zero'])
def test_padded_adapters_train_on_the_manifold(method):
  """One step of full-rank gradients fills the new rank with either method."""
  params = {'m0': _params()['m0']}
  new = lora.pad_rank(params, 5, 3, method=method)
  tx = optax.chain(optax.scale(-0.1), prism_optax.retract())
  rng = np.random.default_rng(5)
  gradient = rng.normal(size=(8, 6))  # In Z.
  grads = test_utils.factor_gradients(
    test_utils.factors_of(new), [gradient], dtype=jnp.float32
  )
  coordinates = prism_optax.tangent_coordinates(new)(grads)
  updates, _ = tx.update(coordinates, tx.init(new), new)
  (z,) = test_utils.products_of(optax.apply_updates(new, updates))
  s = np.linalg.svd(z, compute_uv=False)
  assert s[4] > 0.02  # Steps are of size 0.1, rounding of size 1e-7.


def test_padded_directions_and_optimizers_that_add():
  """Gradients of the factors: one-sided columns get one, zero columns none."""
  params = {'m0': _params()['m0']}
  for method, expected in (('one_sided', True), ('zero', False)):
    new = lora.pad_rank(params, 5, 3, method=method)
    grads = test_utils.factor_gradients(
      test_utils.factors_of(new), [np.ones((8, 6))], dtype=jnp.float32
    )
    assert bool(grads['m0']['lora_b'][3:].any()) == expected
    assert not grads['m0']['lora_a'][:, 3:].any()


def test_padding_undoes_no_truncation_but_keeps_it():
  params = _params()
  new = lora.pad_rank(lora.truncate(params, 1), {'m0': 3, 'm1': 2, 'm2': 3}, 0)
  assert _ranks(new) == _ranks(params)
  for got, z in zip(
    test_utils.products_of(new), test_utils.products_of(params), strict=True
  ):
    np.testing.assert_allclose(got, oracles.best_approximation(z, 1), atol=1e-6)


def test_difference_is_the_change_of_the_matrix(x64):
  """Of twice the rank; where that is too much, of all there is."""
  params, initial = _params(jnp.float64, 1), _params(jnp.float64, 2)
  wide = {'m0': {'lora_a': jnp.ones((4, 3)), 'lora_b': jnp.ones((3, 5))}}
  params['wide'] = {'lora_a': jnp.eye(4, 3), 'lora_b': 2 * jnp.eye(3, 5)}
  initial['wide'] = wide['m0']
  new = lora.difference(params, initial)
  assert _ranks(new) == [6, 4, 6, 4]
  for name in ('m0', 'm1', 'm2', 'wide'):
    got, z, z0 = (x[name]['lora_a'] @ x[name]['lora_b'] for x in
                  (new, params, initial))  # fmt: skip
    np.testing.assert_allclose(got, z - z0, atol=1e-13)
  np.testing.assert_array_equal(new['extra'], params['extra'])


@pytest.mark.parametrize(
  ('call', 'match'),
  [
    (lambda p: lora.truncate(p, 3), "<= 2, that of 'm1', got rank=3.*pad_rank"),
    (lambda p: lora.truncate(p, 0), 'rank=0'),
    (lambda p: lora.truncate(p, {'m9': 1, 'm0': 1}), r"\['m9'\] match no mod"),
    (lambda p: lora.pad_rank(p, 2, 0), "3 <= rank <= 6 for 'm0', got rank=2"),
    (lambda p: lora.pad_rank(p, 6, 0), "2 <= rank <= 5 for 'm1', got rank=6"),
    (lambda p: lora.pad_rank(p, 3, 0.5), 'prng_key'),
    (lambda p: lora.pad_rank(p, 3, 0, method='random'), "method='random'"),
    (lambda p: lora.difference(p, {'m0': p['m0']}), 'structure and shapes'),
    (lambda p: lora.difference(p, lora.truncate(p, 1)), 'structure and shapes'),
  ],
)
def test_refusals(call, match):
  with pytest.raises(ValueError, match=match):
    call(_params())
