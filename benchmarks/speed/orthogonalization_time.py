"""Time of one Muon update: this library's iteration and optax's.

The same matrices go through the momentum, the orthogonalization and the
learning rate of both; nothing else. Both use five steps of a quintic
(degree 2), so they do the same number of products.

    python benchmarks/speed/orthogonalization_time.py [--model minilm]
"""

import argparse
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

ROOT = pathlib.Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / 'examples')]

import prism_optax  # noqa: E402
from benchmarks.common import timing  # noqa: E402
from prism_optax import transforms  # noqa: E402

# Rows, columns, how many of them.
MODELS = {
  'minilm': [(384, 384, 24), (384, 1536, 6), (1536, 384, 6)],
  'head and last layer': [(384, 384, 4), (384, 1536, 1), (1536, 384, 1)],
  'small': [(128, 128, 24), (128, 512, 6), (512, 128, 6)],
}
Dims = optax.contrib.MuonDimensionNumbers


def parameters(model: str, stacked: bool) -> dict[str, jax.Array]:
  """A tree of separate matrices, or of one stack for each shape."""
  key = jax.random.key(0)
  params = {}
  for i, (rows, columns, count) in enumerate(MODELS[model]):
    x = jax.random.normal(jax.random.fold_in(key, i), (count, rows, columns))
    if stacked:
      params[f'{rows}x{columns}'] = x
    else:
      params |= {f'{rows}x{columns}_{j}': x[j] for j in range(count)}
  return params


def candidates(
  stacked: bool,
) -> dict[str, Callable[[Any], optax.GradientTransformation]]:
  """What makes a transformation of mean gradients for a tree, by name."""
  dims = Dims(1, 2) if stacked else None

  def ours(**options):
    return optax.chain(
      optax.trace(0.95),
      transforms.orthogonalize(weight_dimension_numbers=dims, **options),
      optax.scale_by_learning_rate(0.1),
    )

  def theirs(params):
    spec = jax.tree.map(lambda _: dims or Dims(), params)
    return optax.chain(
      optax.contrib.scale_by_muon(
        nesterov=False, weight_dimension_numbers=spec
      ),
      optax.scale_by_learning_rate(0.1),
    )

  return {
    'optax.contrib.scale_by_muon': theirs,
    'orthogonalize, degree 2': lambda _: ours(),
    'orthogonalize, degree 2, always normalized': lambda _: ours(
      normalize='frobenius'
    ),
    'orthogonalize, degree 1': lambda _: ours(degree=1),
    'orthogonalize, degree 3, 4 steps': lambda _: ours(degree=3, steps=4),
    'orthogonalize, bfloat16 products': lambda _: ours(
      matmul_dtype=jnp.bfloat16
    ),
    'dp_muon from clipped means (adds noise)': lambda _: prism_optax.dp_muon(
      0.1,
      l2_clip_norms=1.0,
      noise_multiplier=1.0,
      expected_batch_size=32.0,
      per_example_gradients=False,
      weight_dimension_numbers=dims,
    ),
  }


def compiled(
  tx: optax.GradientTransformation, params: dict[str, jax.Array]
) -> timing.Step:
  """One update; the parameters stand for their gradients."""

  def step(carried, params):
    _, state = carried
    return tx.update(params, state, params)

  zeros = jax.tree.map(jnp.zeros_like, params)
  return timing.Step(step, (zeros, tx.init(params)), params)


def main():
  parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
  parser.add_argument('--model', choices=sorted(MODELS), default='minilm')
  parser.add_argument('--repeats', type=int, default=10)
  parser.add_argument('--stacked', action='store_true')
  parser.add_argument('--only', default='', help='part of a name')
  args = parser.parse_args()
  params = parameters(args.model, args.stacked)
  steps = {
    name: compiled(make(params), params)
    for name, make in candidates(args.stacked).items()
    if args.only in name
  }
  times = timing.in_turn(steps, args.repeats)
  device = jax.devices()[0]
  layout = 'one stack for each shape' if args.stacked else 'single matrices'
  print(f'{device.platform} {device.device_kind}, {args.model}, {layout}\n')
  print('| update | fastest, ms | median, ms | compilation, s |')
  print('| --- | --- | --- | --- |')
  for name, step in steps.items():
    found = timing.summary(times[name])
    print(
      f'| {name} | {found["min"]:.1f} | {found["median"]:.1f} '
      f'| {step.compile_seconds:.1f} |'
    )


if __name__ == '__main__':
  main()
