"""The geometry under stacking, jit and vmap."""

import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prism_optax import fixed_rank
from prism_optax._linalg import Tall
from prism_optax.fixed_rank._points import frame_of, map_ranks
from prism_optax.fixed_rank._tangents import projected
from tests.fixed_rank.cases import (
  DEFICIENT,
  as_factors,
  compiled,
  deficient_factors,
  gradients,
  horizontal_lift,
  random_problem,
  scaled,
)
from tests.oracles import oracles

pytestmark = pytest.mark.usefixtures('x64')


def all_results(factors, grads, geometry=compiled):
  """Every function of the module in one call."""
  frame = geometry.frame(factors)
  tangent = geometry.tangent_from_gradients(frame, grads)
  tangent = geometry.project(frame, scaled(tangent, 0.1))
  steps = geometry.lift(frame, tangent)
  shortest = getattr(geometry, 'horizontal_lift', horizontal_lift)
  new = geometry.retract(frame, tangent)
  aligned = geometry.retract(frame, tangent, align=True)
  return {
    'frame': frame,
    'tangent': tangent,
    'embed': geometry.embed(frame, tangent),
    'lift': steps,
    'horizontal_lift': shortest(factors, steps),
    'retract': new,
    'aligned': aligned,
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


@pytest.mark.slow
def test_leading_axes_are_a_stack_of_modules():
  factors, grads = stacked_problem()
  stacked = all_results(factors, grads)
  for index in np.ndindex(2, 3):
    take = functools.partial(jax.tree.map, operator.itemgetter(index))
    one = all_results(*take((factors, grads)))
    assert_trees_close(take(stacked), one)


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


def _groups():
  """Stacks of several heights, one of another rank, one with m = r."""
  rng = np.random.default_rng(42)
  shapes = [(2, 8, 6, 3), (1, 5, 9, 3), (3, 8, 6, 2), (2, 3, 7, 3)]
  pairs = [
    (rng.standard_normal((k, m, r)), rng.standard_normal((k, n, r)))
    for k, m, n, r in shapes
  ]
  pairs[1][0][0] = 0
  steps = [[0.1 * rng.standard_normal(x.shape) for x in pair] for pair in pairs]
  return (
    [as_factors(pair) for pair in pairs],
    [fixed_rank.Tangent(*map(jnp.asarray, step)) for step in steps],
  )


def _moved(map_groups, pairs, steps):
  """Frames, and where a step leads to, of all groups."""
  frames = map_groups(frame_of, pairs)

  def moved(frame, step):
    return fixed_rank.retraction(frame, projected(frame, step))

  return frames, map_groups(moved, frames, steps)


@pytest.mark.slow
@pytest.mark.parametrize('vmap', [lambda fn: fn, jax.vmap])
def test_groups_of_one_rank_at_once_are_groups_one_by_one(vmap):
  groups = jax.tree.map(lambda x: jnp.stack([x, 2 * x]), _groups())
  if vmap is not jax.vmap:
    groups = jax.tree.map(operator.itemgetter(0), groups)

  def both(pairs, steps):
    one_by_one = _moved(lambda *args: tuple(map(*args)), pairs, steps)
    return _moved(map_ranks, pairs, steps), one_by_one

  at_once, one_by_one = jax.jit(vmap(both))(*groups)
  assert_trees_close(at_once, one_by_one)


def test_one_call_serves_all_groups_of_one_rank():
  called = []

  def noted(pair):
    called.append([x.shape[-1] for x in pair if isinstance(x, Tall)])
    return pair

  pairs, _ = _groups()
  jax.tree.map(
    np.testing.assert_array_equal, map_ranks(noted, pairs), tuple(pairs)
  )
  # Of rank 2 there is one group, and the last has m = r: arrays as they are.
  assert sorted(called) == [[], [], [3, 3]]
