"""Muon on the manifold, against dense matrices: directions, trajectories."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import prism_optax
from prism_optax import contrib
from tests import cases
from tests.oracles import muon_oracle, oracles, problems

pytestmark = pytest.mark.usefixtures('x64')
M, N, RANK = 13, 9, 3


@functools.cache
def _compiled(**options):
  tx = contrib.orthogonalize_tangents(0.0, **options)
  return jax.jit(lambda x, params: tx.update(x, tx.init(params), params)[0])


def _direction(pair, x, **options):
  """Of coordinates (left, right), as a dense matrix."""
  params = cases.tree_of([pair])
  return problems.embed(
    params, _compiled(**options)(cases.tree_of([x]), params)
  )[0]


def _coordinates(pair, gradient):
  frame = problems.frames(cases.tree_of([pair]))[0]
  left, right = gradient @ frame.right, gradient.T @ frame.left
  return left - frame.left @ (frame.left.T @ left), right


@pytest.mark.parametrize(
  ('m', 'n', 'rank', 'degree', 'steps', 'normalize'),
  [
    # Every polynomial on one shape, and every shape under one polynomial.
    (M, N, RANK, 2, 5, 'max1'),
    (M, N, RANK, 1, 1, 'max1'),
    pytest.param(M, N, RANK, 3, 4, 'max1', marks=pytest.mark.slow),
    (M, N, RANK, 2, 5, 'frobenius'),
    pytest.param(9, 13, 3, 2, 5, 'max1', marks=pytest.mark.slow),
    (8, 8, 1, 2, 5, 'max1'),
    pytest.param(7, 4, 4, 2, 5, 'max1', marks=pytest.mark.slow),
    pytest.param(4, 4, 4, 2, 5, 'max1', marks=pytest.mark.slow),
  ],
)
def test_is_the_projected_dense_iteration(m, n, rank, degree, steps, normalize):
  """r = 1 and r = min(m, n) too, where outer blocks have less room."""
  rng = np.random.default_rng(m + 100 * degree)
  pair = oracles.random_factors(rng, m, n, rank, 10.0)
  point = oracles.Point.from_factors(*pair)
  options = {'degree': degree, 'steps': steps, 'normalize': normalize}
  for size in (1e-3, 0.5, 1e3):
    gradient = size * rng.standard_normal((m, n))
    found = _direction(pair, _coordinates(pair, gradient), **options)
    dense = muon_oracle.orthogonalize(
      point.project(gradient), degree, steps, normalize
    )
    np.testing.assert_allclose(found, point.project(dense), atol=1e-12)
    if rank < min(m, n) and size > 1:  # Else the projection shows nothing.
      assert np.linalg.norm(dense - point.project(dense)) > 0.02


def test_rank_deficient_factors_and_tangents():
  """A zero factor shows one side only; the iteration stays the dense one."""
  rng = np.random.default_rng(4)
  left, right = oracles.random_factors(rng, M, N, RANK)
  gradient = rng.standard_normal((M, N))
  pairs = (left, 0 * right), (0 * left, right), (left[:, [0, 0, 2]], right)
  given = [
    (pair, shown)
    for pair in pairs
    for x, y in [_coordinates(pair, gradient)]
    # Columns that no basis shows are no part of the vector, whatever they say.
    for shown in ((x, y), (x + x[:, ::-1], 3.0 + y))
  ]
  # Outer bases that are zero or of rank one.
  x, y = _coordinates((left, right), gradient)
  first = np.arange(RANK) == 0
  for shown in ((0 * x, y), (x * first, y * first), (0 * x, 0 * y)):
    given.append(((left, right), shown))
  for pair, shown in given:
    (dense,) = problems.embed(cases.tree_of([pair]), cases.tree_of([shown]))
    dense /= max(1, np.hypot(*map(np.linalg.norm, shown)))
    dense = muon_oracle.orthogonalize(dense, 2, 5, 'none')
    expected = oracles.Point.from_factors(*pair).project(dense)
    np.testing.assert_allclose(_direction(pair, shown), expected, atol=1e-12)
    assert expected.any() == any(map(np.any, shown))


# Whole trajectories. One shape, one stack: what is done with it is compiled
# once.
SHAPES = [(11, 7, 3), (11, 7, 3)]
RATE, BETA, STEPS = 0.05, 0.9, 8


def _gradient(t, products):
  """A smooth dense gradient that depends on Z and on the step."""
  out = []
  for i, z in enumerate(products):
    # Squares: sines of a i + b j alone would have rank two.
    phase = np.square(np.arange(z.size)).reshape(z.shape)
    out.append(0.3 * z + 3.0 ** (i - 1) * np.sin(z + t + phase))
  return out


@pytest.mark.slow
def test_trajectory_is_the_dense_one():
  params = cases.adapters(SHAPES, dtype=jnp.float64)
  tx = optax.chain(
    prism_optax.intrinsic_clip(1e6), contrib.orthogonalize_tangents(BETA),
    optax.scale_by_learning_rate(RATE), prism_optax.retract(),
  )  # fmt: skip
  state, update = tx.init(params), jax.jit(tx.update)
  points = [oracles.Point.from_factors(*x) for x in cases.factors_of(params)]
  momenta = [np.zeros_like(p.z) for p in points]
  for t in range(STEPS):
    for i, dense in enumerate(_gradient(t, [p.z for p in points])):
      point = points[i]
      momenta[i] = BETA * point.project(momenta[i]) + point.project(dense)
      direction = muon_oracle.orthogonalize(momenta[i], 2, 5)
      points[i] = point.retract(-RATE * point.project(direction), 3)
    dense = _gradient(t, cases.products_of(params))
    grads = cases.factor_gradients(
      cases.factors_of(params), [g[None] for g in dense], np.zeros((1, 5))
    )
    updates, state = update(grads, state, params)
    params = optax.apply_updates(params, updates)
    found = cases.products_of(params)
    cases.assert_close(found, [p.z for p in points], 1e-11)


@pytest.mark.slow
def test_other_leaves_get_adam():
  params = cases.adapters(SHAPES[:1], dtype=jnp.float64)
  tx = contrib.orthogonalize_tangents(b1=0.8, b2=0.9, eps=1e-6)
  adam = optax.scale_by_adam(0.8, 0.9, 1e-6)
  state, adam_state = tx.init(params), adam.init(params['extra'])
  update = jax.jit(tx.update)
  for step in range(3):
    grads = cases.normal(params, step)
    updates, state = update(grads, state, params)
    expected, adam_state = adam.update(grads['extra'], adam_state)
    np.testing.assert_allclose(updates['extra'], expected, rtol=1e-12)


@pytest.mark.slow
def test_coordinate_rms_makes_the_coordinates_of_that_size():
  """With both outer blocks dominating, 2r singular values of one."""
  m, n, rank = 40, 30, 2
  pair = oracles.random_factors(np.random.default_rng(3), m, n, rank)
  x = _coordinates(pair, np.random.default_rng(4).normal(size=(m, n)))
  plain, sized = (
    np.linalg.norm(_direction(pair, x, steps=12, coordinate_rms=rms))
    for rms in (None, 0.5)
  )
  factor = 0.5 * math.sqrt((m + n - rank) / 2)
  assert sized == pytest.approx(factor * plain)
  # The projection loses the block of the two outer bases, a small part here.
  expected = 0.5 * math.sqrt(rank * (m + n - rank))
  assert 0.9 * expected < sized <= expected * (1 + 1e-6)
