"""Muon on the manifold against dense projectors and a dense iteration."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prism_optax import fixed_rank
from prism_optax.contrib import _tangent_newton_schulz
from prism_optax.fixed_rank import _lifts
from tests.oracles import muon_oracle, oracles

M, N, RANK = 13, 9, 3
# The many small operations take longer one by one.
tangent_newton_schulz = jax.jit(
  _tangent_newton_schulz.tangent_newton_schulz,
  static_argnames=('degree', 'steps', 'normalize'),
)
frame_of = jax.jit(fixed_rank.frame)
tangent_from_gradients = jax.jit(fixed_rank.tangent_from_gradients)


def _projectors(frame):
  left, right = (np.asarray(q, np.float64) for q in (frame.left, frame.right))
  return left @ left.T, right @ right.T


def _project(frame, dense):
  p_left, p_right = _projectors(frame)
  return p_left @ dense + dense @ p_right - p_left @ dense @ p_right


def _tangent(factors, gradient):
  """Frame and coordinates of the tangent projection of a dense gradient."""
  pair = fixed_rank.Factors(*factors)
  frame = jax.device_get(frame_of(pair))
  left, right = (np.asarray(q, np.float64) for q in (frame.left, frame.right))
  x_left = (gradient - left @ (left.T @ gradient)) @ right
  x_right = gradient.T @ left
  dtype = pair.left.dtype
  return frame, fixed_rank.Tangent(x_left.astype(dtype), x_right.astype(dtype))


_embedded = jax.jit(_lifts.embed)


def _embed(frame, tangent):
  return np.asarray(_embedded(frame, tangent), np.float64)


@pytest.mark.parametrize(
  ('m', 'n', 'rank', 'degree', 'steps', 'normalize'),
  [
    # Every polynomial on one shape, and every shape under one polynomial.
    (M, N, RANK, 2, 5, 'max1'),
    (M, N, RANK, 1, 1, 'max1'),
    (M, N, RANK, 3, 4, 'max1'),
    (M, N, RANK, 2, 5, 'frobenius'),
    pytest.param(9, 13, 3, 2, 5, 'max1', marks=pytest.mark.slow),
    (8, 8, 1, 2, 5, 'max1'),
    pytest.param(7, 4, 4, 2, 5, 'max1', marks=pytest.mark.slow),
    (4, 4, 4, 2, 5, 'max1'),
  ],
)
def test_is_the_projected_dense_iteration(
  x64, m, n, rank, degree, steps, normalize
):
  """r = 1 and r = min(m, n) too, where outer blocks have less room."""
  rng = np.random.default_rng(m + 100 * degree)
  factors = oracles.random_factors(rng, m, n, rank, 10.0)
  for size in (1e-3, 0.5, 1e3):
    gradient = size * rng.standard_normal((m, n))
    frame, tangent = _tangent(factors, gradient)
    out = tangent_newton_schulz(
      frame, tangent, degree=degree, steps=steps, normalize=normalize
    )
    dense = muon_oracle.orthogonalize(
      _project(frame, gradient), degree, steps, normalize
    )
    expected = _project(frame, dense)
    np.testing.assert_allclose(_embed(frame, out), expected, atol=1e-13)
    # And it is in coordinates: the left part orthogonal to the frame.
    np.testing.assert_allclose(frame.left.T @ out.left, 0, atol=1e-13)


def test_the_orthogonalized_vector_itself_is_not_tangent(x64):
  """Otherwise the projection in the test above would show nothing."""
  rng = np.random.default_rng(0)
  factors = oracles.random_factors(rng, M, N, RANK)
  frame, tangent = _tangent(factors, rng.standard_normal((M, N)))
  dense = muon_oracle.orthogonalize(_embed(frame, tangent), 2, 5)
  assert np.linalg.norm(dense - _project(frame, dense)) > 0.2


def test_many_steps_reach_the_projected_polar_factor(x64):
  rng = np.random.default_rng(1)
  factors = oracles.random_factors(rng, M, N, RANK)
  frame, tangent = _tangent(factors, rng.standard_normal((M, N)))
  out = tangent_newton_schulz(frame, tangent, steps=14)
  polar = muon_oracle.polar(_embed(frame, tangent))
  assert np.linalg.matrix_rank(polar) == 2 * RANK
  np.testing.assert_allclose(
    _embed(frame, out), _project(frame, polar), atol=1e-12
  )


@pytest.mark.parametrize('condition', [1.0, 1e3, 1e6])
def test_float32_at_any_condition(condition):
  """Only orthonormal frames enter: the condition of Z does not."""
  rng = np.random.default_rng(2)
  factors = oracles.balance(oracles.random_factors(rng, M, N, RANK, condition))
  factors = [np.asarray(f, np.float32) for f in factors]
  frame, tangent = _tangent(factors, rng.standard_normal((M, N)))
  assert tangent.left.dtype == jnp.float32
  out = tangent_newton_schulz(frame, tangent)
  dense = muon_oracle.orthogonalize(_embed(frame, tangent), 2, 5)
  # A dozen units in the last place: sums of M = 13 terms.
  np.testing.assert_allclose(
    _embed(frame, out), _project(frame, dense), atol=2e-6
  )


def test_rank_deficient_factors_and_tangents(x64):
  """A zero factor shows one side only; the iteration stays the dense one."""
  rng = np.random.default_rng(4)
  left, right = oracles.random_factors(rng, M, N, RANK)
  gradient = rng.standard_normal((M, N))
  lost = left.copy()
  lost[:, 1] = lost[:, 0]
  for pair in [(left, 0 * right), (0 * left, right), (lost, right)]:
    frame, tangent = _tangent(pair, gradient)
    # Columns that no basis shows are no part of the vector, whatever they say.
    loud = tangent._replace(
      left=tangent.left + tangent.left[:, ::-1], right=3.0 + tangent.right
    )
    for x in (tangent, loud):
      out = tangent_newton_schulz(frame, x)
      dense = muon_oracle.orthogonalize(
        _embed(frame, x) / max(1, np.hypot(*map(np.linalg.norm, x))),
        2,
        5,
        'none',
      )
      np.testing.assert_allclose(
        _embed(frame, out), _project(frame, dense), atol=1e-13
      )
      assert np.linalg.norm(_embed(frame, out)) > 0.5
  # Outer bases that are zero or of rank one.
  frame, tangent = _tangent((left, right), gradient)
  for x in [
    tangent._replace(left=np.zeros_like(tangent.left)),
    jax.tree.map(lambda a: a * (np.arange(RANK) == 0), tangent),
    jax.tree.map(np.zeros_like, tangent),
  ]:
    out = tangent_newton_schulz(frame, x)
    dense = muon_oracle.orthogonalize(_embed(frame, x), 2, 5)
    np.testing.assert_allclose(
      _embed(frame, out), _project(frame, dense), atol=1e-13
    )


def test_stacked_modules_and_bounded_norms(x64):
  rng = np.random.default_rng(5)
  stack = [oracles.random_factors(rng, M, N, RANK) for _ in range(3)]
  pair = fixed_rank.Factors(
    *(np.stack(side) for side in zip(*stack, strict=True))
  )
  frame = jax.device_get(frame_of(pair))
  grads = fixed_rank.Factors(
    rng.standard_normal((3, M, RANK)) * 1e4,
    rng.standard_normal((3, N, RANK)) * 1e4,
  )
  tangent = jax.device_get(tangent_from_gradients(frame, grads))
  out = tangent_newton_schulz(frame, tangent, steps=9)
  for i in range(3):
    one = jax.tree.map(lambda x: x[i], (frame, tangent))  # noqa: B023
    expected = tangent_newton_schulz(*one, steps=9)
    np.testing.assert_allclose(out.left[i], expected.left, atol=1e-14)
    np.testing.assert_allclose(out.right[i], expected.right, atol=1e-14)
    dense = _embed(one[0], expected)
    assert np.linalg.norm(dense, 2) <= 2
    assert np.linalg.norm(dense) <= np.sqrt(2 * RANK)


def test_each_side_keeps_its_type():
  factors = np.ones((M, RANK)), np.ones((N, RANK))
  frame, x = _tangent([np.float32(f) for f in factors], np.ones((M, N)))
  x = fixed_rank.Tangent(x.left, x.right.astype(jnp.bfloat16))
  new = jax.eval_shape(_tangent_newton_schulz.tangent_newton_schulz, frame, x)
  assert (new.left.dtype, new.right.dtype) == (jnp.float32, jnp.bfloat16)


def test_nothing_as_large_as_the_matrix_is_formed():
  shapes = [(300, 4), (200, 4)]
  left, right = (jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes)
  pair = fixed_rank.Factors(left, right)
  frame = jax.eval_shape(fixed_rank.frame, pair)
  jaxpr = jax.make_jaxpr(_tangent_newton_schulz.tangent_newton_schulz)(
    frame, fixed_rank.Tangent(left, right)
  )
  sizes = [v.aval.size for e in jaxpr.jaxpr.eqns for v in e.outvars]
  assert max(sizes) <= 300 * 4
