"""Tangent coordinates where inverse cores are diagonal, and where not."""

import jax
import numpy as np
import pytest

import prism_optax
from tests import cases
from tests.oracles import oracles, problems

RANK = 4


def _factors(gauge, dtype):
  """(left, right) with singular values over two decades, in some gauge."""
  rng = np.random.default_rng(0)
  u, v = (np.linalg.qr(rng.normal(size=(k, RANK)))[0] for k in (9, 7))
  root = np.logspace(0, -1, RANK)
  turn = np.eye(RANK)
  if gauge == 'turned':
    turn = 1e8 * np.linalg.qr(rng.normal(size=(RANK, RANK)))[0]  # Long, too.
  left, right = (u * root @ turn).astype(dtype), (v * root @ turn).astype(dtype)
  if gauge == 'a start':  # One factor zero, and a lost column in the other.
    left, right[:, 1] = 0 * left, 0
  if gauge == 'nearly':
    right[:, 1] += 1e-3 * right[:, 0]
  return left, right


@pytest.mark.parametrize('gauge', ['retracted', 'a start', 'turned', 'nearly'])
@cases.fast_first('dtype', [np.float64], [np.float32, np.float64])
def test_they_are_those_of_the_oracle(gauge, dtype):
  """By columns where that is the same to rounding, and nowhere else."""
  eps = float(np.finfo(dtype).eps)
  with jax.enable_x64(dtype is np.float64):
    pair = _factors(gauge, dtype)
    params = jax.device_get(cases.tree_of([pair], dtype=dtype))
    dense = np.random.default_rng(1).normal(size=(9, 7))
    grads = cases.factor_gradients([pair], [dense], dtype=dtype)
    found = prism_optax.tangent_coordinates(params)(grads)
    # Under jit the program has both and decides by the parameters.
    jitted = jax.jit(lambda p, g: prism_optax.tangent_coordinates(p)(g))
    cases.assert_close(jitted(params, grads), found, 64 * eps)
    (embedded,) = problems.embed(params, found)
  point = oracles.Point.from_factors(*map(np.float64, pair))
  # A gradient of order one over singular values down to a tenth.
  np.testing.assert_allclose(embedded, point.project(dense), atol=200 * eps)
