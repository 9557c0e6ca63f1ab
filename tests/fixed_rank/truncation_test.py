"""Truncation against the SVD of the dense matrix."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prism_optax import fixed_rank
from prism_optax.fixed_rank import _points
from tests.oracles import oracles

pytestmark = pytest.mark.usefixtures('x64')
EPS = np.finfo(np.float64).eps


def _truncated(left, right, rank):
  new = _points.nearest_of_rank(
    fixed_rank.Factors(jnp.asarray(left), jnp.asarray(right)), rank
  )
  return np.asarray(new.left), np.asarray(new.right)


@pytest.mark.parametrize('condition', [1.0, 1e6])
@pytest.mark.parametrize('rank', [1, 2, 4])
def test_the_best_approximation_in_the_balanced_gauge(rank, condition):
  rng = np.random.default_rng(rank)
  factors = oracles.random_factors(rng, 9, 7, 4, condition=3.0)
  gauge = oracles.random_gauge(rng, 4, condition, 10.0)
  left, right = _truncated(*oracles.change_gauge(factors, gauge), rank)
  want = oracles.best_approximation(factors[0] @ factors[1].T, rank)
  # The given factors carry the rounding that the gauge multiplies.
  assert oracles.relative_error(left @ right.T, want) < 50 * EPS * condition
  s = np.linalg.svd(want, compute_uv=False)[:rank]
  for x in (left, right):
    np.testing.assert_allclose(x.T @ x, np.diag(s), atol=50 * EPS * condition)


def test_more_columns_than_rows():
  """Two pairs side by side: a sum of two matrices."""
  rng = np.random.default_rng(0)
  left, right = rng.normal(size=(5, 8)), rng.normal(size=(6, 8))
  got = _truncated(left, right, 3)
  want = oracles.best_approximation(left @ right.T, 3)
  assert got[0].shape == (5, 3)
  assert got[1].shape == (6, 3)
  assert oracles.relative_error(got[0] @ got[1].T, want) < 100 * EPS


@pytest.mark.parametrize('zero', [0, 1])
@pytest.mark.parametrize('rank', [2, 3])
def test_a_zero_factor_leaves_the_largest_directions_of_the_other(zero, rank):
  rng = np.random.default_rng(1)
  pair = list(oracles.random_factors(rng, 8, 6, 3, condition=50.0))
  pair[zero] = 0 * pair[zero]
  new = _truncated(*pair, rank)
  assert not new[zero].any()
  u, s, _ = np.linalg.svd(pair[1 - zero], full_matrices=False)
  np.testing.assert_allclose(
    new[1 - zero] @ new[1 - zero].T,
    (u[:, :rank] * s[:rank] ** 2) @ u[:, :rank].T,
    atol=1e-14,
  )


def test_lost_rank_is_kept_on_one_side():
  rng = np.random.default_rng(2)
  left, right = oracles.random_factors(rng, 8, 6, 4)
  left = left @ np.diag([1.0, 1.0, 0.0, 0.0])
  new_left, new_right = _truncated(left, right, 3)
  assert oracles.relative_error(new_left @ new_right.T, left @ right.T) < 1e-14
  assert np.linalg.matrix_rank(new_left) == 2
  assert np.linalg.matrix_rank(new_right) == 3
  gram = new_right.T @ new_right
  assert np.abs(gram - np.diag(np.diag(gram))).max() < 1e-14


def test_directions_lost_on_different_sides_are_not_put_together():
  """left (., ., 0) and right (., 0, .): Z has rank 1, either factor rank 2."""
  rng = np.random.default_rng(4)
  left, right = oracles.random_factors(rng, 8, 6, 3, 3.0)
  left, right = left * [1.0, 1.0, 0.0], right * [1.0, 0.0, 1.0]
  new_left, new_right = _truncated(left, right, 3)
  assert oracles.relative_error(new_left @ new_right.T, left @ right.T) < 1e-14
  ranks = [np.linalg.matrix_rank(x) for x in (new_left, new_right)]
  assert ranks == [1, 2]  # At a tie the right, input, side stays.


@pytest.mark.parametrize('alive', [0, 1, 2, 4])
def test_the_first_columns_are_the_truncation_to_fewer(alive):
  """Also the columns that one factor keeps: the largest come first."""
  rng = np.random.default_rng(5)
  left, right = oracles.random_factors(rng, 8, 6, 4, 20.0)
  left = left * (np.arange(4) < alive)
  wide, narrow = _truncated(left, right, 4), _truncated(left, right, 2)
  for x, y in zip(wide, narrow, strict=True):
    x = x[:, :2]
    np.testing.assert_allclose(x @ x.T, y @ y.T, atol=1e-13)


def test_nothing_comes_of_nothing():
  left, right = _truncated(np.zeros((4, 2)), np.zeros((3, 2)), 2)
  assert not left.any()
  assert not right.any()


def test_leading_axes_jit_and_mixed_batches():
  """One deficient matrix in a batch does not touch its neighbours."""
  rng = np.random.default_rng(3)
  pairs = [oracles.random_factors(rng, 7, 5, 3, 3.0) for _ in range(4)]
  pairs[1] = (0 * pairs[1][0], pairs[1][1])
  left, right = (
    np.stack(x).reshape(2, 2, -1, 3) for x in zip(*pairs, strict=True)
  )
  truncate = jax.jit(lambda x: _points.nearest_of_rank(x, 2))
  new = truncate(fixed_rank.Factors(jnp.asarray(left), jnp.asarray(right)))
  got = np.asarray(new.left @ new.right.mT).reshape(4, 7, 5)
  for z, pair in zip(got, pairs, strict=True):
    want = oracles.best_approximation(pair[0] @ pair[1].T, 2)
    np.testing.assert_allclose(z, want, atol=1e-14)
  assert np.linalg.matrix_rank(new.right[0, 1]) == 2


@pytest.mark.parametrize('rank', [0, 4, 2.0])
def test_bad_ranks_are_refused(rank):
  with pytest.raises(ValueError, match=f'rank={rank}'):
    _truncated(np.ones((5, 3)), np.ones((6, 3)), rank)


def test_a_rank_above_either_side_is_refused():
  wide, narrow = np.ones((6, 4)), np.ones((3, 4))
  for factors in ((wide, narrow), (narrow, wide)):
    with pytest.raises(ValueError, match='rank=4'):
      _truncated(*factors, 4)


def test_factors_that_do_not_fit_are_refused():
  with pytest.raises(ValueError, match=r'\(5, 3\).*\(6, 2\)'):
    _truncated(np.ones((5, 3)), np.ones((6, 2)), 1)
