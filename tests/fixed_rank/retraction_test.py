"""The retraction against its formula, an SVD of the whole matrix."""

import jax
import numpy as np
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
  dtypes,
  embed,
  norm,
  product,
  random_problem,
  random_tangent,
  scaled,
  shapes,
)  # fmt: skip
from tests.oracles import oracles

pytestmark = pytest.mark.usefixtures('x64')


def step_of_size(factors, frame, size, seed=28):
  """A tangent with the given size relative to ||Z||."""
  tangent = random_tangent(seed, frame)
  scale = size * np.linalg.norm(product(factors)) / norm(tangent)
  return scaled(tangent, float(scale))  # A Python float keeps the type.


def dense_retraction(factors, frame, tangent):
  """The balanced SVD gauge of Z + T, with signs along the old factors."""
  u, s, vt = np.linalg.svd(product(factors) + embed(frame, tangent))
  rank = factors.left.shape[1]
  new = [x[:, :rank] * np.sqrt(s[:rank]) for x in (u, vt.T)]
  along = sum(np.sum(x * y, 0) for x, y in zip(new, factors, strict=True))
  return [x * np.where(along < 0, -1, 1) for x in new]


@shapes
@conditions
@pytest.mark.parametrize('align', [False, True])
def test_retraction_is_the_best_approximation(m, n, rank, condition, align):
  factors, _, _ = random_problem(29, m, n, rank, condition)
  frame = compiled.frame(factors)
  tangent = step_of_size(factors, frame, 0.3)
  new = compiled.retract(frame, tangent, align=align)
  exact = dense_retraction(factors, frame, tangent)
  # Of the order of ||Z||: the truncation has no small numbers to divide by.
  error = oracles.relative_error(product(new), product(exact))
  assert error < 200 * EPS[np.float64]
  tolerance = 1e-13  # Rounding over the gaps between singular values.
  if align:
    exact = oracles.align(exact, factors)
    tolerance = 1e-13 * condition  # The Procrustes factor's own.
  for value, column in zip(new, exact, strict=True):
    assert oracles.relative_error(value, column) < tolerance


@dtypes
@pytest.mark.parametrize('condition', [1.0, 300.0])
def test_retraction_returns_the_balanced_gauge(condition, dtype):
  """Orthogonal columns whatever their size, and equal norms on both sides."""
  factors, _, _ = random_problem(30, 12, 9, 4, condition)
  factors = as_factors(oracles.balance(factors), dtype)
  frame = compiled.frame(factors)
  new = compiled.retract(frame, step_of_size(factors, frame, 1e-6))
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
  frame, rng = compiled.frame(factors), np.random.default_rng(8)
  blocks = (oracles.random_matrix(rng, k, 4, condition) for k in (12, 9))
  tangent = compiled.project(frame, as_tangent(*blocks))
  new = compiled.retract(frame, tangent)
  exact = product(dense_retraction(factors, frame, tangent))
  assert oracles.relative_error(product(new), exact) < 200 * EPS[np.float64]
  for factor in new:
    unit = np.asarray(factor / np.linalg.norm(factor, axis=0))
    assert np.max(np.abs(unit.T @ unit - np.eye(4))) < 50 * EPS[np.float64]


@pytest.mark.parametrize('size', [1.0, 1e-3])
def test_no_new_column_points_away_from_the_old_one(size):
  """Whatever signs an SVD gives, and whatever the size of the factors."""
  for seed in range(8):
    factors = scaled(random_problem(seed, 12, 9, 4, 10.0)[0], size)
    frame = compiled.frame(factors)
    new = compiled.retract(frame, step_of_size(factors, frame, 1e-3))
    along = sum(np.sum(a * b, 0) for a, b in zip(new, factors, strict=True))
    assert (along > -1e-12 * size**2).all()


@pytest.mark.parametrize('kind', ['full', *DEFICIENT])
def test_no_step_keeps_the_factors(kind):
  if kind == 'full':
    factors, _, _ = random_problem(34, 12, 9, 4, 10.0)
  else:
    factors = deficient_factors(34, kind)
  zero = jax.tree.map(np.zeros_like, as_tangent(*factors))
  new = compiled.retract(compiled.frame(factors), zero)
  for a, b in zip(new, factors, strict=True):
    assert oracles.relative_error(a, b) < 20 * EPS[np.float64]


def minus_z(factors, frame, keep=0):
  """-Z as a tangent vector, but for its ``keep`` leading directions."""
  z = product(factors)
  dense = oracles.best_approximation(z, keep) - z
  return as_tangent(np.zeros_like(factors.left), dense.T @ frame.left)


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
  factors, _, _ = random_problem(36, 12, 9, 4, 2.0)
  frame = compiled.frame(factors)
  new = compiled.retract(frame, minus_z(factors, frame, keep=3))
  exact = oracles.best_approximation(product(factors), 3)
  assert oracles.relative_error(product(new), exact) < 1e-12
  ranks = [np.linalg.matrix_rank(np.asarray(f), rtol=1e-6) for f in new]
  assert max(ranks) == 4
  # And one step later the direction can be had back.
  frame = compiled.frame(new)
  next_step = scaled(random_tangent(37, frame), 0.1)
  for factor in compiled.retract(frame, next_step):
    assert np.linalg.matrix_rank(np.asarray(factor), rtol=1e-6) == 4


@deficient
@dtypes
def test_a_step_from_deficient_factors_lands_on_the_best_approximation(
  kind, dtype
):
  factors = deficient_factors(24, kind, dtype)
  frame = compiled.frame(factors)
  tangent = scaled(random_tangent(25, frame), 0.3)
  new = compiled.retract(frame, tangent)
  target = product(factors) + embed(frame, tangent)
  exact = oracles.best_approximation(target, 4)
  assert oracles.relative_error(product(new), exact) < 300 * EPS[dtype]
  if kind in ('zero left', 'zero right'):  # The default initialisation.
    assert [np.linalg.matrix_rank(np.asarray(x)) for x in new] == [4, 4]


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
  for found in (new, dense_retraction(factors, frame, tangent)):
    assert oracles.relative_error(product(found), d['oracle_Z']) < 1e-11
  noalign = d['ref_A_noalign'] @ d['ref_B_noalign'].T
  assert oracles.relative_error(product(new), noalign) < 1e-11
  aligned = compiled.retract(frame, tangent, align=True)
  for value, name in zip(aligned, 'AB', strict=True):
    for origin in ('ref', 'oracle'):
      target = d[f'{origin}_{name}_align']
      assert oracles.relative_error(value, target) < 1e-11
