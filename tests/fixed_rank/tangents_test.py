"""Tangent vectors against the dense oracle."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from prism_optax import fixed_rank
from prism_optax.fixed_rank._lifts import sylvester_of_grams
from tests.fixed_rank.cases import (
  EPS,
  as_factors,
  as_tangent,
  compiled,
  conditions,
  deficient,
  deficient_factors,
  gradients,
  random_problem,
  random_tangent,
  shapes,
  zeros,
)
from tests.oracles import oracles

pytestmark = pytest.mark.usefixtures('x64')


@shapes
@conditions
def test_gradients_become_the_projected_gradient(m, n, rank, condition):
  factors, point, g = random_problem(4, m, n, rank, condition)
  frame = compiled.frame(factors)
  tangent = compiled.tangent_from_gradients(frame, gradients(factors, g))
  assert tangent.left.shape == (m, rank)
  assert tangent.right.shape == (n, rank)
  tolerance = 100 * EPS[np.float64] * condition
  exact = point.project(g)
  assert oracles.relative_error(compiled.embed(frame, tangent), exact) < (
    tolerance
  )
  # The plain Euclidean norm of the coordinates is the intrinsic norm.
  norm = np.linalg.norm(exact)
  np.testing.assert_allclose(optax.tree.norm(tangent), norm, rtol=tolerance)
  # X_L is orthogonal to Q_L: without it the norm counts the core twice.
  assert np.max(np.abs(frame.left.T @ tangent.left)) < tolerance


@pytest.mark.parametrize(
  ('condition', 'tolerance'), [(1.0, 2e-6), (10.0, 1e-5), (1e3, 1e-3)]
)
def test_gradients_become_the_projected_gradient_in_float32(
  condition, tolerance
):
  factors, point, g = random_problem(5, 40, 24, 4, condition, np.float32)
  frame = compiled.frame(factors)
  tangent = compiled.tangent_from_gradients(frame, gradients(factors, g))
  dense = compiled.embed(frame, tangent)
  assert dense.dtype == jnp.float32
  assert oracles.relative_error(dense, point.project(g)) < tolerance


@conditions
def test_project_applies_the_projector_to_the_left_block_only(condition):
  factors, point, _ = random_problem(6, 12, 9, 4, condition)
  frame = compiled.frame(factors)
  rng = np.random.default_rng(7)
  left, right = rng.standard_normal((12, 4)), rng.standard_normal((9, 4))
  projected = compiled.project(frame, as_tangent(left, right))
  outer = left - point.left_projector @ left
  tolerance = 100 * EPS[np.float64] * condition
  assert oracles.relative_error(projected.left, outer) < tolerance
  assert oracles.relative_error(projected.right, right) < tolerance
  again = compiled.project(frame, projected)
  for a, b in zip(again, projected, strict=True):
    assert oracles.relative_error(a, b) < 20 * EPS[np.float64]
  dense = compiled.embed(frame, projected)
  np.testing.assert_allclose(
    optax.tree.norm(projected), np.linalg.norm(dense), rtol=1e-14
  )
  assert oracles.relative_error(point.project(dense), dense) < tolerance


@shapes
@conditions
def test_both_lifts_give_the_tangent_back(m, n, rank, condition):
  factors, _, _ = random_problem(8, m, n, rank, condition)
  left, right = (np.asarray(f) for f in factors)
  frame = compiled.frame(factors)
  tangent = random_tangent(9, frame)
  dense = compiled.embed(frame, tangent)
  steps = compiled.lift(frame, tangent)
  horizontal = compiled.horizontal_lift(factors, steps)
  for dl, dr in (steps, horizontal):
    # The steps are `condition` times larger than what they lift.
    error = oracles.relative_error(dl @ right.T + left @ dr.T, dense)
    assert error < 100 * EPS[np.float64] * condition
  dl, dr = (np.asarray(x) for x in horizontal)
  # W is `condition` times as long as the step: the Gram matrices are small.
  scale = condition * np.max(np.abs(dl))
  residual = np.max(np.abs(left.T @ dl - dr.T @ right))
  assert residual < 100 * EPS[np.float64] * scale
  # The shortest lift is not longer than the other one.
  short, long = (np.hypot(*map(np.linalg.norm, s)) for s in (horizontal, steps))
  assert short < long * (1 + 1e-9)
  if condition <= 1e3:  # The Kronecker system has the square of it.
    exact = oracles.horizontal_lift((left, right), steps)
    tolerance = 100 * EPS[np.float64] * condition**2
    for value, target in zip(horizontal, exact, strict=True):
      assert oracles.relative_error(value, target) < tolerance


@conditions
def test_any_lift_gives_the_tangent_back(condition):
  """Also one with a part (L K, -R K^T) in it, which moves nothing."""
  factors, _, _ = random_problem(10, 12, 9, 4, condition)
  frame = compiled.frame(factors)
  rng = np.random.default_rng(11)
  dl, dr = rng.standard_normal((12, 4)), rng.standard_normal((9, 4))
  tangent = compiled.tangent_from_steps(frame, fixed_rank.Factors(dl, dr))
  exact = dl @ factors.right.T + factors.left @ dr.T
  dense = compiled.embed(frame, tangent)
  tolerance = 100 * EPS[np.float64] * condition
  assert oracles.relative_error(dense, exact) < tolerance
  np.testing.assert_allclose(
    optax.tree.norm(tangent), np.linalg.norm(exact), rtol=tolerance
  )


def test_horizontal_lift_does_not_depend_on_the_lift_it_is_given():
  rng = np.random.default_rng(10)
  factors, _, _ = random_problem(10, 12, 9, 4, 30.0)
  steps = fixed_rank.Factors(
    rng.standard_normal((12, 4)), rng.standard_normal((9, 4))
  )
  k = rng.standard_normal((4, 4))
  other = fixed_rank.Factors(
    steps.left + factors.left @ k, steps.right - factors.right @ k.T
  )
  for a, b in zip(
    compiled.horizontal_lift(factors, steps),
    compiled.horizontal_lift(factors, other),
    strict=True,
  ):
    assert oracles.relative_error(b, a) < 1e-11


@conditions
def test_transport_projects_the_ambient_tangent(condition):
  old, _, _ = random_problem(11, 12, 9, 4, condition)
  new, point, _ = random_problem(12, 12, 9, 4, condition)
  frames = compiled.frame(old), compiled.frame(new)
  tangent = random_tangent(13, frames[0])
  moved = compiled.transport(*frames, tangent)
  exact = point.project(np.asarray(compiled.embed(frames[0], tangent)))
  dense = compiled.embed(frames[1], moved)
  tolerance = 100 * EPS[np.float64] * condition
  assert oracles.relative_error(dense, exact) < tolerance
  np.testing.assert_allclose(
    optax.tree.norm(moved), np.linalg.norm(exact), rtol=tolerance
  )


def test_transport_along_a_change_of_gauge_keeps_the_tangent():
  rng = np.random.default_rng(14)
  factors = oracles.random_factors(rng, 12, 9, 4, 2.0)
  gauge = oracles.random_gauge(rng, 4, 10.0)
  old = compiled.frame(as_factors(factors))
  new = compiled.frame(as_factors(oracles.change_gauge(factors, gauge)))
  tangent = random_tangent(15, old)
  moved = compiled.transport(old, new, tangent)
  assert (
    oracles.relative_error(
      compiled.embed(new, moved), compiled.embed(old, tangent)
    )
    < 1e-13
  )


@deficient
def test_deficient_factors_show_what_can_be_observed(kind):
  """A zero left factor: nothing of G Q_R is in G R, all of G^T Q_L is."""
  factors = as_factors(deficient_factors(17, 12, 9, 4, kind))
  point = oracles.Point.from_factors(*factors)
  g = np.random.default_rng(18).standard_normal((12, 9))
  frame = compiled.frame(factors)
  tangent = compiled.tangent_from_gradients(frame, gradients(factors, g))
  exact = point.project(g)
  assert oracles.relative_error(compiled.embed(frame, tangent), exact) < 1e-13
  np.testing.assert_allclose(
    optax.tree.norm(tangent), np.linalg.norm(exact), rtol=1e-13
  )
  steps = compiled.lift(frame, tangent)
  horizontal = compiled.horizontal_lift(factors, steps)
  for dl, dr in (steps, horizontal):
    lifted = np.asarray(dl @ factors.right.T + factors.left @ dr.T)
    assert oracles.relative_error(lifted, exact) < 1e-12
  if 'zero' in kind:
    # Elsewhere the inverse cores choose no shortest lift along directions
    # that move nothing.
    exact_steps = oracles.horizontal_lift(
      tuple(np.asarray(f) for f in factors), tuple(np.asarray(s) for s in steps)
    )
    for value, target in zip(horizontal, exact_steps, strict=True):
      assert oracles.relative_error(value, target) < 1e-11


@deficient
def test_project_masks_noise_in_directions_that_are_not_observed(kind):
  """Noise goes on all entries first; the mask takes it out afterwards."""
  factors = as_factors(deficient_factors(19, 12, 9, 4, kind))
  point = oracles.Point.from_factors(*factors)
  frame = compiled.frame(factors)
  rng = np.random.default_rng(20)
  noise = as_tangent(rng.standard_normal((12, 4)), rng.standard_normal((9, 4)))
  masked = compiled.project(frame, noise)
  pl = point.left_projector
  q_l, q_r = np.asarray(frame.left), np.asarray(frame.right)
  left = (noise.left - pl @ noise.left) @ (q_r.T @ q_r)
  right = noise.right @ (q_l.T @ q_l)
  assert oracles.relative_error(masked.left, left) < 1e-13
  assert oracles.relative_error(masked.right, right) < 1e-13
  dense = compiled.embed(frame, masked)
  np.testing.assert_allclose(
    optax.tree.norm(masked), np.linalg.norm(dense), rtol=1e-13
  )


def test_transport_from_a_deficient_to_a_full_frame():
  old = compiled.frame(as_factors(deficient_factors(21, 12, 9, 4, 'zero left')))
  new, point, _ = random_problem(22, 12, 9, 4, 3.0)
  frame = compiled.frame(new)
  tangent = random_tangent(23, old)
  moved = compiled.transport(old, frame, tangent)
  exact = point.project(np.asarray(compiled.embed(old, tangent)))
  assert oracles.relative_error(compiled.embed(frame, moved), exact) < 1e-13


@pytest.mark.parametrize(
  'call',
  [
    lambda f, frame, bad: compiled.tangent_from_gradients(
      frame, fixed_rank.Factors(*bad)
    ),
    lambda f, frame, bad: compiled.project(frame, bad),
    lambda f, frame, bad: compiled.lift(frame, bad),
    lambda f, frame, bad: compiled.horizontal_lift(f, fixed_rank.Factors(*bad)),
    lambda f, frame, bad: compiled.embed(frame, bad),
    lambda f, frame, bad: compiled.transport(frame, frame, bad),
    lambda f, frame, bad: compiled.retract(frame, bad),
  ],
)
@pytest.mark.parametrize(
  'shapes', [((6, 2), (5, 2)), ((7, 3), (5, 3)), ((5, 2), (7, 2))]
)
def test_tangents_of_another_shape_are_refused(call, shapes):
  """Broadcasting would turn some of these into a wrong answer."""
  factors, _, _ = random_problem(45, 7, 5, 2)
  frame = compiled.frame(factors)
  bad = fixed_rank.Tangent(*(zeros(*s) for s in shapes))
  with pytest.raises(ValueError, match=r'\(7, 2\)|\(5, 2\)'):
    call(factors, frame, bad)


# Each has a shape of its own.
@pytest.mark.parametrize(
  'case',
  [
    pytest.param(i, marks=() if i in (0, 3) else pytest.mark.slow)
    for i in range(7)
  ],
)
def test_golden_lifts(case, golden):
  d = golden('lift', f'c{case}_')
  factors = as_factors((d['A'], d['B']))
  frame = compiled.frame(factors)
  condition = d['cond'].max()
  # Their route goes through the Gram matrices and loses the square.
  for origin, tolerance in (
    ('oracle', max(1e-11, 100 * EPS[np.float64] * condition)),
    ('ref', {True: 1e-11, False: 1e-7}[condition < 100]),
  ):
    for i in range(5):
      grads = fixed_rank.Factors(d['gA'][i], d['gB'][i])
      tangent = compiled.tangent_from_gradients(frame, grads)
      steps = compiled.lift(frame, tangent)
      golden_steps = fixed_rank.Factors(
        d[f'{origin}_dA'][i], d[f'{origin}_dB'][i]
      )
      dense = (
        golden_steps.left @ factors.right.T
        + factors.left @ golden_steps.right.T
      )
      value = compiled.embed(frame, tangent)
      assert oracles.relative_error(value, dense) < tolerance
      np.testing.assert_allclose(
        optax.tree.norm(tangent), d[f'{origin}_norm'][i], rtol=tolerance
      )
      # Their lift and ours differ by a gauge direction only.
      for a, b in zip(
        compiled.horizontal_lift(factors, steps),
        compiled.horizontal_lift(factors, golden_steps),
        strict=True,
      ):
        assert oracles.relative_error(a, b) < tolerance * condition


@pytest.mark.parametrize('condition', [1.0, 1e3, 1e6])
def test_sylvester_of_grams(condition):
  """The residual is rounding of its largest term, whatever the condition."""
  rng = np.random.default_rng(5)
  a = oracles.random_matrix(rng, 4, 4, condition)
  b = oracles.random_matrix(rng, 4, 4, condition)
  c = rng.normal(size=(4, 4))
  w = np.asarray(sylvester_of_grams(*map(jnp.asarray, (a, b, c))))
  residual = a.T @ a @ w + w @ b.T @ b - c
  size = np.linalg.norm(a) ** 2 * np.abs(w).max()
  assert np.abs(residual).max() <= 1e-14 * max(size, 1.0) * 10
