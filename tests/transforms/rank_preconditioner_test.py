"""The adaptive step: against the oracle, and the symmetries of trajectories."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import prism_optax
from tests import cases
from tests.oracles import optimizer_oracles, oracles, problems

SHAPES = [(8, 6, 3), (5, 9, 2), (8, 6, 3)]
ONE_SHAPE = SHAPES[::2]
STDDEV = 0.16

x64 = pytest.mark.usefixtures('x64')


# Single directions.


@x64
def test_directions_follow_a_schedule_of_the_noise():
  """Correlated noise: another standard deviation at each step.

  The same tangents at the same points, which are far from each other:
  transport has something to lose.
  """
  stddevs = np.array([1.0, 0.2, 3.0, 0.5])
  options = {'b2': 0.9, 'floor_factor': 0.7}
  problem = problems.Problem(ONE_SHAPE)
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
    for a, b in zip(value.modules, modules, strict=True):
      assert oracles.relative_error(a, b) < 1e-11, step
    assert oracles.relative_error(value.extra, extra) < 1e-12, step


@x64
@pytest.mark.parametrize('stddev', [0.3, 3.0])
def test_the_floor_bounds_the_direction(stddev):
  """||U||_F^2 <= ||m||_F^2 / floor (PRISM, Eq. 27)."""
  problem = problems.Problem(ONE_SHAPE)
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


# Whole trajectories. The chain by hand, so that the noise can be given.


@functools.cache
def chain():
  """The clip and what follows the noise, compiled."""
  clip = prism_optax.intrinsic_clip(2.0, normalize_by=5.0)
  rest = optax.chain(
    prism_optax.scale_by_rank_preconditioner(noise_stddev=STDDEV),
    optax.scale(-0.05),
    prism_optax.retract(),
  )
  return clip.init, jax.jit(clip.update), rest.init, jax.jit(rest.update)


def train(problem, params, steps=50, *, regauge=None, flip=lambda x: x):
  """Dense Z after every step.

  Args:
    problem: Gives the gradients and the noise, both as dense matrices: what
      every gauge maps into its own coordinates.
    params: The start.
    steps: How many.
    regauge: ``regauge(step, params)`` is called before each step, or None.
    flip: Of dense gradients and noise, to those of what ``params`` belong to.
  """

  init_clip, clip, init, update = chain()
  clip_state, state = init_clip(params), init(params)
  out = []
  for step in range(steps):
    if regauge is not None:
      params = regauge(step, params)
    at = flip(problem.dense(params))
    grads = problem.factor_gradients(params, flip(problem.gradients(step, at)))
    mean, clip_state = clip(grads, clip_state, params)
    noise = problem.coordinates(params, flip(problem.ambient_noise(step)))
    noisy = jax.tree.map(lambda x, z: x + STDDEV * z, mean, noise)
    updates, state = update(noisy, state, params)
    params = optax.apply_updates(params, updates)
    at = flip(problem.dense(params))
    out.append([*at.modules, at.extra])
  return out


def regauged(problem, params, condition, scale, seed):
  """The same Z from other factors."""
  rng = np.random.default_rng(seed)
  factors = [
    oracles.change_gauge(
      (np.float64(a), np.float64(b)),
      oracles.random_gauge(rng, a.shape[1], condition, scale),
    )
    for a, b in cases.factors_of(params)
  ]
  return cases.tree_of(factors, params['extra'], params['extra'].dtype)


def largest_error(trajectory, target):
  return max(
    oracles.relative_error(a, b)
    for now, then in zip(trajectory, target, strict=True)
    for a, b in zip(now, then, strict=True)
  )


@functools.cache
def reference(dtype):
  """A problem, its start and its trajectory in the gauge of the start."""
  problem = problems.Problem(ONE_SHAPE)
  params = problem.params(*problem.start(), dtype)
  return problem, params, train(problem, params)


@x64
@pytest.mark.parametrize(
  ('condition', 'scale', 'steps'),
  [(1e3, 1e3, 1), (1e6, 1, 1), (10, 1, 50), (1e3, 1, 50)],
)
def test_the_gauge_may_change_before_every_step(condition, scale, steps):
  """So that what is carried from step to step is transported rightly."""
  problem, params, target = reference(jnp.float64)

  def regauge(step, params):
    if step >= steps:  # One: the start alone.
      return params
    return regauged(problem, params, condition, scale, seed=1 + step)

  trajectory = train(problem, params, regauge=regauge)
  # Rounding of the first factors times 1e6 is 1e-10; measured 2e-10 at most.
  assert largest_error(trajectory, target) < 1e-9


@pytest.mark.slow
@x64
def test_transposing_the_modules_transposes_the_trajectory():
  problem, _, target = reference(jnp.float64)
  factors, extra = problem.start()
  params = problem.params([(b, a) for a, b in factors], extra)

  def flip(x):
    return x._replace(modules=[z.swapaxes(-1, -2) for z in x.modules])

  assert largest_error(train(problem, params, flip=flip), target) < 1e-9
