"""Bias, error and cost of orthogonalizing a noisy momentum, with probes.

A fixed matrix (32 x 48, singular values from 1 to 1/30 of the largest, or all
equal) with Gaussian noise, whose norm is ``noise`` times the norm of the
matrix, is orthogonalized with and without the correction of
``prism_optax.muon.subtract_bias``. The target is the
orthogonalized matrix without noise. Bias is the norm of the mean error, RMSE
the root of the mean squared norm of the error, both over the norm of the
target; the statistical error of the squared bias is subtracted. Results go to
``benchmarks/results``; with one number of probes about a minute.

    python benchmarks/geometry/orthogonalization_bias.py [--trials 2000]
"""

import argparse
import functools
import math
import pathlib
import sys
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

ROOT = pathlib.Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / 'examples')]

from benchmarks.common import results  # noqa: E402
from prism_optax import muon  # noqa: E402

SHAPE = (32, 48)


def signal(
  rng: np.random.Generator, condition: float, norm: float
) -> jax.Array:
  """A matrix of this condition number and Frobenius norm."""
  u, _, vt = np.linalg.svd(rng.standard_normal(SHAPE), full_matrices=False)
  x = (u * np.geomspace(1.0, 1.0 / condition, len(vt))) @ vt
  return jnp.asarray(norm * x / np.linalg.norm(x), jnp.float32)


def estimate(
  function: Callable[[jax.Array], jax.Array],
  x: jax.Array,
  noise: float,
  trials: int,
  num_probes: int,
  probe_scale: float,
) -> tuple[float, float, float]:
  """Bias and RMSE over the norm of the target, seconds of a call."""
  stddev = noise * jnp.linalg.norm(x) / math.sqrt(x.size)
  target = function(x)

  def one(key):
    noise_key, probe_key = jax.random.split(key)
    y = x + stddev * jax.random.normal(noise_key, x.shape)
    if not num_probes:
      return function(y) - target
    return (
      muon.subtract_bias(
        function,
        y,
        stddev,
        probe_key,
        num_probes=num_probes,
        probe_scale=probe_scale,
      )
      - target
    )

  @jax.jit
  def moments(keys):
    errors = jax.lax.map(one, keys, batch_size=50)
    squared_bias = jnp.sum(jnp.mean(errors, 0) ** 2)
    own = jnp.sum(jnp.var(errors, 0)) / len(keys)
    return squared_bias - own, jnp.mean(jnp.sum(errors**2, (1, 2)))

  keys = jax.random.split(jax.random.key(1), trials)
  moments = moments.lower(keys).compile()
  start = time.perf_counter()
  squared_bias, squared_error = jax.block_until_ready(moments(keys))
  seconds = (time.perf_counter() - start) / trials
  size = float(jnp.linalg.norm(target))
  bias = math.sqrt(max(float(squared_bias), 0.0)) / size
  return bias, math.sqrt(float(squared_error)) / size, seconds


def main():
  parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
  parser.add_argument('--trials', type=int, default=2000)
  parser.add_argument('--norm', type=float, default=3.0)
  parser.add_argument('--probe-scale', type=float, default=1.0)
  parser.add_argument('--probes', type=int, nargs='+', default=[0, 1, 2, 4, 8])
  args = parser.parse_args()
  rng = np.random.default_rng(0)
  rows = []
  print('| degree, steps | condition | noise | probes | bias | RMSE | time |')
  print('| --- | --- | --- | --- | --- | --- | --- |')
  for degree, steps in [(2, 5), (1, 5), (3, 3)]:
    function = functools.partial(muon.newton_schulz, degree=degree, steps=steps)
    for condition, noise in [(1, 1.0), (30, 0.3), (30, 1.0), (30, 3.0)]:
      x = signal(rng, condition, args.norm)
      base = None
      for probes in args.probes:
        bias, error, seconds = estimate(
          function, x, noise, args.trials, probes, args.probe_scale
        )
        base = base or seconds
        rows.append(
          {
            'degree': degree,
            'condition': condition,
            'noise': noise,
            'probes': probes,
            'bias': bias,
            'RMSE': error,
          }
        )
        print(
          f'| {degree}, {steps} | {condition} | {noise} | {probes} '
          f'| {bias:.3f} | {error:.3f} | {seconds / base:.1f} |',
          flush=True,
        )
  stored = {
    'environment': results.environment(),
    'trials': args.trials,
    'rows': rows,
  }
  print(f'Written to {results.save("orthogonalization_bias", stored)}')


if __name__ == '__main__':
  main()
