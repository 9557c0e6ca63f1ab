"""Truncated, canonical and subtracted adapters, against dense matrices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prism_optax import lora
from tests import cases
from tests.oracles import oracles

EPS = np.finfo(np.float64).eps
truncate = jax.jit(lora.truncate, static_argnums=1)


whole = pytest.mark.parametrize('canonical', [False, True])


def _cut(left, right, rank, canonical=False):
  """The factors of one module, cut to this rank, in the canonical gauge.

  Which has a function of its own, where the rank stays.
  """
  tree = {'lora_a': np.asarray(right), 'lora_b': np.swapaxes(left, -1, -2)}
  canonical = canonical and rank == left.shape[-1]
  new = lora.canonicalize(tree) if canonical else truncate(tree, rank)
  return np.swapaxes(new['lora_b'], -1, -2), np.asarray(new['lora_a'])


def _off_diagonal(gram):
  return np.abs(gram - np.diag(np.diag(gram))).max()


@whole
@pytest.mark.parametrize('condition', [1.0, 1e6])
@pytest.mark.parametrize('rank', [1, 4])
def test_the_best_approximation_in_the_balanced_gauge(
  x64, rank, condition, canonical
):
  rng = np.random.default_rng(rank)
  factors = oracles.random_factors(rng, 9, 7, 4, condition=3.0)
  gauge = oracles.random_gauge(rng, 4, condition, 10.0)
  pair = oracles.change_gauge(factors, gauge)
  left, right = _cut(*pair, rank, canonical)
  want = oracles.best_approximation(factors[0] @ factors[1].T, rank)
  # The given factors carry the rounding that the gauge multiplies.
  assert oracles.relative_error(left @ right.T, want) < 50 * EPS * condition
  s = np.linalg.svd(want, compute_uv=False)[:rank]
  for x in (left, right):
    np.testing.assert_allclose(x.T @ x, np.diag(s), atol=50 * EPS * condition)


@whole
@pytest.mark.parametrize('zero', [0, 1])
@pytest.mark.parametrize('rank', [2, 3])
def test_a_zero_factor_leaves_the_largest_directions_of_the_other(
  x64, zero, rank, canonical
):
  rng = np.random.default_rng(1)
  pair = list(oracles.random_factors(rng, 8, 6, 3, condition=50.0))
  pair[zero] = 0 * pair[zero]
  new = _cut(*pair, rank, canonical)
  assert not new[zero].any()
  u, s, _ = np.linalg.svd(pair[1 - zero], full_matrices=False)
  np.testing.assert_allclose(
    new[1 - zero] @ new[1 - zero].T,
    (u[:, :rank] * s[:rank] ** 2) @ u[:, :rank].T,
    atol=1e-14,
  )
  assert _off_diagonal(new[1 - zero].T @ new[1 - zero]) < 1e-12
  nothing = _cut(*(0 * x for x in pair), rank, canonical)
  assert not any(x.any() for x in nothing)


@whole
@pytest.mark.parametrize(
  ('of_left', 'of_right', 'ranks'),
  [
    ([1, 1, 0], [1, 1, 1], [2, 3]),  # Still trainable.
    ([1, 1, 1], [0, 1, 1], [3, 2]),
    # Z has rank 1, either factor rank 2. At a tie the right, input, side stays.
    ([1, 1, 0], [1, 0, 1], [1, 2]),
  ],
)
def test_directions_lost_on_different_sides_are_not_put_together(
  x64, of_left, of_right, ranks, canonical
):
  rng = np.random.default_rng(4)
  left, right = oracles.random_factors(rng, 8, 6, 3, 3.0)
  turn = oracles.random_orthonormal(rng, 3, 3)
  pair = left * of_left @ turn, right * of_right @ turn
  new = _cut(*pair, 3, canonical)
  assert oracles.relative_error(new[0] @ new[1].T, pair[0] @ pair[1].T) < 1e-13
  assert [np.linalg.matrix_rank(x) for x in new] == ranks
  for x, old, rank in zip(new, pair, ranks, strict=True):
    # What one has alone stays where it was; the other has zeros there.
    together, alone = map(np.linalg.matrix_rank, (np.hstack([x, old]), old))
    assert together == alone
    assert not x[:, rank:].any()
    assert _off_diagonal(x.T @ x) < 1e-12


# Two modules of one shape, one of another; in float32, one is wider than rank.
SHAPES = [(8, 6, 3), (5, 9, 2), (8, 6, 3)]


@cases.fast_first(
  ('dtype', 'rank'), [(jnp.float32, 2)], [(jnp.float32, 2), (jnp.float64, 4)]
)
def test_trees_keep_their_types_other_leaves_and_lower_ranks(x64, dtype, rank):
  params = cases.adapters(SHAPES, condition=4.0, dtype=dtype)
  new = jax.device_get(truncate(params, rank))
  ranks = [left.shape[-1] for left, _ in cases.factors_of(new)]
  assert ranks == [min(rank, r) for _, _, r in SHAPES]
  assert {x.dtype for x in jax.tree.leaves(new)} == {jnp.dtype(dtype)}
  for got, z in zip(
    cases.products_of(new), cases.products_of(params), strict=True
  ):
    want = oracles.best_approximation(z, rank)
    assert oracles.relative_error(got, want) < 40 * jnp.finfo(dtype).eps
  for left, right in cases.factors_of(new):
    np.testing.assert_allclose(left.T @ left, right.T @ right, atol=1e-6)
  np.testing.assert_array_equal(new['extra'], params['extra'])


def test_each_leaf_keeps_its_type_in_the_canonical_gauge():
  params = cases.normal(
    {'lora_a': np.zeros((4, 6, 2)), 'lora_b': np.zeros((4, 2, 5))}, 3
  )
  params = {
    'lora_a': np.float32(params['lora_a']),
    'lora_b': jnp.bfloat16(params['lora_b']),
  }
  new = lora.canonicalize(params, layout=lora.Layout(scale=8.0))
  assert [new[k].dtype for k in params] == [x.dtype for x in params.values()]
  product = [
    np.float64(p['lora_a']) @ np.float64(p['lora_b']) for p in (new, params)
  ]
  np.testing.assert_allclose(*product, atol=0.05)  # bfloat16 leaf.


def test_the_canonical_gauge_binds_no_factor_to_a_device():
  """A step would be compiled for what is bound, and again for what is not."""
  params = {'lora_a': jnp.ones((6, 2)), 'lora_b': jnp.zeros((2, 5))}
  for tree in (params, jax.device_put(params, jax.devices()[0])):
    for k, x in lora.canonicalize(tree).items():
      assert (x.committed, x.sharding) == (tree[k].committed, tree[k].sharding)


def test_stacked_modules_and_other_axes():
  """A scanned module with its stack axis second, as nn.scan can make it."""
  shapes = {'w_a': np.zeros((6, 4, 3)), 'w_b': np.zeros((3, 4, 2, 5))}
  params = cases.normal(shapes, 1, dtype=np.float32)  # in, L, r; r, L, *out
  layout = [lora.Pair('w_a', 'w_b', lora.Layout(2, 0, (1,), (1,), scale=4.0))]

  @jax.jit
  def work(params):
    new = lora.truncate(params, 2, layout=layout)
    other = jax.tree.map(jnp.sin, new)
    return new, other, lora.difference(new, other, layout=layout)

  new, other, wider = jax.device_get(work(params))
  assert [x.shape for x in new.values()] == [(6, 4, 2), (2, 4, 2, 5)]
  assert [x.shape for x in wider.values()] == [(6, 4, 4), (4, 4, 2, 5)]
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
  params, initial = (
    cases.adapters(SHAPES, seed, dtype=jnp.float64) for seed in (1, 2)
  )
  for name, n, m in (('m3', 4, 5), ('m4', 5, 4)):
    params[name] = {'lora_a': np.eye(n, 3), 'lora_b': 2 * np.eye(3, m)}
    initial[name] = {'lora_a': np.ones((n, 3)), 'lora_b': np.ones((3, m))}
  new = jax.device_get(jax.jit(lora.difference)(params, initial))
  assert [x.shape[-1] for x, _ in cases.factors_of(new)] == [6, 4, 6, 4, 4]
  for got, z, z0 in zip(
    *map(cases.products_of, (new, params, initial)), strict=True
  ):
    np.testing.assert_allclose(got, z - z0, atol=1e-13)
  np.testing.assert_array_equal(new['extra'], params['extra'])


def test_stacks_come_apart_without_sums_and_refuse_another_tree():
  """Of k slices a derivative would add k arrays as large as the stack."""
  params = cases.adapters(SHAPES)
  stacked = lora.stack(params)

  def loss(stacked):
    return sum(map(jnp.sum, jax.tree.leaves(lora.unstack(stacked, params))))

  text = str(jax.make_jaxpr(jax.grad(loss))(stacked))
  assert 'concatenate' in text
  assert ' pad' not in text
  assert 'add_any' not in text
  del params['m2']
  with pytest.raises(ValueError, match='stack\\(like\\)'):
    lora.unstack(stacked, params)
  with pytest.raises(ValueError, match='structure and shapes'):
    lora.unstack(params, params)
