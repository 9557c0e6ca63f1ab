"""How far the trajectory of Z depends on the gauge of the starting factors.

    python benchmarks/geometry/gauge_invariance.py [--steps 50]

The same problem, data and ambient noise, trained from ``(L, R)`` and from ``(L
K, R K^-T)``: largest relative difference of Z over all steps and modules, for
PRISM, for the published optimizer (paper mode) and for DP-AdamW on the factors.
About a minute on a CPU. Results go to ``benchmarks/results``.
"""

import argparse
import pathlib
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

ROOT = pathlib.Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / 'examples')]

import prism_optax  # noqa: E402
from benchmarks.common import methods, results  # noqa: E402
from prism_optax import lora  # noqa: E402
from tests.oracles import oracles, problems, test_utils  # noqa: E402

SHAPES = [(8, 6, 3), (5, 9, 2), (8, 6, 3)]
CLIP, BATCH, STDDEV, LEARNING_RATE = 2.0, 5.0, 0.16, 0.05
GAUGES = [(1, 1e-3), (1, 1e3), (1, 1), (10, 1), (1e3, 1), (1e6, 1)]


class Optimizer(NamedTuple):
  """A method whose noise is given, so that two gauges get the same.

  Attributes:
    init: From parameters to a state.
    step: ``step(problem, number, gradients, state, params)``, updates and the
      next state.
  """

  init: Callable[[Any], Any]
  step: Callable[..., tuple[Any, Any]]


def tangent_method(**options: bool) -> Optimizer:
  """Clip and noise in the tangent space, with the ambient draws given."""
  clip = prism_optax.intrinsic_clip(CLIP, normalize_by=BATCH)
  rest = methods.behind_the_noise(LEARNING_RATE, STDDEV, **options)

  @jax.jit
  def update(grads, noise, state, params):
    mean, _ = clip.update(grads, optax.EmptyState(), params)
    noisy = jax.tree.map(lambda x, z: x + STDDEV * z, mean, noise)
    return rest.update(noisy, state, params)

  def step(problem, number, grads, state, params):
    noise = problem.coordinates(params, problem.ambient_noise(number))
    return update(grads, noise, state, params)

  return Optimizer(rest.init, step)


def factor_method() -> Optimizer:
  """DP-AdamW: one clip of the factor gradients, noise on the factors."""
  tx = optax.adamw(LEARNING_RATE)

  @jax.jit
  def update(grads, noise, state, params):
    norms = jax.vmap(optax.tree.norm)(grads)
    weights = jnp.minimum(1, CLIP / norms) / BATCH
    noisy = jax.tree.map(
      lambda g, z: jnp.tensordot(weights, g, 1) + STDDEV * z, grads, noise
    )
    return tx.update(noisy, state, params)

  def step(problem, number, grads, state, params):
    rng = np.random.default_rng((number, 7))
    noise = jax.tree.map(
      lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), params
    )
    return update(grads, noise, state, params)

  return Optimizer(tx.init, step)


METHODS = {
  'PRISM': tangent_method(),
  'PRISM, paper mode': tangent_method(published=True),
  'DP-AdamW on factors': factor_method(),
}


def trajectory(
  method: str, problem: problems.Problem, params: Any, steps: int
) -> list[list[np.ndarray]]:
  """Z of every module after every step."""
  init, step = METHODS[method]
  state = init(params)
  out = []
  for t in range(steps):
    grads = problem.factor_gradients(
      params, problem.gradients(t, problem.dense(params))
    )
    updates, state = step(problem, t, grads, state, params)
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
    params = test_utils.tree_of(turned, extra)
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


def table(
  dtype: jax.typing.DTypeLike, steps: int, canonical: bool = False
) -> dict[str, list[float]]:
  """Errors of each method by gauge; prints a line for each."""
  problem = problems.Problem(SHAPES)
  factors, extra = problem.start()
  base = problem.params(factors, extra, dtype)
  note = ', after lora.canonicalize' if canonical else ''
  print(f'\n{jnp.dtype(dtype).name}{note}: gauge condition x scale')
  columns = ''.join(f'{f"{c:.0e} x {s:.0e}":>16}' for c, s in GAUGES)
  print(f'{"":22}{columns}')
  out = {}
  for method in METHODS:
    target = trajectory(method, problem, base, steps)
    out[method] = errors = [
      difference(
        trajectory(
          method, problem, start(problem, *gauge, canonical, dtype), steps
        ),
        target,
      )
      for gauge in GAUGES
    ]
    print(f'{method:22}' + ''.join(f'{e:16.1e}' for e in errors), flush=True)
  return out


def main():
  parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
  parser.add_argument('--steps', type=int, default=50)
  steps = parser.parse_args().steps
  with jax.enable_x64(True):
    found = {'float64': table(jnp.float64, steps)}
  found['float32'] = table(jnp.float32, steps)
  found['float32, canonical'] = table(jnp.float32, steps, canonical=True)
  stored = {
    'environment': results.environment(),
    'steps': steps,
    'gauges, condition and scale': GAUGES,
    'largest relative difference of Z': found,
  }
  print(f'Written to {results.save("gauge_invariance", stored)}')


if __name__ == '__main__':
  main()
