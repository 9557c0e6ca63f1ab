"""Tangent vectors against the dense oracle."""

import numpy as np
import pytest

from prism_optax import fixed_rank
from tests import cases
from tests.fixed_rank import cases as g
from tests.oracles import oracles

pytestmark = pytest.mark.usefixtures('x64')


def assert_is(frame, tangent, exact, tolerance):
  """The dense vector, and the intrinsic g.norm: that of the coordinates."""
  assert oracles.relative_error(g.embed(frame, tangent), exact) < tolerance
  np.testing.assert_allclose(
    g.norm(tangent), np.linalg.norm(exact), rtol=tolerance
  )
  # X_L is orthogonal to Q_L: without it the g.norm counts the core twice.
  size = tolerance * max(1.0, g.norm(tangent))
  assert np.max(np.abs(frame.left.T @ tangent.left)) < size


def seen(factors, dense):
  """The frame, and the tangent of the factors' gradients of a dense one."""
  frame, grads = g.compiled.frame(factors), g.gradients(factors, dense)
  return frame, g.compiled.tangent_from_gradients(frame, grads)


@g.shapes
@g.conditions
def test_gradients_become_the_projected_gradient(m, n, rank, condition):
  factors, point, dense = g.random_problem(4, m, n, rank, condition)
  tolerance = 100 * g.EPS[np.float64] * condition
  assert_is(*seen(factors, dense), point.project(dense), tolerance)


@pytest.mark.parametrize(
  ('condition', 'tolerance'), [(1.0, 2e-6), (10.0, 1e-5), (1e3, 1e-3)]
)
def test_gradients_become_the_projected_gradient_in_float32(
  condition, tolerance
):
  factors, point, dense = g.random_problem(5, 40, 24, 4, condition, np.float32)
  frame, tangent = seen(factors, dense)
  assert tangent.left.dtype == tangent.right.dtype == np.float32
  assert_is(frame, tangent, point.project(dense), tolerance)


@g.deficient
def test_deficient_factors_show_what_can_be_observed(kind):
  """A zero left factor: nothing of G Q_R is in G R, all of G^T Q_L is."""
  factors = g.deficient_factors(17, kind)
  point = oracles.Point.from_factors(*factors)
  dense = np.random.default_rng(18).standard_normal((12, 9))
  assert_is(*seen(factors, dense), point.project(dense), 1e-12)


@g.full_or_deficient
def test_project_applies_the_projector_left_and_the_masks(kind):
  """Noise goes on all entries first; the mask takes it out afterwards."""
  factors = g.deficient_factors(19, kind)
  point = oracles.Point.from_factors(*factors)
  frame = g.compiled.frame(factors)
  rng = np.random.default_rng(7)
  x = g.as_tangent(rng.normal(size=(12, 4)), rng.normal(size=(9, 4)))
  projected = g.compiled.project(frame, x)
  outer = x.left - point.left_projector @ x.left
  left = outer @ frame.right.T @ frame.right
  right = x.right @ frame.left.T @ frame.left
  for found, exact in zip(projected, (left, right), strict=True):
    assert oracles.relative_error(found, exact) < 1e-10
  for a, b in zip(g.compiled.project(frame, projected), projected, strict=True):
    assert oracles.relative_error(a, b) < 20 * g.EPS[np.float64]
  dense = g.embed(frame, projected)
  assert_is(frame, projected, point.project(dense), 1e-10)


@pytest.mark.parametrize('condition', [*g.CONDITIONS, 'zero left'])
def test_transport_projects_the_ambient_tangent(condition):
  if condition == 'zero left':
    old, condition = g.deficient_factors(21, condition), 3.0
  else:
    old, _, _ = g.random_problem(11, 12, 9, 4, condition)
  new, point, _ = g.random_problem(12, 12, 9, 4, condition)
  frames = g.compiled.frame(old), g.compiled.frame(new)
  tangent = g.random_tangent(13, frames[0])
  moved = g.compiled.transport(*frames, tangent)
  exact = point.project(g.embed(frames[0], tangent))
  assert_is(frames[1], moved, exact, 100 * g.EPS[np.float64] * condition)


# Each has a shape of its own.
@cases.fast_first('case', (0, 3), range(7))
def test_golden_lifts(case, golden):
  """Of five g.gradients: our tangent vectors are what their lifts move Z by."""
  d = golden('lift', f'c{case}_')
  factors = fixed_rank.Factors(d['A'], d['B'])
  frame = g.compiled.frame(factors)
  condition = d['cond'].max()
  # Their route goes through the Gram matrices and loses the square.
  for origin, tolerance in (
    ('oracle', max(1e-11, 100 * g.EPS[np.float64] * condition)),
    ('ref', {True: 1e-11, False: 1e-7}[condition < 100]),
  ):
    for i in range(5):
      grads = fixed_rank.Factors(d['gA'][i], d['gB'][i])
      tangent = g.compiled.tangent_from_gradients(frame, grads)
      left, right = d[f'{origin}_dA'][i], d[f'{origin}_dB'][i]
      dense = left @ factors.right.T + factors.left @ right.T
      assert_is(frame, tangent, dense, tolerance)
      np.testing.assert_allclose(
        g.norm(tangent), d[f'{origin}_norm'][i], rtol=tolerance
      )
