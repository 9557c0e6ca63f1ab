"""Lifts, a sum whose matrices undo each other, groups of modules at once.

What else is done with sums, trajectories compare with dense matrices
(tests/aliases/prism_test.py) and with arrays (tests/transforms/chain_test.py).
"""

import jax
import numpy as np
import pytest

from prism_optax import fixed_rank
from prism_optax._linalg._products import Tall
from prism_optax.fixed_rank import Tangent, _lifts
from prism_optax.fixed_rank._points import map_ranks, nearest_of_rank
from prism_optax.fixed_rank._tangents import as_sum, sum_at
from tests import cases
from tests.fixed_rank import cases as g
from tests.oracles import oracles

pytestmark = pytest.mark.usefixtures('x64')


# Lifts: steps of the factors that move Z by a tangent vector.


@g.compile_once
def lifted(frame, tangent):
  """The shortest lift, and the tangent vector of it."""
  steps = _lifts.lift(frame, tangent)
  return steps, _lifts.tangent_from_steps(frame, steps)


def check_lifts(factors, condition, exact=True):
  frame = g.compiled.frame(factors)
  tangent = g.random_tangent(9, frame)
  dense = g.embed(frame, tangent)
  # The steps are `condition` times larger than what they lift.
  tolerance = 100 * g.EPS[np.float64] * condition
  steps, back = lifted(frame, tangent)
  moved = steps.left @ factors.right.T + factors.left @ steps.right.T
  assert oracles.relative_error(moved, dense) < tolerance
  assert oracles.relative_error(g.embed(frame, back), dense) < tolerance
  if exact:  # The Kronecker system has the square of the condition.
    expected = oracles.horizontal_lift(factors, steps)
    for x, y in zip(steps, expected, strict=True):
      assert oracles.relative_error(x, y) < tolerance * condition


@g.shapes
@g.conditions
def test_the_shortest_lift_gives_the_tangent_back(m, n, rank, condition):
  factors, _, _ = g.random_problem(8, m, n, rank, condition)
  check_lifts(factors, condition, exact=condition <= 1e3)


@g.deficient
def test_lifts_at_factors_of_lower_rank(kind):
  # Elsewhere inverse cores choose no shortest lift along what moves nothing.
  check_lifts(g.deficient_factors(17, kind), 1e3, exact='zero' in kind)


def test_small_singular_values_are_kept():
  """At the square of the condition number, 1e18, they would be lost."""
  a = np.diag([1.0, 1e-9])[None]
  squares = np.array([[2, 1], [1, 2e-18]])[None]  # The equation for ones.
  solve = jax.vmap(_lifts.sylvester_of_grams, (None, None, 0))  # One is shared.
  w = jax.jit(solve)(a, a, squares[None])
  cases.assert_close(w, np.ones((1, 1, 2, 2)), 1e-9)
  # One of them is zero, up to rounding.
  w = jax.jit(solve)(*2 * [np.diag([1, 1e-20])[None]], np.ones((1, 1, 2, 2)))
  cases.assert_close(w, np.array([[[[0.5, 1], [1, 0]]]]), 1e-9)
  # Squares of one, or of both, underflow.
  small, c = 1e-170 * np.eye(2)[None], np.ones((1, 1, 2, 2))
  w = jax.jit(solve)(small, np.eye(2)[None], c)
  cases.assert_close(w, c, 1e-9)
  w = jax.jit(solve)(small, small, 1e-200 * c)
  cases.assert_close(w / 5e139, c, 1e-9)


# Sums.


@jax.jit
def _undone(factors, columns, undo):
  frame = fixed_rank.frame(factors)
  columns = fixed_rank.project(frame, columns)
  x = sum_at(
    frame,
    ((columns.left, undo),),
    ((columns.right, undo),),
    (frame.left.T @ columns.left @ undo, frame.right.T @ columns.right @ undo),
  )
  return columns, fixed_rank.retraction(frame, x)


@pytest.mark.slow
def test_matrices_that_undo_the_spread_of_the_columns():
  """As a preconditioner's do: condition 1e4 in V, 1e2 in its root.

  In float32 the squares of columns of such sizes keep three or four digits of
  the smallest one. They only choose a basis, and the step is written in
  whatever basis they choose: off by 2e-5 of itself (2e-6 if it is multiplied
  out first).
  """
  factors, _, _ = g.random_problem(10, 200, 150, 4, 2.0)
  rng = np.random.default_rng(11)
  factors = g.as_factors(oracles.balance(factors), np.float32)
  turn = oracles.random_orthonormal(rng, 4, 4)
  spread = np.geomspace(1, 1e-2, 4)
  columns = Tangent(
    *(np.float32(rng.normal(size=q.shape) * spread @ turn.T) for q in factors)
  )
  undo = np.float32(0.01 * (turn / spread) @ turn.T)
  with jax.enable_x64(False):
    columns, new = jax.device_get(_undone(factors, columns, undo))
  wide = g.compiled.frame(g.as_factors(factors))
  step = Tangent(*(np.float64(c) @ np.float64(undo) for c in columns))
  exact = oracles.best_approximation(
    g.product(factors) + g.embed(wide, step), 4
  )
  size = np.linalg.norm(exact - g.product(factors))
  assert np.linalg.norm(g.product(new) - exact) < 1e-4 * size


@g.deficient
def test_products_of_a_sum_are_those_of_the_multiplied_out(kind):
  """Of two terms that were multiplied differently, and of a shift."""
  frame = g.compiled.frame(g.deficient_factors(17, kind))
  x, y = (as_sum(frame, g.random_tangent(i, frame)).left for i in (4, 5))
  turn, shift = np.random.default_rng(0).normal(size=(2, *x.along.shape))
  x = (x @ turn + y).shifted(shift)
  whole = x.multiply_out()
  cases.assert_close(x.along, frame.left.mT @ whole, 1e-12)
  cases.assert_close(x.squares(), whole.mT @ whole, 1e-12)


def test_a_rank_above_either_side_is_refused():
  wide, narrow = np.ones((6, 4)), np.ones((3, 4))
  for factors in ((wide, narrow), (narrow, wide)):
    with pytest.raises(ValueError, match='rank=4'):
      nearest_of_rank(fixed_rank.Factors(*factors), 4)


# Groups of modules.


def test_one_call_serves_all_groups_of_one_rank():
  """Stacks of several heights, one of another rank, with n = r, with m = r."""
  called, rng = [], np.random.default_rng(42)
  sizes = (7, 3, 3), (8, 6, 3), (5, 9, 3), (8, 6, 2), (3, 7, 3)
  pairs = [
    g.as_factors((rng.normal(size=(k, m, r)), rng.normal(size=(k, n, r))))
    for k, (m, n, r) in enumerate(sizes, 1)
  ]

  def noted(pair):
    called.append([x.shape[-1] for x in pair if isinstance(x, Tall)])
    return pair

  cases.assert_same_bits(map_ranks(noted, pairs), tuple(pairs))
  # The others get arrays as they are.
  assert sorted(called) == [[], [], [], [3, 3]]
