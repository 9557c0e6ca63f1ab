"""By how much preconditioners amplify the noise, after some private training.

    python benchmarks/privacy/amplification.py --data FOLDER

The third issue of the PRISM paper (arXiv:2606.00944) for all methods: after 10
private steps on SST-2 (the set-up of ``utility.py``) the mean gradient is
changed by noise of the size that it carries, and the change of all
``Z = B A`` together, over the learning rate, is compared with the same noise
lifted to Z without any preconditioner. Both for a range of noise multipliers.
Writes ``benchmarks/results/amplification.json`` and ``.png``. Four minutes on
one core.
"""

import argparse
import functools
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import jax
import matplotlib as mpl
import optax

mpl.use('agg')
from matplotlib import pyplot as plt

ROOT = pathlib.Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / 'examples')]

import prism_optax  # noqa: E402
from benchmarks.accuracy import private_runs, problems  # noqa: E402
from benchmarks.common import methods, plots, results  # noqa: E402
from prism_optax import lora  # noqa: E402

SIGMAS = (0.25, 1.0, 4.0, 16.0)
STEPS = 10
# Each at the learning rate that utility.py chose or starts from.
RATES = {
  'prism': 3e-2,
  'prism, paper mode': 3e-2,
  'dp-adamw': 3e-2,
  'lora+': 1e-2,
  'lamb': 1e-2,
  'lora-rite': 3e-4,
  'dp-adambc': 1e-4,
}


def products(params: dict[str, Any]) -> list[jax.Array]:
  """Z of all modules."""
  return [
    pair['lora_a'] @ pair['lora_b']
    for layer in params['layers']
    for pair in layer.values()
  ]


def distance(first, second) -> float:
  """Frobenius norm of the difference over all modules."""
  return float(
    optax.tree.norm(
      [x - y for x, y in zip(products(first), products(second), strict=True)]
    )
  )


# So small a step that products of two steps do not matter.
RATE = 1e-3


@functools.lru_cache
def step_after(name: str) -> Callable:
  """``(params, state, mean, release) -> params``, compiled once a method."""
  method, layout = methods.METHODS[name], lora.Layout()

  @jax.jit
  def after(params, state, mean, clip, stddev, key):
    release = methods.Release(clip, 256, stddev, key, STEPS)
    tx = method.make(RATE, release, params, layout)
    return optax.apply_updates(params, tx.update(mean, state, params)[0])

  return after


@functools.lru_cache
def plain_step(on_manifold: bool) -> Callable:
  """What plain SGD makes of noise: a step of the factors, or a retraction."""
  if not on_manifold:
    return lambda params, noise: optax.apply_updates(
      params, optax.tree.scale(-RATE, noise)
    )
  tx = optax.chain(
    prism_optax.tangent_privatizer(0.0, prng_key=0),
    optax.scale(-RATE),
    prism_optax.retract(),
  )

  @jax.jit
  def step(params, noise):
    updates, _ = tx.update(noise, tx.init(params), params)
    return optax.apply_updates(params, updates)

  return step


def amplification(
  name: str, sigma: float, given: problems.Problem, seed: int = 0
) -> dict[str, float]:
  """``{'in': noise in Z, 'out': preconditioned noise in Z}`` of one method."""
  run = private_runs.Run(name, RATES[name], 1.0, seed, steps=STEPS)
  (params, state, _), _, release = private_runs.train(run, given, sigma)
  noise = optax.tree.random_like(jax.random.key(7), params, jax.random.normal)
  noise = optax.tree.scale(release.stddev, noise)
  facts = release.clip, release.stddev, release.key
  with_noise, without = (
    step_after(name)(params, state, mean, *facts)
    for mean in (noise, optax.tree.zeros_like(noise))
  )
  plain = plain_step(name.startswith('prism'))(params, noise)
  return {
    'in': distance(plain, params) / RATE,
    'out': distance(with_noise, without) / RATE,
  }


def plot(found: dict[str, list[dict[str, float]]], path: pathlib.Path) -> None:
  """Noise and its amplification against the noise multiplier."""
  figure, (left, right) = plt.subplots(1, 2, figsize=(8.6, 3.5))
  for name, values in found.items():
    style = {'color': plots.colour(name), 'label': name, 'ms': 3}
    left.plot(SIGMAS, [x['out'] for x in values], 'o-', **style)
    right.plot(SIGMAS, [x['out'] / x['in'] for x in values], 'o-', **style)
  left.set(ylabel='preconditioned noise in Z\nover the learning rate')
  right.set(ylabel='amplification of the noise')
  for ax in (left, right):
    ax.set(xscale='log', yscale='log', xlabel='noise multiplier')
    ax.grid(alpha=0.3)
  right.legend(
    frameon=False, fontsize=8, loc='upper left', bbox_to_anchor=(1, 1)
  )
  figure.tight_layout()
  figure.savefig(path, dpi=100)
  plt.close(figure)


def main():
  parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
  parser.add_argument('--data', type=pathlib.Path, required=True)
  parser.add_argument('--cache', type=pathlib.Path, default='runs/encoded')
  args = parser.parse_args()
  run = private_runs.Run('prism', 0.0, 1.0, 0)
  given = problems.problem(
    run.task, run.length, run.top_layers, False, args.data, args.cache
  )
  found = {}
  print(f'{"method":>18}' + ''.join(f'{sigma:10}' for sigma in SIGMAS))
  for name in RATES:
    found[name] = [amplification(name, sigma, given) for sigma in SIGMAS]
    ratios = ''.join(f'{x["out"] / x["in"]:10.1f}' for x in found[name])
    print(f'{name:>18}{ratios}', flush=True)
  out = results.FOLDER / 'amplification.json'
  record = {
    'environment': results.environment(),
    'noise multipliers': SIGMAS,
    'methods': found,
  }
  results.write(out, record)
  plot(found, out.with_suffix('.png'))
  print(f'Written to {out} and {out.with_suffix(".png").name}')


if __name__ == '__main__':
  main()
