"""The retraction against its formula, an SVD of the whole matrix."""

import jax
import numpy as np
import pytest

from tests import cases
from tests.fixed_rank import cases as g
from tests.oracles import oracles

pytestmark = pytest.mark.usefixtures('x64')


def step_of_size(factors, frame, size, seed=28):
  """A tangent with the given size relative to ||Z||."""
  tangent = g.random_tangent(seed, frame)
  scale = size * np.linalg.norm(g.product(factors)) / g.norm(tangent)
  return g.scaled(tangent, float(scale))  # A Python float keeps the type.


def dense_retraction(factors, frame, tangent):
  """The balanced SVD gauge of Z + T, with signs along the old factors."""
  u, s, vt = np.linalg.svd(g.product(factors) + g.embed(frame, tangent))
  rank = factors.left.shape[1]
  new = [x[:, :rank] * np.sqrt(s[:rank]) for x in (u, vt.T)]
  along = sum(np.sum(x * y, 0) for x, y in zip(new, factors, strict=True))
  return [x * np.where(along < 0, -1, 1) for x in new]


@g.shapes
@g.conditions
@pytest.mark.parametrize('align', [False, True])
def test_retraction_is_the_best_approximation(m, n, rank, condition, align):
  factors, _, _ = g.random_problem(29, m, n, rank, condition)
  frame = g.compiled.frame(factors)
  tangent = step_of_size(factors, frame, 0.3)
  new = g.compiled.retract(frame, tangent, align=align)
  exact = dense_retraction(factors, frame, tangent)
  # Of the order of ||Z||: the truncation has no small numbers to divide by.
  error = oracles.relative_error(g.product(new), g.product(exact))
  assert error < 200 * g.EPS[np.float64]
  tolerance = 1e-13  # Rounding over the gaps between singular values.
  if align:
    exact = oracles.align(exact, factors)
    tolerance = 1e-13 * condition  # The Procrustes factor's own.
  for value, column in zip(new, exact, strict=True):
    assert oracles.relative_error(value, column) < tolerance


@g.dtypes
@pytest.mark.parametrize('condition', [1.0, 300.0])
def test_retraction_returns_the_balanced_gauge(condition, dtype):
  """Orthogonal columns whatever their size, and equal norms on both sides."""
  factors, _, _ = g.random_problem(30, 12, 9, 4, condition)
  factors = g.as_factors(oracles.balance(factors), dtype)
  frame = g.compiled.frame(factors)
  new = g.compiled.retract(frame, step_of_size(factors, frame, 1e-6))
  norms = []
  for factor in new:
    assert factor.dtype == dtype
    factor = np.asarray(factor, np.float64)
    norms.append(np.linalg.norm(factor, axis=0))
    unit = factor / norms[-1]
    assert np.max(np.abs(unit.T @ unit - np.eye(4))) < 50 * g.EPS[dtype]
  np.testing.assert_allclose(norms[0], norms[1], rtol=50 * g.EPS[dtype])
  # Descending; equal ones are so to rounding only.
  assert np.all(np.diff(norms[0]) <= 50 * g.EPS[dtype] * norms[0][0])


@pytest.mark.parametrize('condition', [1.0, 1e4, 1e9])
def test_steps_of_any_condition_get_an_orthonormal_basis(condition):
  """Well-conditioned steps take the cheap basis, the others Householder's."""
  factors, _, _ = g.random_problem(34, 12, 9, 4, 3.0)
  frame, rng = g.compiled.frame(factors), np.random.default_rng(8)
  blocks = (oracles.random_matrix(rng, k, 4, condition) for k in (12, 9))
  tangent = g.compiled.project(frame, g.as_tangent(*blocks))
  new = g.compiled.retract(frame, tangent)
  exact = g.product(dense_retraction(factors, frame, tangent))
  assert oracles.relative_error(g.product(new), exact) < 200 * g.EPS[np.float64]
  for factor in new:
    unit = np.asarray(factor / np.linalg.norm(factor, axis=0))
    assert np.max(np.abs(unit.T @ unit - np.eye(4))) < 50 * g.EPS[np.float64]


@g.full_or_deficient
def test_no_step_keeps_the_factors(kind):
  factors = g.deficient_factors(34, kind)
  zero = jax.tree.map(np.zeros_like, g.as_tangent(*factors))
  new = g.compiled.retract(g.compiled.frame(factors), zero)
  for a, b in zip(new, factors, strict=True):
    assert oracles.relative_error(a, b) < 20 * g.EPS[np.float64]


def minus_z(factors, frame, keep=0):
  """-Z as a tangent vector, but for its ``keep`` leading directions."""
  z = g.product(factors)
  dense = oracles.best_approximation(z, keep) - z
  return g.as_tangent(np.zeros_like(factors.left), dense.T @ frame.left)


def test_a_step_that_erases_everything_keeps_one_side():
  """Both factors zero could never be trained again."""
  # Powers of two make Z + T cancel without rounding.
  factors = g.as_factors((np.eye(12, 4) * [8.0, 4.0, 2.0, 1.0], np.eye(9, 4)))
  frame = g.compiled.frame(factors)
  new = g.compiled.retract(frame, minus_z(factors, frame))
  assert not g.product(new).any()
  ranks = sorted(np.linalg.matrix_rank(np.asarray(f)) for f in new)
  assert ranks == [0, 4]


def test_a_lost_direction_keeps_one_side_alive():
  factors, _, _ = g.random_problem(36, 12, 9, 4, 2.0)
  frame = g.compiled.frame(factors)
  new = g.compiled.retract(frame, minus_z(factors, frame, keep=3))
  exact = oracles.best_approximation(g.product(factors), 3)
  assert oracles.relative_error(g.product(new), exact) < 1e-12
  ranks = [np.linalg.matrix_rank(np.asarray(f), rtol=1e-6) for f in new]
  assert max(ranks) == 4
  sizes = np.linalg.svd(new[np.argmax(ranks)], compute_uv=False)
  assert sizes[0] == pytest.approx(sizes[1])  # It is as long as the longest.
  # And one step later the direction can be had back.
  frame = g.compiled.frame(new)
  next_step = g.scaled(g.random_tangent(37, frame), 0.1)
  for factor in g.compiled.retract(frame, next_step):
    assert np.linalg.matrix_rank(np.asarray(factor), rtol=1e-6) == 4


@g.deficient
@g.dtypes
def test_a_step_from_deficient_factors_lands_on_the_best_approximation(
  kind, dtype
):
  factors = g.deficient_factors(24, kind, dtype)
  frame = g.compiled.frame(factors)
  tangent = g.scaled(g.random_tangent(25, frame), 0.3)
  new = g.compiled.retract(frame, tangent)
  target = g.product(factors) + g.embed(frame, tangent)
  exact = oracles.best_approximation(target, 4)
  assert oracles.relative_error(g.product(new), exact) < 300 * g.EPS[dtype]
  if kind in ('zero left', 'zero right'):  # The default initialisation.
    assert [np.linalg.matrix_rank(np.asarray(x)) for x in new] == [4, 4]


# Each has a shape of its own: one that is tall, one that is wide.
@cases.fast_first('case', (0,), range(5))
def test_golden_retractions(case, golden):
  d = golden('retract', f'c{case}_')
  eta = golden('retract', '')['eta'][case]
  factors = g.as_factors((d['A'], d['B']))
  frame = g.compiled.frame(factors)
  # Coordinates of eta (dA B^T + A dB^T): multiply it by the frames.
  dense = eta * (d['dA'] @ d['B'].T + d['A'] @ d['dB'].T)
  left = dense @ frame.right
  tangent = g.as_tangent(
    left - frame.left @ (frame.left.T @ left), dense.T @ frame.left
  )
  new = g.compiled.retract(frame, tangent)
  for found in (new, dense_retraction(factors, frame, tangent)):
    assert oracles.relative_error(g.product(found), d['oracle_Z']) < 1e-11
  noalign = d['ref_A_noalign'] @ d['ref_B_noalign'].T
  assert oracles.relative_error(g.product(new), noalign) < 1e-11
  aligned = g.compiled.retract(frame, tangent, align=True)
  for value, name in zip(aligned, 'AB', strict=True):
    for origin in ('ref', 'oracle'):
      target = d[f'{origin}_{name}_align']
      assert oracles.relative_error(value, target) < 1e-11
