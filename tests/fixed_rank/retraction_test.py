"""The retraction against its formula, an SVD of the whole matrix."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.fixed_rank.cases import (
  DEFICIENT,
  EPS,
  as_factors,
  as_tangent,
  compiled,
  conditions,
  deficient,
  deficient_factors,
  gradients,
  product,
  random_problem,
  random_tangent,
  scaled,
  shapes,
)
from tests.oracles import oracles

pytestmark = pytest.mark.usefixtures('x64')


def step_of_size(factors, frame, size, seed=28):
  """A tangent with the given size relative to ||Z||."""
  tangent = random_tangent(seed, frame)
  scale = size * np.linalg.norm(product(factors)) / optax.tree.norm(tangent)
  return scaled(tangent, float(scale))  # A Python float keeps the type.


@shapes
@conditions
@pytest.mark.parametrize('align', [False, True])
def test_retraction_is_the_best_approximation(m, n, rank, condition, align):
  factors, _, _ = random_problem(29, m, n, rank, condition)
  frame = compiled.frame(factors)
  tangent = step_of_size(factors, frame, 0.3)
  new = compiled.retract(frame, tangent, align=align)
  exact = compiled.dense_retraction(frame, tangent)
  # Of the order of ||Z||: the truncation has no small numbers to divide by.
  error = oracles.relative_error(product(new), product(exact))
  assert error < 200 * EPS[np.float64]
  tolerance = 1e-13  # Rounding over the gaps between singular values.
  if align:
    exact = oracles.align(exact, factors)
    tolerance = 1e-13 * condition  # The Procrustes factor's own.
  for value, column in zip(new, exact, strict=True):
    assert oracles.relative_error(value, column) < tolerance


@pytest.mark.parametrize('dtype', [np.float64, np.float32])
@pytest.mark.parametrize('condition', [1.0, 30.0, 300.0])
def test_retraction_returns_the_balanced_gauge(condition, dtype):
  """Orthogonal columns whatever their size, and equal norms on both sides."""
  factors, _, _ = random_problem(30, 12, 9, 4, condition, np.float64)
  factors = as_factors(
    oracles.balance(tuple(np.asarray(f) for f in factors)), dtype
  )
  frame = compiled.frame(factors)
  tangent = step_of_size(factors, frame, 1e-6)
  new = compiled.retract(frame, tangent)
  norms = []
  for factor in new:
    assert factor.dtype == dtype
    factor = np.asarray(factor, np.float64)
    norms.append(np.linalg.norm(factor, axis=0))
    unit = factor / norms[-1]
    assert np.max(np.abs(unit.T @ unit - np.eye(4))) < 50 * EPS[dtype]
  np.testing.assert_allclose(norms[0], norms[1], rtol=50 * EPS[dtype])
  # Descending; equal ones are so to rounding only.
  assert np.all(np.diff(norms[0]) <= 50 * EPS[dtype] * norms[0][0])


@pytest.mark.parametrize('condition', [1.0, 1e4, 1e9])
def test_steps_of_any_condition_get_an_orthonormal_basis(condition):
  """Well-conditioned steps take the cheap basis, the others Householder's."""
  factors, _, _ = random_problem(34, 12, 9, 4, 3.0)
  frame = compiled.frame(factors)
  rng = np.random.default_rng(8)
  tangent = compiled.project(
    frame,
    as_tangent(
      *(oracles.random_matrix(rng, size, 4, condition) for size in (12, 9))
    ),
  )
  new = compiled.retract(frame, tangent)
  exact = product(compiled.dense_retraction(frame, tangent))
  assert oracles.relative_error(product(new), exact) < 200 * EPS[np.float64]
  for factor in new:
    unit = np.asarray(factor / np.linalg.norm(factor, axis=0))
    assert np.max(np.abs(unit.T @ unit - np.eye(4))) < 50 * EPS[np.float64]


def test_retraction_in_float32():
  factors, _, _ = random_problem(31, 12, 9, 4, 10.0, np.float32)
  frame = compiled.frame(factors)
  tangent = step_of_size(factors, frame, 0.3)
  exact = product(
    compiled.dense_retraction(*jax.tree.map(np.float64, (frame, tangent)))
  )
  new = compiled.retract(frame, tangent)
  assert new.left.dtype == new.right.dtype == jnp.float32
  assert oracles.relative_error(product(new), exact) < 3e-6


@pytest.mark.parametrize('size', [1.0, 1e-3])
def test_no_new_column_points_away_from_the_old_one(size):
  """Whatever signs an SVD gives, and whatever the size of the factors."""
  for seed in range(8):
    factors, _, _ = random_problem(seed, 12, 9, 4, 10.0)
    factors = scaled(factors, size)
    frame = compiled.frame(factors)
    new = compiled.retract(frame, step_of_size(factors, frame, 1e-3))
    along = sum(
      np.sum(np.asarray(a) * np.asarray(b), 0)
      for a, b in zip(new, factors, strict=True)
    )
    assert (along > -1e-12 * size**2).all()


@pytest.mark.parametrize('kind', ['full', *DEFICIENT])
def test_no_step_keeps_the_factors(kind):
  if kind == 'full':
    factors, _, _ = random_problem(34, 12, 9, 4, 10.0)
  else:
    factors = as_factors(deficient_factors(34, 12, 9, 4, kind))
  frame = compiled.frame(factors)
  zero = jax.tree.map(np.zeros_like, as_tangent(*factors))
  new = compiled.retract(frame, zero)
  for a, b in zip(new, factors, strict=True):
    assert oracles.relative_error(a, b) < 20 * EPS[np.float64]


def minus_z(factors, frame, keep=0):
  """-Z as a tangent vector, but for its ``keep`` leading directions."""
  left, right = (np.asarray(f) for f in factors)
  z = left @ right.T
  dense = oracles.best_approximation(z, keep) - z
  return as_tangent(np.zeros_like(left), dense.T @ np.asarray(frame.left))


def test_a_step_that_erases_everything_keeps_one_side():
  """Both factors zero could never be trained again."""
  # Powers of two make Z + T cancel without rounding.
  factors = as_factors((np.eye(12, 4) * [8.0, 4.0, 2.0, 1.0], np.eye(9, 4)))
  frame = compiled.frame(factors)
  new = compiled.retract(frame, minus_z(factors, frame))
  assert not product(new).any()
  ranks = sorted(np.linalg.matrix_rank(np.asarray(f)) for f in new)
  assert ranks == [0, 4]


def test_a_lost_direction_keeps_one_side_alive():
  rank = 4
  factors, _, _ = random_problem(36, 12, 9, rank, 2.0)
  frame = compiled.frame(factors)
  tangent = minus_z(factors, frame, keep=rank - 1)
  new = compiled.retract(frame, tangent)
  exact = oracles.best_approximation(product(factors), rank - 1)
  assert oracles.relative_error(product(new), exact) < 1e-12
  ranks = [np.linalg.matrix_rank(np.asarray(f), rtol=1e-6) for f in new]
  assert max(ranks) == rank
  # And one step later the direction can be had back.
  frame = compiled.frame(new)
  next_step = scaled(random_tangent(37, frame), 0.1)
  for factor in compiled.retract(frame, next_step):
    assert np.linalg.matrix_rank(np.asarray(factor), rtol=1e-6) == rank


def test_retraction_does_not_depend_on_the_gauge():
  rng = np.random.default_rng(38)
  factors = oracles.random_factors(rng, 12, 9, 4, 2.0)
  g = rng.standard_normal((12, 9))
  results = []
  for condition in (1.0, 1e3):
    gauge = oracles.random_gauge(rng, 4, condition, 3.0)
    pair = as_factors(oracles.change_gauge(factors, gauge))
    frame = compiled.frame(pair)
    tangent = compiled.tangent_from_gradients(frame, gradients(pair, g))
    results.append(product(compiled.retract(frame, scaled(tangent, 0.2))))
  assert oracles.relative_error(results[1], results[0]) < 1e-11


@deficient
@pytest.mark.parametrize('dtype', [np.float64, np.float32])
def test_a_step_from_deficient_factors_lands_on_the_best_approximation(
  kind, dtype
):
  factors = as_factors(deficient_factors(24, 12, 9, 4, kind), dtype)
  frame = compiled.frame(factors)
  tangent = scaled(random_tangent(25, frame), 0.3)
  new = compiled.retract(frame, tangent)
  target = np.asarray(factors.left, np.float64) @ np.asarray(factors.right).T
  target = target + compiled.embed(frame, tangent)
  exact = oracles.best_approximation(np.asarray(target), 4)
  assert oracles.relative_error(product(new), exact) < 300 * EPS[dtype]


@pytest.mark.parametrize('zero', ['left', 'right'])
def test_one_step_from_the_default_initialisation_gives_full_rank(zero):
  factors = as_factors(deficient_factors(26, 12, 9, 4, f'zero {zero}'))
  frame = compiled.frame(factors)
  tangent = scaled(random_tangent(27, frame), 1e-3)
  new = compiled.retract(frame, tangent)
  for factor in new:
    assert np.linalg.matrix_rank(np.asarray(factor)) == 4


# Each has a shape of its own: one that is tall, one that is wide.
@pytest.mark.parametrize(
  'case', [0, 2, *(pytest.param(i, marks=pytest.mark.slow) for i in (1, 3, 4))]
)
def test_golden_retractions(case, golden):
  d = golden('retract', f'c{case}_')
  eta = golden('retract', '')['eta'][case]
  factors = as_factors((d['A'], d['B']))
  frame = compiled.frame(factors)
  # Coordinates of eta (dA B^T + A dB^T): multiply it by the frames.
  dense = eta * (d['dA'] @ d['B'].T + d['A'] @ d['dB'].T)
  left = dense @ frame.right
  tangent = as_tangent(
    left - frame.left @ (frame.left.T @ left), dense.T @ frame.left
  )
  new = compiled.retract(frame, tangent)
  for found in (new, compiled.dense_retraction(frame, tangent)):
    assert oracles.relative_error(product(found), d['oracle_Z']) < 1e-11
  noalign = d['ref_A_noalign'] @ d['ref_B_noalign'].T
  assert oracles.relative_error(product(new), noalign) < 1e-11
  aligned = compiled.retract(frame, tangent, align=True)
  for value, name in zip(aligned, 'AB', strict=True):
    for origin in ('ref', 'oracle'):
      target = d[f'{origin}_{name}_align']
      assert oracles.relative_error(value, target) < 1e-11
