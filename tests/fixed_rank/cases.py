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
from prism_optax.fixed_rank import _lifts, _retraction
from tests.oracles import oracles

# m, n and r differ; then r = min(m, n) on either side, and r = 1.
SHAPES = [(12, 9, 4), (5, 11, 5), (13, 4, 4), (8, 6, 1)]
CONDITIONS = [1.0, 10.0, 1e3, 1e6]
EPS = {np.float64: 2.3e-16, np.float32: 1.2e-7}

# Each is a program of its own: the fast tests have r = min(m, n) on one side.
shapes = pytest.mark.parametrize(
  ('m', 'n', 'rank'),
  [
    pytest.param(*shape, marks=pytest.mark.slow if shape == (13, 4, 4) else ())
    for shape in SHAPES
  ],
)
conditions = pytest.mark.parametrize('condition', CONDITIONS)


def _compiled(function):
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
_retracted = _compiled(
  lambda frame, tangent: tuple(
    fixed_rank.retraction(frame, tangent, align=align)
    for align in (False, True)
  )
)


def horizontal_lift(factors, steps):
  """The steps of least norm with the same tangent vector."""
  frame = fixed_rank.frame(factors)
  tangent = _lifts.tangent_from_steps(frame, steps)
  return _lifts.lift(frame, tangent, horizontal=True)


compiled = types.SimpleNamespace(
  frame=_compiled(fixed_rank.frame),
  tangent_from_gradients=_compiled(fixed_rank.tangent_from_gradients),
  project=_compiled(fixed_rank.project),
  lift=_compiled(_lifts.lift),
  tangent_from_steps=_compiled(_lifts.tangent_from_steps),
  horizontal_lift=_compiled(horizontal_lift),
  embed=_compiled(_lifts.embed),
  transport=_compiled(fixed_rank.transport),
  dense_retraction=_compiled(_retraction.dense_retraction),
  retract=lambda frame, x, align=False: _retracted(frame, x)[align],
)


def as_factors(factors, dtype=np.float64):
  return fixed_rank.Factors(*(np.asarray(f, dtype) for f in factors))


def as_tangent(left, right, dtype=np.float64):
  return fixed_rank.Tangent(np.asarray(left, dtype), np.asarray(right, dtype))


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


def zeros(*shape):
  return np.zeros(shape)
