"""Lifts, sums that are not multiplied out, and groups of modules at once.

Every operation on a sum is compared with the same one on dense float64
matrices. What a sum carries along, ``Q^T X``, must be right after each.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prism_optax import fixed_rank
from prism_optax._linalg._products import Tall
from prism_optax.fixed_rank import Tangent, _lifts, _retraction
from prism_optax.fixed_rank._points import map_ranks, nearest_of_rank
from prism_optax.fixed_rank._tangents import (
  TallSum,
  TangentSum,
  as_sum,
  projected,
  sum_at,
  transport_sum,
)  # fmt: skip
from tests import cases
from tests.fixed_rank import cases as g
from tests.oracles import oracles

pytestmark = pytest.mark.usefixtures('x64')


# Lifts: steps of the factors that move Z by a tangent vector.


@g.compile_once
def lifted(frame, tangent):
  """Some lift, the shortest one, and the tangent vectors of both."""
  lifts = [
    _lifts.lift(frame, tangent, horizontal=horizontal)
    for horizontal in (False, True)
  ]
  back = [_lifts.tangent_from_steps(frame, x) for x in lifts]
  return lifts, back, _retraction.dense_retraction(frame, tangent)


def check_lifts(factors, condition, exact=True):
  frame = g.compiled.frame(factors)
  tangent = g.random_tangent(9, frame)
  dense = g.embed(frame, tangent)
  # The steps are `condition` times larger than what they lift.
  tolerance = 100 * g.EPS[np.float64] * condition
  lifts, back, _ = lifted(frame, tangent)
  for (dl, dr), again in zip(lifts, back, strict=True):
    moved = dl @ factors.right.T + factors.left @ dr.T
    assert oracles.relative_error(moved, dense) < tolerance
    assert oracles.relative_error(g.embed(frame, again), dense) < tolerance
  if exact:  # The Kronecker system has the square of the condition.
    expected = oracles.horizontal_lift(factors, lifts[0])
    for x, y in zip(lifts[1], expected, strict=True):
      assert oracles.relative_error(x, y) < tolerance * condition


@g.shapes
@g.conditions
def test_both_lifts_give_the_tangent_back(m, n, rank, condition):
  factors, _, _ = g.random_problem(8, m, n, rank, condition)
  check_lifts(factors, condition, exact=condition <= 1e3)


@g.deficient
def test_lifts_at_factors_of_lower_rank(kind):
  # Elsewhere inverse cores choose no shortest lift along what moves nothing.
  check_lifts(g.deficient_factors(17, kind), 1e3, exact='zero' in kind)


def test_the_formula_that_readers_see_is_the_retraction():
  factors, _, _ = g.random_problem(3, 12, 9, 4, 3.0)
  frame = g.compiled.frame(factors)
  tangent = g.random_tangent(4, frame)
  *_, dense = lifted(frame, tangent)
  cases.assert_close(g.compiled.retract(frame, tangent), dense, 1e-12)


# Sums.


def _dense(x):
  """One side by definition, in NumPy: tall @ small, and basis @ shift."""
  out = sum(np.asarray(tall) @ np.asarray(small) for tall, small in x.terms)
  if x.shift is not None:
    out = out + np.asarray(x.basis) @ np.asarray(x.shift)
  return out


def _read(tree):
  """Every side of the sums in a tree, with what is read from it.

  Called while compiling: all of a test is one program for each shape, because
  the many small operations take longer one by one.
  """
  return jax.tree.map(
    lambda x: (x, x.multiply_out(), x.squares()),
    tree,
    is_leaf=lambda x: isinstance(x, TallSum),
  )


def _assert_is(read, expected, what):
  """A side against dense coordinates: products of entries of order one."""
  x, multiplied, squares = read
  expected = np.asarray(expected)
  size = np.linalg.norm(expected)
  # Lengths add up to 1e-12; a difference of squares is exact to its terms.
  close = {'atol': 1e-12 * max(size, 1.0), 'err_msg': what}
  np.testing.assert_allclose(_dense(x), expected, **close)
  np.testing.assert_allclose(multiplied, expected, **close)
  basis = np.asarray(x.basis)
  np.testing.assert_allclose(x.along, basis.T @ expected, **close)
  np.testing.assert_allclose(x.mask, basis.T @ basis, atol=1e-12)
  slack = 100 * g.EPS[np.float64] * size**2 + 1e-12
  np.testing.assert_allclose(squares, expected.T @ expected, atol=slack)


def _normal(rng, *shape):
  return jnp.asarray(rng.standard_normal(shape))


def _any_tangent(rng, frame):
  return Tangent(*(_normal(rng, *q.shape) for q in (frame.left, frame.right)))


@jax.jit
def _kinds(frame):
  """Arrays, projected, carried, with shifts, of two terms.

  The same vectors for all tests, so that they share the programs.
  """
  rng = np.random.default_rng(4)

  def square():
    return _normal(rng, *frame.left_core.shape)

  x, y, z = (_any_tangent(rng, frame) for _ in range(3))
  left, right = as_sum(frame, x)
  other = fixed_rank.frame(fixed_rank.Factors(*_any_tangent(rng, frame)))
  bases = fixed_rank.Factors(other.left, other.right)
  return {
    'arrays': as_sum(frame, x),
    'projected': projected(frame, y),
    'shifted': TangentSum(left.shifted(square()), 0.3 * right @ square()),
    'carried': transport_sum(bases, frame, fixed_rank.project(other, z))[0],
    'two terms': TangentSum(
      left @ square() + projected(frame, y).left @ square(),
      right + projected(frame, y).right.shifted(square()) @ square(),
    ),
  }


def _combined(side, other, matrix, shift):
  """All that is done with sums, one thing after another."""
  x = (side.outside() @ matrix).shifted(shift).shifted(matrix)
  return x + -0.7 * other


def _dense_combined(side, other, matrix, shift):
  x, basis = _dense(side), np.asarray(side.basis)
  # (I - Q Q^T) X, whether Q is a partial isometry or not.
  outside = x - basis @ (basis.T @ x)
  return outside @ matrix + basis @ (shift + matrix) - 0.7 * _dense(other)


@g.compile_once
def _all_operations(sides, others, *matrices):
  return [
    _read(_combined(side, other, *matrices))
    for side, other in zip(sides, others, strict=True)
  ]


def _check_operations(factors, seed):
  frame = g.compiled.frame(factors)
  kinds = jax.device_get(_kinds(frame))
  for x in kinds.values():
    for side, y in zip(x, fixed_rank.multiply_out(x), strict=True):
      np.testing.assert_allclose(_dense(side), y, atol=1e-12)
  # One term and two, with a shift and without.
  kinds = {kind: kinds[kind] for kind in ('projected', 'two terms')}
  rng = np.random.default_rng(seed)
  rank = frame.left.shape[-1]
  matrices = [rng.standard_normal((rank, rank)) for _ in range(2)]
  sides = [side for x in kinds.values() for side in x]
  others = sides[-2:] + sides[:-2]  # Of the kind before, on the same side.
  found = _all_operations(sides, others, *matrices)
  for side, other, result in zip(sides, others, found, strict=True):
    _assert_is(result, _dense_combined(side, other, *matrices), 'combined')


@pytest.mark.parametrize('condition', [1.0, 1e6])
def test_operations_are_those_of_dense_matrices(condition):
  _check_operations(g.random_problem(12, 12, 9, 4, condition)[0], 13)


@g.deficient
def test_operations_at_factors_of_lower_rank(kind):
  """There the mask ``Q^T Q`` is no identity, and a shift is masked along Q."""
  _check_operations(g.deficient_factors(14, kind), 15)


@g.compile_once
def _derived(frame, old, x, y):
  """Projected, and transported from other bases."""
  bases = fixed_rank.Factors(old.left, old.right)
  carried, overlaps = transport_sum(bases, frame, y)
  return _read(projected(frame, x)), _read(carried), overlaps


@pytest.mark.parametrize('kind', [1.0, 1e6, *g.deficient.args[1]])
def test_a_projection_and_a_transport_are_those_of_arrays(kind):
  if isinstance(kind, float):
    factors, _, _ = g.random_problem(24, 12, 9, 4, kind)
  else:
    factors = g.deficient_factors(7, kind)
  old = g.compiled.frame(g.random_problem(25, 12, 9, 4, 3.0)[0])
  new, rng = g.compiled.frame(factors), np.random.default_rng(6)
  x, y = (jax.device_get(_any_tangent(rng, new)) for _ in range(2))
  y = g.compiled.project(old, y)
  lazy, carried, overlaps = _derived(new, old, x, y)
  for sides, explicit in (
    (lazy, g.compiled.project(new, x)),
    (carried, g.compiled.transport(old, new, y)),
  ):
    for side, expected in zip(sides, explicit, strict=True):
      _assert_is(side, expected, 'projected')
  for overlap, a, b in zip(overlaps, old, new, strict=False):
    np.testing.assert_allclose(overlap, a.T @ b, atol=1e-13)


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


def test_a_rank_above_either_side_is_refused():
  wide, narrow = np.ones((6, 4)), np.ones((3, 4))
  for factors in ((wide, narrow), (narrow, wide)):
    with pytest.raises(ValueError, match='rank=4'):
      nearest_of_rank(fixed_rank.Factors(*factors), 4)


# Groups of modules.


def _groups():
  """Stacks of several heights, one of another rank, one with m = r."""
  rng = np.random.default_rng(42)
  sizes = [(2, 8, 6, 3), (1, 5, 9, 3), (3, 8, 6, 2), (2, 3, 7, 3)]
  pairs = [
    (rng.standard_normal((k, m, r)), rng.standard_normal((k, n, r)))
    for k, m, n, r in sizes
  ]
  pairs[1][0][0] = 0
  steps = [[0.1 * rng.standard_normal(x.shape) for x in pair] for pair in pairs]
  return (
    [g.as_factors(pair) for pair in pairs],
    [fixed_rank.Tangent(*map(jnp.asarray, step)) for step in steps],
  )


def test_one_call_serves_all_groups_of_one_rank():
  called = []

  def noted(pair):
    called.append([x.shape[-1] for x in pair if isinstance(x, Tall)])
    return pair

  pairs, _ = _groups()
  cases.assert_same_bits(map_ranks(noted, pairs), tuple(pairs))
  # Of rank 2 there is one group, and the last has m = r: arrays as they are.
  assert sorted(called) == [[], [], [3, 3]]
