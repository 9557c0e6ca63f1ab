"""Tangent vectors that are not multiplied out, against those that are.

Every operation on a sum is compared with the same one on dense float64
matrices. What a sum carries along, ``Q^T X``, must be right after each.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prism_optax import fixed_rank
from prism_optax.fixed_rank import Tangent
from prism_optax.fixed_rank._tangents import (
  TallSum,
  TangentSum,
  as_sum,
  projected,
  sum_at,
  transport_sum,
)
from tests.fixed_rank.cases import (
  EPS,
  SHAPES,
  as_factors,
  compiled,
  conditions,
  deficient,
  deficient_factors,
  product,
  random_problem,
)
from tests.oracles import oracles

pytestmark = pytest.mark.usefixtures('x64')

# Each shape is a program of its own. Of those in cases.py the geometry has to
# say what it does at r = min(m, n) on the other side, and at r = 1.
shapes = pytest.mark.parametrize(
  ('m', 'n', 'rank'),
  [
    SHAPES[0],
    *(pytest.param(*shape, marks=pytest.mark.slow) for shape in SHAPES[1:]),
  ],
)


def _normal(rng, *shape):
  return jnp.asarray(rng.standard_normal(shape))


def _any_tangent(rng, frame):
  return Tangent(*(_normal(rng, *q.shape) for q in (frame.left, frame.right)))


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
  np.testing.assert_allclose(
    squares,
    expected.T @ expected,
    atol=100 * EPS[np.float64] * size**2 + 1e-12,
    err_msg=what,
  )


def _sums(rng, frame):
  """Of every kind: arrays, projected, carried, with shifts, of two terms."""
  rank = frame.left.shape[-1]

  def square():
    return _normal(rng, rank, rank)

  x, y, z = (_any_tangent(rng, frame) for _ in range(3))
  left, right = as_sum(frame, x)
  other = fixed_rank.frame(fixed_rank.Factors(*_any_tangent(rng, frame)))
  bases = fixed_rank.Factors(other.left, other.right)
  return {
    'arrays': as_sum(frame, x),
    'projected': projected(frame, y),
    'shifted': TangentSum(left.shifted(square()), right.shifted(square())),
    'multiplied': TangentSum(left @ square(), 0.3 * right),
    'carried': transport_sum(bases, frame, fixed_rank.project(other, z))[0],
    'two terms': TangentSum(
      left @ square() + projected(frame, y).left @ square(),
      right + projected(frame, y).right.shifted(square()) @ square(),
    ),
  }


@jax.jit
def _kinds(frame):
  """The same vectors for all tests, so that they share the programs."""
  return _sums(np.random.default_rng(4), frame)


@jax.jit
def _read_kinds(frame):
  kinds = _kinds(frame)
  out = {kind: fixed_rank.multiply_out(x) for kind, x in kinds.items()}
  return _read(kinds), out


@shapes
@conditions
def test_sums_are_their_coordinates(m, n, rank, condition):
  factors, _, _ = random_problem(3, m, n, rank, condition)
  frame = compiled.frame(factors)
  kinds, multiplied = jax.device_get(_read_kinds(frame))
  for kind, x in kinds.items():
    explicit = multiplied[kind]
    assert isinstance(explicit, Tangent)
    for side, expected in zip(x, explicit, strict=True):
      _assert_is(side, expected, kind)


def _operations(side, other, matrix, shift):
  """What is done with a sum, one thing after another."""
  return {
    '@': side @ matrix,
    '*': -0.7 * side,
    '+': side + other,
    'shifted': side.shifted(shift),
    'shifted twice': side.shifted(shift).shifted(matrix),
    'outside': side.outside(),
    'altogether': (side.outside() @ matrix).shifted(shift) + 2.0 * other,
  }


def _dense_operations(side, other, matrix, shift):
  x, y, basis = _dense(side), _dense(other), np.asarray(side.basis)
  # (I - Q Q^T) X, whether Q is a partial isometry or not.
  outside = x - basis @ (basis.T @ x)
  return {
    '@': x @ matrix,
    '*': -0.7 * x,
    '+': x + y,
    'shifted': x + basis @ shift,
    'shifted twice': x + basis @ (shift + matrix),
    'outside': outside,
    'altogether': outside @ matrix + basis @ shift + 2.0 * y,
  }


@jax.jit
def _all_operations(sides, others, *matrices):
  return [
    _read(_operations(side, other, *matrices))
    for side, other in zip(sides, others, strict=True)
  ]


def _check_operations(frame, seed):
  # One term and two, with a shift and without.
  kinds = jax.device_get(_kinds(frame))
  kinds = {kind: kinds[kind] for kind in ('projected', 'two terms')}
  rng = np.random.default_rng(seed)
  rank = frame.left.shape[-1]
  matrices = [rng.standard_normal((rank, rank)) for _ in range(2)]
  names = [f'{kind} {side}' for kind in kinds for side in ('left', 'right')]
  sides = [side for x in kinds.values() for side in x]
  others = sides[-2:] + sides[:-2]  # Of the kind before, on the same side.
  found = jax.device_get(_all_operations(sides, others, *matrices))
  for what, side, other, results in zip(
    names, sides, others, found, strict=True
  ):
    for name, dense in _dense_operations(side, other, *matrices).items():
      _assert_is(results[name], dense, f'{what} {name}')


@pytest.mark.parametrize('condition', [1.0, 1e6])
def test_operations_are_those_of_dense_matrices(condition):
  factors, _, _ = random_problem(12, 12, 9, 4, condition)
  _check_operations(compiled.frame(factors), 13)


@deficient
def test_operations_at_factors_of_lower_rank(kind):
  """There the mask ``Q^T Q`` is no identity, and a shift is masked along Q."""
  factors = as_factors(deficient_factors(14, 12, 9, 4, kind))
  _check_operations(compiled.frame(factors), 15)


@shapes
def test_matrices_are_what_a_sum_is_linear_in(m, n, rank):
  """What a learning rate multiplies: 2 X - Y with the terms of either."""
  frame = compiled.frame(random_problem(16, m, n, rank, 3.0)[0])
  x = jax.device_get(_kinds(frame))['shifted']
  doubled = TangentSum(*(side.map(lambda a: 2.0 * a) for side in x))
  read = jax.device_get(jax.jit(_read)(doubled))
  for side, old in zip(read, x, strict=True):
    _assert_is(side, 2 * _dense(old), 'doubled')
    same = old.map(lambda a: a)
    jax.tree.map(np.testing.assert_array_equal, same, old)


def test_arrays_pass_and_are_sums_of_one_term():
  frame = compiled.frame(random_problem(18, 12, 9, 4, 3.0)[0])
  x = _any_tangent(np.random.default_rng(19), frame)
  assert fixed_rank.multiply_out(x) is x
  found = as_sum(frame, x)
  assert as_sum(frame, found) is found
  for side, array in zip(found, x, strict=True):
    assert side.shift is None
    assert len(side.terms) == 1
    np.testing.assert_array_equal(side.multiply_out(), array)


def test_a_sum_goes_through_jit_and_vmap():
  """It is a tree of arrays: a stack of sums is a sum of stacks."""
  rng = np.random.default_rng(20)
  problems = [random_problem(seed, 12, 9, 4, 3.0)[0] for seed in (21, 22, 23)]
  factors = jax.tree.map(lambda *x: jnp.stack(x), *problems)
  tangents = Tangent(_normal(rng, 3, 12, 4), _normal(rng, 3, 9, 4))
  matrix = _normal(rng, 4, 4)

  def work(factors, tangent):
    frame = fixed_rank.frame(factors)
    x = projected(frame, tangent)
    return TangentSum(
      (x.left @ matrix).shifted(matrix), x.right.outside() + 0.5 * x.right
    )

  mapped = jax.jit(jax.vmap(work))(factors, tangents)
  work = jax.jit(work)
  stacked = work(factors, tangents)  # Leading axes broadcast.
  for i, pair in enumerate(problems):
    alone = work(pair, jax.tree.map(lambda x, i=i: x[i], tangents))
    for many in (mapped, stacked):
      one = jax.tree.map(lambda x, i=i: x[i], many)
      assert isinstance(one, TangentSum)
      jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-12), one, alone
      )
  explicit = jax.jit(jax.vmap(fixed_rank.multiply_out))(mapped)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=1e-12),
    explicit,
    jax.jit(fixed_rank.multiply_out)(stacked),
  )


@jax.jit
def _read_projected(frame, x):
  return _read(projected(frame, x))


def _check_projection(factors):
  frame = compiled.frame(factors)
  x = _any_tangent(np.random.default_rng(6), frame)
  lazy = jax.device_get(_read_projected(frame, x))
  explicit = compiled.project(frame, x)
  for side, expected in zip(lazy, explicit, strict=True):
    np.testing.assert_allclose(side[1], expected, atol=1e-13)
    _assert_is(side, expected, 'projected')


@shapes
@conditions
def test_a_projection_is_the_projection(m, n, rank, condition):
  _check_projection(random_problem(5, m, n, rank, condition)[0])


@deficient
def test_a_projection_hides_what_a_factor_of_lower_rank_does(kind):
  _check_projection(as_factors(deficient_factors(7, 9, 6, 3, kind)))


@jax.jit
def _read_carried(bases, frame, x):
  found, overlaps = transport_sum(bases, frame, x)
  return _read(found), overlaps


@shapes
@conditions
def test_what_is_carried_is_the_projection_of_the_dense_tangent(
  m, n, rank, condition
):
  factors, point, _ = random_problem(24, m, n, rank, condition)
  old = compiled.frame(random_problem(25, m, n, rank, 3.0)[0])
  new = compiled.frame(factors)
  x = compiled.project(old, _any_tangent(np.random.default_rng(26), old))
  (left, right), overlaps = jax.device_get(
    _read_carried(fixed_rank.Factors(old.left, old.right), new, x)
  )
  exact = point.project(np.asarray(compiled.embed(old, x)))
  # The column space of the factors is known to so many digits.
  size = 100 * EPS[np.float64] * condition * np.linalg.norm(exact)
  q_left, q_right = np.asarray(new.left), np.asarray(new.right)
  outer = exact @ q_right
  np.testing.assert_allclose(
    left[1], outer - q_left @ (q_left.T @ outer), atol=size
  )
  np.testing.assert_allclose(right[1], exact.T @ q_left, atol=size)
  for side in (left, right):
    _assert_is(side, side[1], 'carried')
  for overlap, before, after in zip(overlaps, old, new, strict=False):
    np.testing.assert_allclose(
      overlap, np.asarray(before).T @ np.asarray(after), atol=1e-13
    )


@functools.partial(jax.jit, static_argnums=2)
def _retracted(frame, scale, some):
  """By both routes: as a sum, and multiplied out (stacked: one program)."""
  lazy = []
  for kind in some:
    x = _kinds(frame)[kind]
    x = TangentSum(scale * x.left, scale * x.right)
    # A tangent vector has no part of its left side along the basis.
    lazy.append(x._replace(left=x.left.outside()))
  explicit = jax.tree.map(
    lambda *x: jnp.stack(x), *map(fixed_rank.multiply_out, lazy)
  )
  return (
    [fixed_rank.retraction(frame, x) for x in lazy],
    jax.vmap(fixed_rank.retraction, (None, 0))(frame, explicit),
  )


@pytest.mark.parametrize(
  ('m', 'n', 'rank', 'some'),
  [
    (12, 9, 4, ('shifted', 'two terms')),
    pytest.param(12, 9, 4, ('arrays', 'carried'), marks=pytest.mark.slow),
    pytest.param(5, 11, 5, ('two terms',), marks=pytest.mark.slow),
    pytest.param(8, 6, 1, ('two terms',), marks=pytest.mark.slow),
  ],
)
@pytest.mark.parametrize('size', [1e-6, 0.03, 3.0])
def test_retraction_of_a_sum(m, n, rank, some, size):
  """The same point as from its coordinates, for small and large steps."""
  factors, _, _ = random_problem(8, m, n, rank, 3.0)
  frame = compiled.frame(factors)
  scale = size * np.linalg.norm(product(factors)) / rank
  found, expected = jax.device_get(_retracted(frame, scale, some))
  for i, (kind, new) in enumerate(zip(some, found, strict=True)):
    exact = product(jax.tree.map(lambda x, i=i: x[i], expected))
    assert oracles.relative_error(product(new), exact) < 1e-12, kind


def test_a_sum_of_another_shape_is_refused():
  frame, other = (
    compiled.frame(random_problem(27, *shape, 4)[0])
    for shape in ((12, 9), (9, 12))
  )
  x = as_sum(other, _any_tangent(np.random.default_rng(28), other))
  with pytest.raises(ValueError, match=r'tangent.left.shape=\(9, 4\)'):
    fixed_rank.retraction(frame, x)
  with pytest.raises(ValueError, match=r'tangent.left.shape=\(9, 4\)'):
    as_sum(frame, fixed_rank.multiply_out(x))


def test_a_sum_cannot_be_changed_in_place():
  frame = compiled.frame(random_problem(29, 12, 9, 4)[0])
  x = as_sum(frame, _any_tangent(np.random.default_rng(30), frame))
  with pytest.raises(dataclasses.FrozenInstanceError):
    x.left.shift = jnp.eye(4)


def test_matrices_that_undo_the_spread_of_the_columns():
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
    turn = oracles.random_orthonormal(rng, 4, 4)
    spread = np.geomspace(1, 1e-2, 4)
    columns = Tangent(
      *(
        np.float32(rng.standard_normal(q.shape) * spread @ turn.T)
        for q in factors
      )
    )
    undo = np.float32(0.01 * (turn / spread) @ turn.T)

    @jax.jit
    def step(factors, columns):
      frame = fixed_rank.frame(factors)
      columns = fixed_rank.project(frame, columns)
      x = sum_at(
        frame,
        ((columns.left, undo),),
        ((columns.right, undo),),
        (
          frame.left.T @ columns.left @ undo,
          frame.right.T @ columns.right @ undo,
        ),
      )
      return columns, fixed_rank.retraction(frame, x)

    columns, new = step(factors, columns)
  with jax.enable_x64(True):
    wide = compiled.frame(as_factors(factors, np.float64))
    step = Tangent(*(np.float64(c) @ np.float64(undo) for c in columns))
    target = product(as_factors(factors, np.float64)) + np.asarray(
      compiled.embed(wide, Tangent(*map(jnp.asarray, step)))
    )
  exact = oracles.best_approximation(target, 4)
  size = np.linalg.norm(exact - product(as_factors(factors, np.float64)))
  error = np.linalg.norm(product(as_factors(new, np.float64)) - exact)
  assert error < 1e-4 * size
