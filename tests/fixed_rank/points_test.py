"""Frames against the dense oracle."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.fixed_rank import cases as g
from tests.oracles import oracles

pytestmark = pytest.mark.usefixtures('x64')


FACTORS = [
  # At 1e6 the smallest direction is below the rounding of float32: masked.
  *(
    (g.random_problem(0, *shape, c, dtype)[0], 20, c)
    for shape, c, dtype in (
      *((x, c, np.float64) for x in g.SHAPES for c in g.CONDITIONS),
      (g.SHAPES[0], 1e3, np.float32),
    )
  ),
  *(
    (g.deficient_factors(16, kind, dtype), 100, 1)
    for kind in g.DEFICIENT
    for dtype in (np.float64, np.float32)
  ),
]


@pytest.mark.parametrize(('factors', 'room', 'condition'), FACTORS)
def test_frames_are_partial_isometries_that_reproduce_the_factors(
  factors, room, condition
):
  """Orthonormal columns where the factors have full rank."""
  dtype = factors.left.dtype.type
  frame, tolerance = g.compiled.frame(factors), room * g.EPS[dtype]
  for (q, core), factor in zip(g.sides(frame), factors, strict=True):
    assert q.dtype == core.dtype == dtype
    q, core, factor = map(np.float64, (q, core, factor))
    exact = oracles.projector(factor, g.EPS[dtype])
    rank, mask = np.linalg.matrix_rank(exact), q.T @ q
    assert oracles.relative_error(q @ core, factor) < tolerance
    assert np.max(np.abs(q @ q.T - exact)) < tolerance * condition
    assert np.max(np.abs(mask @ mask - mask)) < tolerance
    np.testing.assert_allclose(np.trace(mask), rank, atol=1e-4)
    if rank == len(mask):
      assert oracles.relative_error(mask, np.eye(rank)) < tolerance
    assert q.any() == factor.any()


@g.dtypes
def test_frame_in_the_balanced_gauge_is_exact_at_any_condition(dtype):
  """Orthogonal columns have a span that rounding does not disturb."""
  rng = np.random.default_rng(1)
  factors = oracles.balance(oracles.random_factors(rng, 12, 9, 4, 1e3))
  factors = g.as_factors(factors, dtype)  # Condition number of Z: 1e6.
  frame = g.compiled.frame(factors)
  for q, factor in zip(frame[:2], factors, strict=True):
    q = np.asarray(q, np.float64)
    columns = np.asarray(factor, np.float64)
    exact = oracles.projector(columns / np.linalg.norm(columns, axis=0))
    assert np.max(np.abs(q @ q.T - exact)) < 20 * g.EPS[dtype]
    assert oracles.relative_error(q.T @ q, np.eye(4)) < 20 * g.EPS[dtype]


@pytest.mark.parametrize('gauge', ['general', 'balanced', 'equal values'])
def test_frame_is_a_continuous_function_of_the_factors(gauge):
  """Singular vectors would turn freely where singular values coincide."""
  rng = np.random.default_rng(2)
  factors = oracles.random_factors(rng, 12, 9, 4, 5.0)
  if gauge != 'general':
    factors = oracles.balance(factors)
  if gauge == 'equal values':
    factors = tuple(f / np.linalg.norm(f, axis=0) for f in factors)
  frame = g.compiled.frame(g.as_factors(factors))
  for size in (1e-5, 1e-8, 1e-11):
    moved = [f + size * rng.standard_normal(f.shape) for f in factors]
    other = g.compiled.frame(g.as_factors(moved))
    for a, b in zip(frame, other, strict=True):
      assert oracles.relative_error(b, a) < 300 * size


@g.full_or_deficient
def test_derivatives_are_finite_and_stop_at_the_frames(kind):
  """A frame has no derivative at a zero factor; it counts as a constant."""
  factors = g.deficient_factors(43, kind)
  grads = g.gradients(factors, np.random.default_rng(44).normal(size=(12, 9)))

  @jax.jit
  @functools.partial(jax.value_and_grad, argnums=(0, 1))
  def energy(factors, grads):
    frame = g.compiled.frame(factors)
    tangent = g.compiled.tangent_from_gradients(frame, grads)
    return sum(jnp.sum(x**2) for x in tangent) / 2  # No root at zero.

  value, (d_factors, d_grads) = energy(factors, grads)
  assert not np.any(np.concatenate(d_factors))
  assert np.all(np.isfinite(np.concatenate(d_grads)))
  # Half the square is homogeneous of degree two: <x, df(x)> = 2 f(x).
  inner = sum(np.vdot(a, b) for a, b in zip(d_grads, grads, strict=True))
  np.testing.assert_allclose(inner, 2 * value, atol=1e-11)
