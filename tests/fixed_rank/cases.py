"""Random factors, gradients and tangents for the tests of the geometry.

Tolerances: the column space of a matrix of condition number c is known to
about c times the rounding of its entries, whatever the method, and a
gradient with respect to a factor loses as much when it is whitened.
"""

import types

import jax
import numpy as np
import pytest

from prism_optax import fixed_rank
from tests import cases
from tests.oracles import oracles

# m, n and r differ; then r = min(m, n) on either side, and r = 1.
SHAPES = [(12, 9, 4), (5, 11, 5), (13, 4, 4), (8, 6, 1)]
CONDITIONS = [1.0, 1e3, 1e6]
EPS = {np.float64: 2.3e-16, np.float32: 1.2e-7}

# Each is a program of its own: the fast tests have two.
shapes = cases.fast_first(('m', 'n', 'rank'), SHAPES[:2], SHAPES)
conditions = pytest.mark.parametrize('condition', CONDITIONS)
dtypes = pytest.mark.parametrize('dtype', [np.float64, np.float32])


def compile_once(function):
  """Compiled once for each shape, with results on the host.

  The tests share the shapes, and go on in NumPy: many small operations of JAX
  take much longer one by one.
  """
  function = jax.jit(function)

  def call(*args):
    out = function(*args)
    traced = any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(out))
    return out if traced else jax.device_get(out)

  return call


# Without and with alignment: one program is cheaper than two.
_retracted = compile_once(
  lambda frame, tangent: (
    fixed_rank.retraction(frame, tangent),
    fixed_rank.retraction(frame, tangent, align=True),
  )
)
compiled = types.SimpleNamespace(
  frame=compile_once(fixed_rank.frame),
  tangent_from_gradients=compile_once(fixed_rank.tangent_from_gradients),
  project=compile_once(fixed_rank.project),
  transport=compile_once(fixed_rank.transport),
  retract=lambda frame, x, align=False: _retracted(frame, x)[align],
)


def as_factors(factors, dtype=np.float64):
  return fixed_rank.Factors(*(np.asarray(f, dtype) for f in factors))


def as_tangent(left, right, dtype=np.float64):
  return fixed_rank.Tangent(np.asarray(left, dtype), np.asarray(right, dtype))


def product(factors):
  left, right = (np.asarray(f, np.float64) for f in factors)
  return left @ np.swapaxes(right, -1, -2)


def embed(frame, tangent):
  """The dense tangent vector, in float64."""
  return product((tangent.left, frame.right)) + product(
    (frame.left, tangent.right)
  )


def norm(tangent):
  """That of the coordinates, which is the intrinsic one."""
  return np.hypot(*(np.linalg.norm(np.float64(x)) for x in tangent))


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


DEFICIENT = {
  'zero left': lambda left, right: (0 * left, right),
  'zero right': lambda left, right: (left, 0 * right),
  'both zero': lambda left, right: (0 * left, 0 * right),
  'zero columns': lambda left, right: (
    left * (np.arange(4) != 1), right * (np.arange(4) != 2)
  ),
  'equal columns': lambda left, right: (left[:, [0, 1, 0, 3]], right),
  'rank one less': lambda left, right: (
    left @ np.random.default_rng(9).normal(size=(4, 3))
    @ np.random.default_rng(8).normal(size=(3, 4)),
    right,
  ),
}  # fmt: skip
deficient = pytest.mark.parametrize('kind', DEFICIENT)
full_or_deficient = pytest.mark.parametrize('kind', ['full', *DEFICIENT])


def deficient_factors(seed, kind, dtype=np.float64, m=12, n=9):
  """Factors without full rank, as they occur: zero, or columns that agree.

  Those of the kind 'full' have it.
  """
  if kind == 'full':
    return random_problem(seed, m, n, 4, 10.0, dtype)[0]
  pair = oracles.random_factors(np.random.default_rng(seed), m, n, 4, 3.0)
  return as_factors(DEFICIENT[kind](*pair), dtype)
