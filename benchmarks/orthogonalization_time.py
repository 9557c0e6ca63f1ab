"""Time of one Muon update: this library's iteration and optax's.

The same matrices go through the momentum, the orthogonalization and the
learning rate of both; nothing else. Both use five steps of a quintic
(degree 2), so they do the same number of products.

  python benchmarks/orthogonalization_time.py --model minilm --repeats 20
"""

import argparse
import statistics
import time

import jax
import jax.numpy as jnp
import optax

from prism_optax import dp_muon, orthogonal_updates

# Rows, columns, how many of them.
MODELS = {
  'minilm': [(384, 384, 24), (384, 1536, 6), (1536, 384, 6)],
  'head and last layer': [(384, 384, 4), (384, 1536, 1), (1536, 384, 1)],
  'small': [(128, 128, 24), (128, 512, 6), (512, 128, 6)],
}
Dims = optax.contrib.MuonDimensionNumbers


def parameters(model, stacked):
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


def candidates(stacked):
  """Transformations by name, all from mean gradients to updates."""
  dims = Dims(1, 2) if stacked else None

  def ours(**options):
    return optax.chain(
      optax.trace(0.95),
      orthogonal_updates.orthogonalize(
        weight_dimension_numbers=dims, **options
      ),
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
    'dp_muon from clipped means (adds noise)': lambda _: dp_muon(
      0.1,
      l2_clip_norms=1.0,
      noise_multiplier=1.0,
      expected_batch_size=32.0,
      per_example_gradients=False,
      weight_dimension_numbers=dims,
    ),
  }


def prepare(tx, params):
  """A function that makes one update, and the seconds to compile it."""
  state = tx.init(params)
  start = time.perf_counter()
  update = jax.jit(tx.update).lower(params, state, params).compile()
  seconds = time.perf_counter() - start
  return lambda: jax.block_until_ready(update(params, state, params)), seconds


def main():
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--model', choices=sorted(MODELS), default='minilm')
  parser.add_argument('--repeats', type=int, default=10)
  parser.add_argument('--stacked', action='store_true')
  parser.add_argument('--only', default='', help='part of a name')
  args = parser.parse_args()
  params = parameters(args.model, args.stacked)
  prepared = {
    name: prepare(make(params), params)
    for name, make in candidates(args.stacked).items()
    if args.only in name
  }
  times = {name: [] for name in prepared}
  # In turn, so that whatever else the machine does meets all of them alike.
  for _ in range(args.repeats + 1):
    for name, (call, _) in prepared.items():
      start = time.perf_counter()
      call()
      times[name].append(time.perf_counter() - start)
  device = jax.devices()[0]
  layout = 'one stack for each shape' if args.stacked else 'single matrices'
  print(f'{device.platform} {device.device_kind}, {args.model}, {layout}\n')
  print('| update | fastest, ms | median, ms | compilation, s |')
  print('| --- | --- | --- | --- |')
  for name, (_, compilation) in prepared.items():
    measured = [1e3 * t for t in times[name][1:]]
    print(
      f'| {name} | {min(measured):.1f} | {statistics.median(measured):.1f} '
      f'| {compilation:.1f} |'
    )


if __name__ == '__main__':
  main()
