"""The geometry against the dense oracle.

Tolerances: the column space of a matrix of condition number c is known to
about c times the rounding of its entries, whatever the method, and a
gradient with respect to a factor loses as much when it is whitened.
"""

import functools
import operator
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prism_optax import fixed_rank
from tests import oracles

# m, n and r differ; then r = min(m, n) on either side, and r = 1.
SHAPES = [(12, 9, 4), (7, 16, 4), (5, 11, 5), (13, 4, 4), (8, 6, 1)]
CONDITIONS = [1.0, 10.0, 1e3, 1e6]
EPS = {np.float64: 2.3e-16, np.float32: 1.2e-7}

shapes = pytest.mark.parametrize(('m', 'n', 'rank'), SHAPES)
conditions = pytest.mark.parametrize('condition', CONDITIONS)
pytestmark = pytest.mark.usefixtures('x64')


# Compiled once for each shape: without `jit` the conditionals and loops inside
# are compiled anew at every call, which takes a thousand times longer.
compiled = types.SimpleNamespace(
  frame=jax.jit(fixed_rank.frame),
  tangent_from_gradients=jax.jit(fixed_rank.tangent_from_gradients),
  project=jax.jit(fixed_rank.project),
  lift=jax.jit(fixed_rank.lift),
  tangent_from_steps=jax.jit(fixed_rank.tangent_from_steps),
  horizontal_lift=jax.jit(fixed_rank.horizontal_lift),
  norm=jax.jit(fixed_rank.norm),
  embed=jax.jit(fixed_rank.embed),
  transport=jax.jit(fixed_rank.transport),
  retract=jax.jit(fixed_rank.retract, static_argnames=('method', 'align')),
)


def as_factors(factors, dtype=np.float64):
  return fixed_rank.Factors(*(jnp.asarray(f, dtype) for f in factors))


def as_tangent(left, right, dtype=np.float64):
  return fixed_rank.Tangent(jnp.asarray(left, dtype), jnp.asarray(right, dtype))


def product(factors):
  left, right = (np.asarray(f, np.float64) for f in factors)
  return left @ np.swapaxes(right, -1, -2)


def sides(frame):
  """(basis, core) of the left and of the right factor."""
  return (frame.left, frame.left_core), (frame.right, frame.right_core)


def gradients(factors, g):
  """What automatic differentiation gives for a dense gradient G."""
  return fixed_rank.Factors(
    g @ factors.right, g.swapaxes(-1, -2) @ factors.left
  )


def random_problem(seed, m, n, rank, condition=1.0, dtype=np.float64):
  """Factors as the package gets them, the same point, and a dense G."""
  rng = np.random.default_rng(seed)
  factors = as_factors(
    oracles.random_factors(rng, m, n, rank, condition), dtype
  )
  g = rng.standard_normal((m, n)).astype(dtype)
  return factors, oracles.Point.from_factors(*factors, eps=EPS[dtype]), g


def random_tangent(seed, frame):
  """A tangent vector with entries of order one at a frame."""
  rng = np.random.default_rng(seed)
  blocks = (
    rng.standard_normal(x.shape).astype(x.dtype)
    for x in (frame.left, frame.right)
  )
  return compiled.project(frame, fixed_rank.Tangent(*blocks))


def scaled(tangent, factor):
  return jax.tree.map(lambda x: x * factor, tangent)


def deficient_factors(seed, m, n, rank, kind):
  """Factors without full rank, as they occur: zero, or columns that agree."""
  rng = np.random.default_rng(seed)
  left, right = oracles.random_factors(rng, m, n, rank, 3.0)
  if kind == 'zero left':
    left = 0 * left
  elif kind == 'zero right':
    right = 0 * right
  elif kind == 'both zero':
    left, right = 0 * left, 0 * right
  elif kind == 'zero columns':
    left[:, 1], right[:, 2] = 0, 0
  elif kind == 'equal columns':
    left[:, 2] = left[:, 0]
  elif kind == 'rank one less':
    left = (
      left
      @ oracles.random_matrix(rng, rank, rank - 1)
      @ (rng.standard_normal((rank - 1, rank)))
    )
  else:
    raise ValueError(kind)
  return left, right


DEFICIENT = [
  'zero left',
  'zero right',
  'both zero',
  'zero columns',
  'equal columns',
  'rank one less',
]
deficient = pytest.mark.parametrize('kind', DEFICIENT)


# Frames.


@shapes
@conditions
@pytest.mark.parametrize('dtype', [np.float64, np.float32])
def test_frame_is_orthonormal_and_reproduces_the_factors(
  m, n, rank, condition, dtype
):
  factors, point, _ = random_problem(0, m, n, rank, condition, dtype)
  if condition * rank * EPS[dtype] > 0.1:
    pytest.skip('Below the rounding of the factors: masked, tested elsewhere.')
  frame = compiled.frame(factors)
  projectors = (point.left_projector, point.right_projector)
  for (q, core), factor, projector in zip(
    sides(frame), factors, projectors, strict=True
  ):
    assert q.dtype == core.dtype == dtype
    q, core = np.asarray(q, np.float64), np.asarray(core, np.float64)
    assert oracles.relative_error(q.T @ q, np.eye(rank)) < 20 * EPS[dtype]
    assert oracles.relative_error(q @ core, factor) < 20 * EPS[dtype]
    span = 20 * EPS[dtype] * condition
    assert np.max(np.abs(q @ q.T - projector)) < span


@pytest.mark.parametrize('dtype', [np.float64, np.float32])
def test_frame_in_the_balanced_gauge_is_exact_at_any_condition(dtype):
  """Orthogonal columns have a span that rounding does not disturb."""
  rng = np.random.default_rng(1)
  factors = oracles.balance(oracles.random_factors(rng, 30, 20, 4, 1e3))
  factors = as_factors(factors, dtype)  # Condition number of Z: 1e6.
  frame = compiled.frame(factors)
  for q, factor in zip(frame[:2], factors, strict=True):
    q = np.asarray(q, np.float64)
    columns = np.asarray(factor, np.float64)
    exact = oracles.projector(columns / np.linalg.norm(columns, axis=0))
    assert np.max(np.abs(q @ q.T - exact)) < 20 * EPS[dtype]
    assert oracles.relative_error(q.T @ q, np.eye(4)) < 20 * EPS[dtype]


@pytest.mark.parametrize('gauge', ['general', 'balanced', 'equal values'])
def test_frame_is_a_continuous_function_of_the_factors(gauge):
  """Singular vectors would turn freely where singular values coincide."""
  rng = np.random.default_rng(2)
  factors = oracles.random_factors(rng, 12, 9, 4, 5.0)
  if gauge != 'general':
    factors = oracles.balance(factors)
  if gauge == 'equal values':
    factors = tuple(f / np.linalg.norm(f, axis=0) for f in factors)
  frame = compiled.frame(as_factors(factors))
  for size in (1e-5, 1e-7, 1e-9, 1e-11):
    moved = [f + size * rng.standard_normal(f.shape) for f in factors]
    other = compiled.frame(as_factors(moved))
    for a, b in zip(frame, other, strict=True):
      assert oracles.relative_error(b, a) < 300 * size


@conditions
def test_a_gauge_turns_the_coordinates_by_orthogonal_matrices(condition):
  """(L, R) -> (L K, R K^-T): X_L -> X_L O_R and X_R -> X_R O_L."""
  rng = np.random.default_rng(3)
  factors = oracles.random_factors(rng, 12, 9, 4, 2.0)
  gauge = oracles.random_gauge(rng, 4, condition, 7.0)
  g = rng.standard_normal((12, 9))
  tolerance = 100 * EPS[np.float64] * condition
  frames, tangents = [], []
  for pair in (factors, oracles.change_gauge(factors, gauge)):
    pair = as_factors(pair)
    frames.append(compiled.frame(pair))
    tangents.append(
      compiled.tangent_from_gradients(frames[-1], gradients(pair, g))
    )
  turns = [a.T @ b for a, b in zip(frames[0][:2], frames[1][:2], strict=True)]
  for turn in turns:
    assert oracles.relative_error(turn.T @ turn, np.eye(4)) < tolerance
  left, right = tangents[0].left @ turns[1], tangents[0].right @ turns[0]
  assert oracles.relative_error(tangents[1].left, left) < tolerance
  assert oracles.relative_error(tangents[1].right, right) < tolerance


# Tangent vectors.


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
  np.testing.assert_allclose(compiled.norm(tangent), norm, rtol=tolerance)
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
    compiled.norm(projected), np.linalg.norm(dense), rtol=1e-14
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
    compiled.norm(tangent), np.linalg.norm(exact), rtol=tolerance
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
    compiled.norm(moved), np.linalg.norm(exact), rtol=tolerance
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


# Zero and rank-deficient factors.


@deficient
@pytest.mark.parametrize('dtype', [np.float64, np.float32])
def test_deficient_frames_are_partial_isometries(kind, dtype):
  factors = as_factors(deficient_factors(16, 12, 9, 4, kind), dtype)
  frame = compiled.frame(factors)
  for (q, core), factor in zip(sides(frame), factors, strict=True):
    q, core = np.asarray(q, np.float64), np.asarray(core, np.float64)
    factor = np.asarray(factor, np.float64)
    mask = q.T @ q
    exact = oracles.projector(factor, EPS[dtype])
    tolerance = 100 * EPS[dtype]
    assert np.max(np.abs(q @ q.T - exact)) < tolerance
    assert np.max(np.abs(mask @ mask - mask)) < tolerance
    np.testing.assert_allclose(np.trace(mask), np.trace(exact), atol=1e-4)
    assert oracles.relative_error(q @ core, factor) < tolerance
    if not factor.any():
      assert not q.any()


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
    compiled.norm(tangent), np.linalg.norm(exact), rtol=1e-13
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
      tuple(np.asarray(f) for f in factors),
      tuple(np.asarray(s) for s in steps),
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
    compiled.norm(masked), np.linalg.norm(dense), rtol=1e-13
  )


def test_transport_from_a_deficient_to_a_full_frame():
  old = compiled.frame(as_factors(deficient_factors(21, 12, 9, 4, 'zero left')))
  new, point, _ = random_problem(22, 12, 9, 4, 3.0)
  frame = compiled.frame(new)
  tangent = random_tangent(23, old)
  moved = compiled.transport(old, frame, tangent)
  exact = point.project(np.asarray(compiled.embed(old, tangent)))
  assert oracles.relative_error(compiled.embed(frame, moved), exact) < 1e-13


@deficient
@pytest.mark.parametrize('method', ['svd', 'second_order'])
@pytest.mark.parametrize('dtype', [np.float64, np.float32])
def test_a_step_from_deficient_factors_lands_on_the_best_approximation(
  kind, method, dtype
):
  factors = as_factors(deficient_factors(24, 12, 9, 4, kind), dtype)
  frame = compiled.frame(factors)
  tangent = scaled(random_tangent(25, frame), 0.3)
  new = compiled.retract(frame, tangent, method=method)
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


# Retraction.


def step_of_size(factors, frame, size, seed=28):
  """A tangent with the given size relative to ||Z||."""
  tangent = random_tangent(seed, frame)
  scale = size * np.linalg.norm(product(factors)) / compiled.norm(tangent)
  return scaled(tangent, float(scale))  # A Python float keeps the type.


@shapes
@conditions
@pytest.mark.parametrize('align', [False, True])
def test_retraction_is_the_best_approximation(m, n, rank, condition, align):
  factors, point, _ = random_problem(29, m, n, rank, condition)
  frame = compiled.frame(factors)
  tangent = step_of_size(factors, frame, 0.3)
  new = compiled.retract(frame, tangent, align=align)
  target = point.z + compiled.embed(frame, tangent)
  exact = oracles.best_approximation(target, rank)
  # Of the order of ||Z||: the truncation has no small numbers to divide by.
  assert oracles.relative_error(product(new), exact) < 200 * EPS[np.float64]
  balanced = oracles.balance(tuple(np.asarray(f) for f in new))
  grams = [np.asarray(f).T @ np.asarray(f) for f in new]
  assert oracles.relative_error(grams[0], grams[1]) < 1e-13
  if align:
    old = tuple(np.asarray(f) for f in factors)
    for value, aligned in zip(new, oracles.align(balanced, old), strict=True):
      tolerance = 1e-13 * condition  # The Procrustes factor's own.
      assert oracles.relative_error(value, aligned) < tolerance


@pytest.mark.parametrize('dtype', [np.float64, np.float32])
@pytest.mark.parametrize('condition', [1.0, 30.0, 300.0])
def test_retraction_returns_the_balanced_gauge(condition, dtype):
  """Orthogonal columns whatever their size, and equal norms on both sides."""
  factors, _, _ = random_problem(30, 30, 20, 4, condition, np.float64)
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
  assert np.all(np.diff(norms[0]) <= 0)


def test_retraction_in_float32():
  factors, point, _ = random_problem(31, 40, 24, 4, 10.0, np.float32)
  frame = compiled.frame(factors)
  tangent = step_of_size(factors, frame, 0.3)
  target = point.z + np.asarray(compiled.embed(frame, tangent), np.float64)
  exact = oracles.best_approximation(target, 4)
  for method in ('svd', 'second_order'):
    new = compiled.retract(frame, tangent, method=method)
    assert new.left.dtype == new.right.dtype == jnp.float32
    assert oracles.relative_error(product(new), exact) < 3e-6


def test_second_order_retraction_is_off_by_the_third_power_of_the_step():
  factors, point, _ = random_problem(32, 20, 14, 3, 1.5)
  frame = compiled.frame(factors)
  errors = []
  for size in (2e-2, 2e-3, 2e-4):
    tangent = step_of_size(factors, frame, size)
    new = compiled.retract(frame, tangent, method='second_order')
    target = point.z + compiled.embed(frame, tangent)
    exact = oracles.best_approximation(np.asarray(target), 3)
    errors.append(oracles.relative_error(product(new), exact))
  assert errors[0] > 1e-9, 'The step is too small to see an order.'
  # A tenth of the step, a thousandth of the error: factor addition, which is
  # of second order, would give a hundredth.
  assert errors[1] < errors[0] / 500
  assert errors[2] < max(errors[1] / 500, 1e-14)


@pytest.mark.parametrize(
  ('condition', 'size'), [(1.0, 0.5), (100.0, 0.02), (1e6, 1e-3)]
)
def test_second_order_retraction_falls_back_where_it_would_be_wrong(
  condition, size
):
  factors, point, _ = random_problem(33, 20, 14, 3, condition)
  frame = compiled.frame(factors)
  tangent = step_of_size(factors, frame, size)
  new = compiled.retract(frame, tangent, method='second_order')
  target = np.asarray(point.z + compiled.embed(frame, tangent))
  exact = oracles.best_approximation(target, 3)
  assert oracles.relative_error(product(new), exact) < 1e-12


@pytest.mark.parametrize('method', ['svd', 'second_order'])
@pytest.mark.parametrize('kind', ['full', *DEFICIENT])
def test_no_step_keeps_the_factors(method, kind):
  if kind == 'full':
    factors, _, _ = random_problem(34, 12, 9, 4, 10.0)
  else:
    factors = as_factors(deficient_factors(34, 12, 9, 4, kind))
  frame = compiled.frame(factors)
  zero = jax.tree.map(jnp.zeros_like, as_tangent(*factors))
  new = compiled.retract(frame, zero, method=method)
  for a, b in zip(new, factors, strict=True):
    assert oracles.relative_error(a, b) < 20 * EPS[np.float64]


def minus_z(factors, frame, keep=0):
  """-Z as a tangent vector, but for its ``keep`` leading directions."""
  left, right = (np.asarray(f) for f in factors)
  z = left @ right.T
  dense = oracles.best_approximation(z, keep) - z
  return as_tangent(np.zeros_like(left), dense.T @ np.asarray(frame.left))


@pytest.mark.parametrize('method', ['svd', 'second_order'])
def test_a_step_that_erases_everything_keeps_one_side(method):
  """Both factors zero could never be trained again."""
  # Powers of two make Z + T cancel without rounding.
  factors = as_factors((np.eye(12, 4) * [8.0, 4.0, 2.0, 1.0], np.eye(9, 4)))
  frame = compiled.frame(factors)
  new = compiled.retract(frame, minus_z(factors, frame), method=method)
  assert not product(new).any()
  ranks = sorted(np.linalg.matrix_rank(np.asarray(f)) for f in new)
  assert ranks == [0, 4]


@pytest.mark.parametrize('method', ['svd', 'second_order'])
@pytest.mark.parametrize('rank', [2, 3])
def test_a_lost_direction_keeps_one_side_alive(method, rank):
  factors, _, _ = random_problem(36, 12, 9, rank, 2.0)
  frame = compiled.frame(factors)
  tangent = minus_z(factors, frame, keep=rank - 1)
  new = compiled.retract(frame, tangent, method=method)
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


# Broadcasting, transformations, errors.


def all_results(factors, grads, geometry=compiled):
  """Every function of the module in one call."""
  frame = geometry.frame(factors)
  tangent = geometry.tangent_from_gradients(frame, grads)
  tangent = geometry.project(frame, scaled(tangent, 0.1))
  steps = geometry.lift(frame, tangent)
  new = geometry.retract(frame, tangent)
  aligned = geometry.retract(frame, tangent, align=True)
  return {
    'frame': frame,
    'tangent': tangent,
    'norm': geometry.norm(tangent),
    'embed': geometry.embed(frame, tangent),
    'lift': steps,
    'horizontal_lift': geometry.horizontal_lift(factors, steps),
    'retract': new,
    'aligned': aligned,
    'second_order': geometry.retract(frame, tangent, method='second_order'),
    'transport': geometry.transport(frame, geometry.frame(aligned), tangent),
  }


def stacked_problem():
  """Factors and gradients with two leading axes, two modules degenerate."""
  rng = np.random.default_rng(39)
  left = rng.standard_normal((2, 3, 8, 3))
  right = rng.standard_normal((2, 3, 6, 3))
  left[1, 2] = 0
  right[0, 1, :, 2] = right[0, 1, :, 0]
  factors = as_factors((left, right))
  return factors, gradients(factors, rng.standard_normal((2, 3, 8, 6)))


def assert_trees_close(tree, target, tolerance=1e-12):
  paths = jax.tree_util.tree_leaves_with_path(tree)
  for (path, a), b in zip(paths, jax.tree.leaves(target), strict=True):
    assert oracles.relative_error(a, b) < tolerance, path


def test_leading_axes_are_a_stack_of_modules():
  factors, grads = stacked_problem()
  stacked = all_results(factors, grads)
  for index in np.ndindex(2, 3):
    take = functools.partial(jax.tree.map, operator.itemgetter(index))
    one = all_results(*take((factors, grads)))
    assert_trees_close(take(stacked), one)


def test_jit_and_vmap_change_nothing():
  factors, grads = stacked_problem()
  expected = all_results(factors, grads, fixed_rank)
  assert_trees_close(all_results(factors, grads), expected)
  mapped = jax.jit(jax.vmap(jax.vmap(all_results)))(factors, grads)
  assert_trees_close(mapped, expected)


@pytest.mark.parametrize('kind', ['full', *DEFICIENT])
def test_everything_is_finite_and_keeps_float32(kind):
  if kind == 'full':
    factors, _, _ = random_problem(40, 12, 9, 4, 1e6, np.float32)
  else:
    factors = as_factors(deficient_factors(40, 12, 9, 4, kind), np.float32)
  g = np.random.default_rng(41).standard_normal((12, 9)).astype(np.float32)
  for path, x in jax.tree_util.tree_leaves_with_path(
    all_results(factors, gradients(factors, g))
  ):
    assert x.dtype == jnp.float32, path
    assert np.all(np.isfinite(x)), path


@pytest.mark.parametrize('kind', ['full', *DEFICIENT])
@pytest.mark.parametrize('scale', [1e-12, 1e12])
def test_the_scale_of_the_factors_does_not_matter(kind, scale):
  """In float32 the squares of such numbers leave the range of the type."""
  if kind == 'full':
    pair = tuple(random_problem(42, 12, 9, 4, 3.0)[0])
  else:
    pair = deficient_factors(42, 12, 9, 4, kind)
  factors = as_factors((pair[0] * scale, pair[1] / scale), np.float32)
  frame = compiled.frame(factors)
  plain = compiled.frame(as_factors(pair, np.float32))
  for a, b in zip(frame[:2], plain[:2], strict=True):
    assert oracles.relative_error(a @ a.T, b @ b.T) < 1e-5


@pytest.mark.parametrize('kind', ['full', *DEFICIENT])
def test_derivatives_are_finite_and_stop_at_the_frames(kind):
  """A frame has no derivative at a zero factor; it counts as a constant."""
  if kind == 'full':
    factors, _, _ = random_problem(43, 12, 9, 4, 3.0)
  else:
    factors = as_factors(deficient_factors(43, 12, 9, 4, kind))
  g = np.random.default_rng(44).standard_normal((12, 9))
  grads = gradients(factors, jnp.asarray(g))

  def energy(factors, grads):
    frame = compiled.frame(factors)
    tangent = compiled.tangent_from_gradients(frame, grads)
    return sum(jnp.sum(x**2) for x in tangent) / 2  # No root at zero.

  d_factors, d_grads = jax.grad(energy, argnums=(0, 1))(factors, grads)
  for x in d_factors:
    assert not np.any(np.asarray(x))
  assert np.all(np.isfinite(np.concatenate(d_grads)))
  # Half the square is homogeneous of degree two: <x, df(x)> = 2 f(x).
  inner = sum(np.vdot(a, b) for a, b in zip(d_grads, grads, strict=True))
  np.testing.assert_allclose(inner, 2 * energy(factors, grads), atol=1e-11)


def zeros(*shape):
  return jnp.zeros(shape)


@pytest.mark.parametrize(
  ('left', 'right', 'message'),
  [
    (zeros(5, 2), zeros(4, 3), r'\(5, 2\).*\(4, 3\)'),
    (zeros(2, 5, 2), zeros(3, 4, 2), r'\(2, 5, 2\).*\(3, 4, 2\)'),
    (zeros(5, 4), zeros(3, 4), 'rank'),
    (zeros(3, 4), zeros(5, 4), 'rank'),
    (zeros(5), zeros(4), r'\(5,\)'),
    (zeros(5, 0), zeros(4, 0), 'rank'),
  ],
)
def test_factors_that_do_not_fit_are_refused(left, right, message):
  factors = fixed_rank.Factors(left, right)
  with pytest.raises(ValueError, match=message):
    compiled.frame(factors)
  with pytest.raises(ValueError, match=message):
    jax.eval_shape(fixed_rank.frame, factors)


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


def test_an_unknown_retraction_is_refused():
  factors, _, _ = random_problem(46, 7, 5, 2)
  frame = compiled.frame(factors)
  with pytest.raises(ValueError, match="'qr'"):
    compiled.retract(frame, random_tangent(47, frame), method='qr')


# Numbers from the authors' code.


@pytest.mark.parametrize('case', range(7))
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
        compiled.norm(tangent), d[f'{origin}_norm'][i], rtol=tolerance
      )
      # Their lift and ours differ by a gauge direction only.
      for a, b in zip(
        compiled.horizontal_lift(factors, steps),
        compiled.horizontal_lift(factors, golden_steps),
        strict=True,
      ):
        assert oracles.relative_error(a, b) < tolerance * condition


@pytest.mark.parametrize('case', range(5))
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
  assert oracles.relative_error(product(new), d['oracle_Z']) < 1e-11
  noalign = d['ref_A_noalign'] @ d['ref_B_noalign'].T
  assert oracles.relative_error(product(new), noalign) < 1e-11
  aligned = compiled.retract(frame, tangent, align=True)
  for value, name in zip(aligned, 'AB', strict=True):
    for origin in ('ref', 'oracle'):
      target = d[f'{origin}_{name}_align']
      assert oracles.relative_error(value, target) < 1e-11
