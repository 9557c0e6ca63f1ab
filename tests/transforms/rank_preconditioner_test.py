"""The adaptive step: against the oracle, and the symmetries of trajectories."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import prism_optax
from tests import cases
from tests.oracles import optimizer_oracles, oracles, problems
from tests.transforms import chains

x64 = pytest.mark.usefixtures('x64')


# Single directions.


@pytest.mark.slow
@x64
def test_directions_follow_a_schedule_of_the_noise():
  """Correlated noise: another standard deviation at each step.

  The same tangents at the same points, which are far from each other:
  transport has something to lose.
  """
  stddevs = np.array([1.0, 0.2, 3.0, 0.5])
  options = {'b2': 0.9, 'floor_factor': 0.7}
  problem = problems.Problem(chains.ONE_SHAPE)
  points = []
  for seed in range(6):
    other = problems.Problem(problem.shapes, seed=seed + 100)
    points.append(other.params(*other.start()))
  tx = prism_optax.scale_by_rank_preconditioner(noise_stddev=stddevs, **options)
  oracle = optimizer_oracles.PrismOracle(
    problem.points(points[0]), problem.ranks, [points[0]['extra']],
    optimizer_oracles.Options(**options),
  )  # fmt: skip
  state, update = tx.init(points[0]), jax.jit(tx.update)
  # The last entry holds for the steps after it.
  for step, stddev in enumerate([*stddevs, 0.5, 0.5]):
    params, dense = points[step], problem.ambient_noise(step)
    oracle.points = problem.points(params)
    modules, (extra,) = oracle.directions(dense.modules, [dense.extra], stddev)
    updates, state = update(problem.coordinates(params, dense), state, params)
    value = problem.embed(params, updates)
    chains.assert_close(value.modules, modules, 1e-11)
    assert oracles.relative_error(value.extra, extra) < 1e-12, step


def test_where_nothing_was_ever_seen_nothing_moves():
  tx = prism_optax.scale_by_rank_preconditioner(eps=0.0, noise_stddev=0.0)
  params = {'lora_a': jnp.eye(3, 2), 'lora_b': jnp.eye(2), 'bias': jnp.ones(2)}
  zeros = optax.tree.zeros_like(params)
  found, _ = jax.jit(tx.update)(zeros, tx.init(params), params)
  cases.assert_same_bits(found, zeros)


@x64
def test_the_floor_bounds_the_direction():
  """||U||_F^2 <= ||m||_F^2 / floor (PRISM, Eq. 27)."""
  stddev = 0.3
  problem = problems.Problem(chains.ONE_SHAPE)
  tx = prism_optax.scale_by_rank_preconditioner(
    b1=0.0, b2=0.5, noise_stddev=stddev, floor_factor=2.0
  )
  update = jax.jit(tx.update)
  params = problem.params(*problem.start())
  state = tx.init(params)
  closest = 0.0

  for step in range(20):
    # From much smaller than the noise to much larger.
    size = 10.0 ** (step / 4 - 3)
    dense = problem.ambient_noise(step)
    dense = problems.Dense(
      [size * x for x in dense.modules], size * dense.extra
    )
    grads = problem.coordinates(params, dense)
    updates, state = update(grads, state, params)
    bound = cases.norm(grads) / (np.sqrt(2.0) * stddev)
    ratio = cases.norm(updates) / bound
    assert ratio < 1 + 1e-12
    closest = max(closest, ratio)
  assert closest > 0.99  # Below the noise the floor is what divides.
