"""Tangent vectors that are not multiplied out, against those that are."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prism_optax import fixed_rank
from prism_optax.fixed_rank import Combination, RankMatrices, Tangent
from tests.fixed_rank.cases import (
  EPS,
  as_factors,
  conditions,
  deficient,
  deficient_factors,
  product,
  random_problem,
  shapes,
)
from tests.oracles import oracles

pytestmark = pytest.mark.usefixtures('x64')


def _normal(rng, *shape):
  return jnp.asarray(rng.standard_normal(shape))


def _any_tangent(rng, frame):
  return Tangent(*(_normal(rng, *q.shape) for q in (frame.left, frame.right)))


def _combinations(rng, frame):
  """Of every kind: its own columns, projected, and with all coefficients."""
  x, y = (_any_tangent(rng, frame) for _ in range(2))
  projected = fixed_rank.projection(frame, y)
  rank = frame.left.shape[-1]
  square = RankMatrices(*(_normal(rng, rank, rank) for _ in range(2)))
  return {
    'its own': fixed_rank.combination(frame, x),
    'projected': projected,
    'shifted': projected._replace(weights=square, shift=square),
    'inside the tangent space': Combination(
      fixed_rank.project(frame, x),
      RankMatrices(None, fixed_rank.combination(frame, x).inside.right),
      square,
      RankMatrices(None, square.right),
    ),
  }


def _dense(frame, x):
  """By definition, in NumPy: columns @ weights + Q @ shift."""
  out = []
  for q, columns, weights, shift in zip(
    frame[:2], x.columns, x.weights, x.shift, strict=True
  ):
    side = np.asarray(columns) @ np.asarray(weights)
    if shift is not None:
      side = side + np.asarray(q) @ np.asarray(shift)
    out.append(side)
  return out


@shapes
@conditions
def test_products_are_those_of_the_coordinates(m, n, rank, condition):
  factors, _, _ = random_problem(3, m, n, rank, condition)
  frame = fixed_rank.frame(factors)
  rng = np.random.default_rng(4)
  for kind, x in _combinations(rng, frame).items():
    along, squares = fixed_rank.products(frame, x)
    explicit = fixed_rank.multiply_out(frame, x)
    for i, side in enumerate(_dense(frame, x)):
      np.testing.assert_allclose(explicit[i], side, atol=1e-12, err_msg=kind)
      size = 100 * EPS[np.float64] * np.linalg.norm(side) ** 2 + 1e-12
      np.testing.assert_allclose(
        squares[i], side.T @ side, atol=size, err_msg=kind
      )
      np.testing.assert_allclose(
        along[i], np.asarray(frame[i]).T @ side, atol=1e-12, err_msg=kind
      )


def _check_projection(factors):
  frame = fixed_rank.frame(factors)
  x = _any_tangent(np.random.default_rng(6), frame)
  lazy = fixed_rank.multiply_out(frame, fixed_rank.projection(frame, x))
  for side, expected in zip(lazy, fixed_rank.project(frame, x), strict=True):
    np.testing.assert_allclose(side, expected, atol=1e-13)


@shapes
@conditions
def test_a_projection_is_the_projection(m, n, rank, condition):
  _check_projection(random_problem(5, m, n, rank, condition)[0])


@deficient
def test_a_projection_hides_what_a_factor_of_lower_rank_does(kind):
  _check_projection(as_factors(deficient_factors(7, 9, 6, 3, kind)))


@shapes
@pytest.mark.parametrize('size', [1e-6, 0.03, 3.0])
@pytest.mark.parametrize('method', ['svd', 'second_order'])
def test_retraction_of_a_combination(m, n, rank, size, method):
  """The same point as from its coordinates, for small and large steps."""
  factors, _, _ = random_problem(8, m, n, rank, 3.0)
  frame = fixed_rank.frame(factors)
  rng = np.random.default_rng(9)
  for kind, x in _combinations(rng, frame).items():
    scale = size * np.linalg.norm(product(factors)) / rank
    x = x._replace(
      weights=jax.tree.map(lambda w, s=scale: s * w, x.weights),
      shift=jax.tree.map(lambda w, s=scale: s * w, x.shift),
    )
    explicit = fixed_rank.multiply_out(frame, x)
    new = fixed_rank.retract(frame, x, method=method)
    expected = fixed_rank.retract(frame, explicit, method=method)
    error = oracles.relative_error(product(new), product(expected))
    assert error < 1e-12, kind


def test_weights_that_undo_the_spread_of_the_columns():
  """As a preconditioner's do: condition 1e4 in V, 1e2 in its root.

  In float32 the squares of columns of such sizes keep three or four digits of
  the smallest one. They only choose a basis, and the step is written in
  whatever basis they choose: off by 2e-5 of itself (2e-6 if it is multiplied
  out first).
  """
  factors, _, _ = random_problem(10, 200, 150, 4, 2.0)
  rng = np.random.default_rng(11)
  with jax.enable_x64(False):
    factors = as_factors(
      oracles.balance(tuple(np.asarray(f) for f in factors)), np.float32
    )
    frame = fixed_rank.frame(factors)
    turn = oracles.random_orthonormal(rng, 4, 4)
    spread = np.geomspace(1, 1e-2, 4)
    columns = fixed_rank.project(
      frame,
      Tangent(
        *(
          jnp.asarray(
            rng.standard_normal(q.shape) * spread @ turn.T, jnp.float32
          )
          for q in (frame.left, frame.right)
        )
      ),
    )
    undo = jnp.asarray(0.01 * (turn / spread) @ turn.T, jnp.float32)
    x = fixed_rank.combination(frame, columns)
    x = x._replace(weights=RankMatrices(undo, undo))
    new = fixed_rank.retract(frame, x)
  with jax.enable_x64(True):
    wide = fixed_rank.frame(as_factors(factors, np.float64))
    step = Tangent(*(np.float64(c) @ np.float64(undo) for c in columns))
    target = product(as_factors(factors, np.float64)) + np.asarray(
      fixed_rank.embed(wide, Tangent(*map(jnp.asarray, step)))
    )
  exact = oracles.best_approximation(target, 4)
  size = np.linalg.norm(exact - product(as_factors(factors, np.float64)))
  error = np.linalg.norm(product(as_factors(new, np.float64)) - exact)
  assert error < 1e-4 * size
