"""How far the trajectory of Z depends on the gauge of the starting factors.

    python -m benchmarks.geometry.gauge_invariance

The same problem, data and ambient noise, trained from ``(L, R)`` and from ``(L
K, R K^-T)``: largest relative difference of Z over all steps and modules, for
PRISM, for the published optimizer (paper mode) and for DP-AdamW on the factors.
Not by `make_private`: the noise of PRISM is given, see ``given_noise.py``, and
the gradients are those of the oracles of the tests. About a minute on a CPU.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax_privacy import noise_addition

import prism_optax
from benchmarks.common import runner
from benchmarks.geometry import given_noise
from prism_optax import lora, transforms
from tests import cases
from tests.oracles import oracles, problems

SHAPES = [(8, 6, 3), (5, 9, 2), (8, 6, 3)]
CLIP, BATCH, STDDEV, LEARNING_RATE = 2.0, 5.0, 0.16, 0.05
GAUGES = [(1, 1e-3), (1, 1e3), (1, 1), (10, 1), (1e3, 1), (1e6, 1)]


def tangent_method(published: bool = False) -> given_noise.Step:
  """A step of a problem, with its ambient draws."""
  step = given_noise.tangent_step(LEARNING_RATE, CLIP, BATCH, STDDEV, published)
  update = jax.jit(step.update)

  def of_problem(problem, number, grads, state, params):
    noise = problem.coordinates(params, problem.ambient_noise(number))
    return update(grads, noise, state, params)

  return given_noise.Step(step.init, of_problem)


def factor_method() -> given_noise.Step:
  """DP-AdamW: one clip, and noise on the factors, whose draws share a key."""
  tx = optax.chain(
    prism_optax.per_matrix_clip(
      CLIP,
      normalize_by=BATCH,
      # All leaves in one group: as if none of them were a matrix.
      weight_dimension_numbers=lambda x: jax.tree.map(lambda _: None, x),
    ),
    transforms.noised_elsewhere(
      noise_addition.gaussian_privatizer(
        stddev=STDDEV, prng_key=jax.random.key(7)
      )
    ),
    optax.adamw(LEARNING_RATE),
  )
  update = jax.jit(tx.update)

  def of_problem(problem, number, grads, state, params):
    del problem, number
    return update(grads, state, params)

  return given_noise.Step(tx.init, of_problem)


METHODS = {
  'PRISM': tangent_method(),
  'PRISM, paper mode': tangent_method(published=True),
  'DP-AdamW on factors': factor_method(),
}


def trajectory(
  method: str, problem: problems.Problem, params: Any, steps: int
) -> list[list[np.ndarray]]:
  """Z of every module after every step."""
  step = METHODS[method]
  state = step.init(params)
  out = []
  for t in range(steps):
    grads = problem.factor_gradients(
      params, problem.gradients(t, problem.dense(params))
    )
    updates, state = step.update(problem, t, grads, state, params)
    params = optax.apply_updates(params, updates)
    out.append(problem.dense(params).modules)
  return out


def start(
  problem: problems.Problem,
  condition: float,
  scale: float,
  canonical: bool,
  dtype: jax.typing.DTypeLike,
) -> Any:
  """The same Z in a gauge of that condition and scale."""
  rng = np.random.default_rng(1)
  factors, extra = problem.start()
  turned = [
    oracles.change_gauge(
      pair, oracles.random_gauge(rng, pair[0].shape[1], condition, scale)
    )
    for pair in factors
  ]
  with jax.enable_x64(True):
    params = cases.tree_of(turned, extra)
    if canonical:
      params = lora.canonicalize(params)
    params = jax.tree.map(np.asarray, params)
  return jax.tree.map(lambda x: jnp.asarray(x, dtype), params)


def difference(one, other) -> float:
  """The largest relative error over steps and modules."""
  return max(
    oracles.relative_error(a, b)
    for x, y in zip(one, other, strict=True)
    for a, b in zip(x, y, strict=True)
  )


@functools.cache
def target(method: str, arithmetic: str, steps: int) -> list[list[np.ndarray]]:
  """The trajectory in the gauge of the problem."""
  problem = problems.Problem(SHAPES)
  params = problem.params(*problem.start(), arithmetic)
  return trajectory(method, problem, params, steps)


def measure(
  arithmetic: str, method: str, condition: float, scale: float, steps: int = 50
) -> dict[str, Any]:
  """One row; ``arithmetic`` may end in ``', canonical'``."""
  dtype, _, canonical = arithmetic.partition(', ')
  with jax.enable_x64(dtype == 'float64'):
    problem = problems.Problem(SHAPES)
    params = start(problem, condition, scale, bool(canonical), dtype)
    found = trajectory(method, problem, params, steps)
    return {'difference': difference(found, target(method, dtype, steps))}


if __name__ == '__main__':
  runner.main(
    __doc__,
    'gauge_invariance',
    [
      {
        'arithmetic': arithmetic, 'method': method, 'condition': condition,
        'scale': scale,
      }
      for arithmetic in ('float64', 'float32', 'float32, canonical')
      for condition, scale in GAUGES
      for method in METHODS
    ],
    measure,
    smoke={'steps': 2},
  )  # fmt: skip
