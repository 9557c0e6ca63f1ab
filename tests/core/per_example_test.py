"""Weights and sums of clipped examples, in units of the clip norm."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from dp_accounting import NeighboringRelation

from prism_optax import _per_example


def _weights(norms, padding=None):
  squared = jnp.square(jnp.asarray(norms, jnp.float32))
  return _per_example.clip_weights(squared, padding)


def test_weights_are_min_of_one_and_inverse_norm():
  weights, counts = _weights([0.0, 0.5, 1.0, 4.0, 1e10])
  np.testing.assert_allclose(weights, [1, 1, 1, 0.25, 1e-10], rtol=2e-6)
  assert counts.all()


def test_clipped_norms_stay_inside_the_bound_in_float32():
  """Never above one, although rounding errors go both ways."""
  rng = np.random.default_rng(0)
  x = (rng.normal(size=(2000, 333)) * rng.uniform(0.01, 3, (2000, 1))).astype(
    np.float32
  )
  squared = _per_example.squared_norms([jnp.asarray(x)], 1.0)
  weights, _ = _per_example.clip_weights(squared, None)
  clipped = np.asarray(weights[:, None] * x, np.float64)
  norms = np.linalg.norm(clipped, axis=1)
  assert norms.max() <= 1
  assert norms.max() >= 1 - 2e-6


def test_norm_of_a_million_entries_is_accurate_to_the_margin():
  """Constant entries: the worst case of a running float32 sum."""
  x = jnp.full((1, 1_000_000), 0.3, jnp.float32)
  got = float(_per_example.squared_norms([x], 1.0)[0])
  exact = 1e6 * float(np.float32(0.3)) ** 2
  assert abs(got / exact - 1) < 5e-7  # Half of the margin's square.


def test_what_is_not_finite_or_padding_counts_as_zero():
  weights, counts = _weights(
    [np.nan, np.inf, 1e30, 1.0, 2.0], jnp.array([0, 0, 0, 1, 0], bool)
  )
  np.testing.assert_array_equal(counts, [False, False, False, False, True])
  np.testing.assert_allclose(weights, [0, 0, 0, 0, 0.5], rtol=2e-6)
  x = jnp.array([np.nan, np.inf, -np.inf, 7.0, 3.0])[:, None]
  np.testing.assert_allclose(
    _per_example.weighted_sum(x, weights, counts), [1.5], rtol=2e-6
  )
  sums = _per_example.weighted_sums([x, x[:, :0], 2 * x], weights, counts)
  np.testing.assert_allclose(sums[0], [1.5], rtol=2e-6)
  assert sums[1].shape == (0,)
  np.testing.assert_allclose(sums[2], [3.0], rtol=2e-6)


@pytest.mark.parametrize('jit', [False, True])
def test_sums_in_turn_are_the_sums(jit):
  """On CPU they are products of matrices: the same to rounding."""
  rng = np.random.default_rng(1)
  tree = {
    name: jnp.asarray(rng.normal(size=(37, *shape)), jnp.float32)
    for name, shape in {'a': (5, 3), 'b': (), 'c': (2, 4, 3)}.items()
  }
  weights = jnp.asarray(rng.uniform(0, 1, 37), jnp.float32)
  counts = jnp.asarray(rng.uniform(0, 1, 37) > 0.3)
  weights = jnp.where(counts, weights, 0)
  tree = jax.tree.map(lambda x: x.at[~counts].set(jnp.inf), tree)
  fn = _per_example.weighted_sums
  sums = (jax.jit(fn) if jit else fn)(tree, weights, counts)
  for name, x in tree.items():
    kept = np.float64(x)[np.asarray(counts)]
    exact = np.tensordot(np.float64(weights)[np.asarray(counts)], kept, 1)
    assert sums[name].shape == exact.shape
    np.testing.assert_allclose(sums[name], exact, atol=5e-6)


def test_sums_in_turn_take_the_memory_of_one_leaf():
  """Each copies what counts of its leaf; not all leaves do at once."""
  leaf = jax.ShapeDtypeStruct((16, 1000, 8), jnp.float32)
  row = jax.ShapeDtypeStruct((16,), jnp.float32)
  compiled = (
    jax.jit(_per_example._sums_in_turn)
    .lower([leaf] * 12, row, jax.ShapeDtypeStruct((16,), bool))
    .compile()
  )
  one = leaf.size * 4
  assert compiled.memory_analysis().temp_size_in_bytes < 2.5 * one


def test_units_of_the_clip_norm_hide_no_norm():
  """Squares of 1e-25 vanish in float32; against C = 1e-24 they must not."""
  x = jnp.full((1, 10_000), 1e-25, jnp.float32)
  squared = _per_example.squared_norms([x], 1e-24)
  assert float(squared[0]) == pytest.approx(100.0, rel=1e-5)


def test_padding_of_another_length_is_refused():
  with pytest.raises(ValueError, match=r'is_padding_example.*\(3,\).*\(2,\)'):
    _weights([1.0, 2.0, 3.0], jnp.zeros(2, bool))


def test_sensitivity_by_relation():
  sensitivity = _per_example.sensitivity_of_sum(0.25)
  assert sensitivity() == 0.25
  assert sensitivity(NeighboringRelation.REPLACE_SPECIAL) == 0.25
  assert sensitivity(NeighboringRelation.REPLACE_ONE) == 0.5
  with pytest.raises(ValueError, match="'add'"):
    sensitivity('add')


def test_transformation_with_sensitivity_unpacks_and_chains():
  tx = _per_example.BoundedSensitivityTransformation(
    lambda p: optax.EmptyState(),
    lambda u, s, p=None, **_: (jax.tree.map(lambda x: 2 * x, u), s),
    _per_example.sensitivity_of_sum(1.0),
  )
  init, _ = tx
  assert init({}) == optax.EmptyState()
  chained = optax.chain(tx, optax.scale(3.0))
  updates, _ = chained.update(1.0, chained.init(1.0), is_padding_example=None)
  assert updates == 6.0
  assert tx.sensitivity() == 1.0
