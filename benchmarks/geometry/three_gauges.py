"""One model in three factorisations, trained privately by three methods.

    python benchmarks/geometry/three_gauges.py [--plot-only]

Adapters of rank 4 on the two layers of a frozen random network learn
handwritten digits (scikit-learn's) from 1,297 rows at epsilon 3. The same
adapters ``A B`` are written as ``(A K) (K^-1 B)``, with ``K`` of condition 1,
100 and 1,000: the same function in three gauges (the stored results have 10
too, which makes little difference to any method). DP-AdamW clips and noises the
factors, as they are given or after ``lora.canonicalize``, which writes every
start in its balanced gauge; PRISM clips and noises the tangent space.
Everything else is shared: rows, Poisson batches, clip norm, noise multiplier,
draws of the noise (one on the factors, one ambient matrix that PRISM projects),
no weight decay. Each method has the learning rate that is best for it at
condition 1, by the loss on 250 public rows; the figure shows 250 others, means
over five seeds.

Writes ``three_gauges.json`` beside the other results and the picture of the
first page, ``docs/figures/three_gauges.png``. Three minutes of CPU.
"""

import argparse
import functools
import itertools
import json
import pathlib
import sys

import jax
import jax.numpy as jnp
import matplotlib as mpl
import numpy as np
import optax
from sklearn import datasets

mpl.use('agg')
from matplotlib import pyplot as plt

ROOT = pathlib.Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / 'examples')]

import prism_optax  # noqa: E402
from benchmarks.common import methods, plots, results  # noqa: E402
from prism_optax import accounting, lora  # noqa: E402

FIGURE = ROOT / 'docs' / 'figures' / 'three_gauges.png'
EPSILON, DELTA, CLIP, BATCH, LARGEST, STEPS = 3.0, 1e-5, 1.0, 256, 352, 60
TRAIN, HIDDEN, RANK, SEEDS = 1297, 64, 4, range(5)
CONDITIONS, SHOWN = (1.0, 10.0, 100.0, 1000.0), ('1', '100', '1000')
LOOKS = (('#E69F00', 7), ('#0072B2', 3.5), ('#000000', 1.5))
RATES = (1e-2, 3e-2, 1e-1, 3e-1)
# Method, and whether `lora.canonicalize` rewrites the start first.
METHODS = {
  'DP-AdamW on the factors': ('dp-adamw', False),
  'canonicalised first': ('dp-adamw', True),
  'PRISM': ('prism', False),
}


def data():
  """``(train, tuning, test)``, pixels between -1 and 1 and digits."""
  digits = datasets.load_digits()
  order = np.random.default_rng(0).permutation(len(digits.target))
  x = (digits.data[order] / 8 - 1).astype(np.float32)
  y = digits.target[order].astype(np.int32)
  cuts = (0, TRAIN, TRAIN + 250, len(y))
  return [(x[a:b], y[a:b]) for a, b in itertools.pairwise(cuts)]


def frozen_network():
  keys = jax.random.split(jax.random.key(0))
  shapes = ((64, HIDDEN), (HIDDEN, 10))
  return [
    jax.random.normal(k, shape) * (2 / shape[0]) ** 0.5
    for k, shape in zip(keys, shapes, strict=True)
  ]


FROZEN = frozen_network()


def dense(params):
  return [pair['lora_a'] @ pair['lora_b'] for pair in params]


def losses(params, x, y):
  """Cross-entropy and whether it is right, of each row."""
  first, second = (w + z for w, z in zip(FROZEN, dense(params), strict=True))
  logits = jax.nn.relu(x @ first) @ second
  return (
    optax.softmax_cross_entropy_with_integer_labels(logits, y),
    jnp.argmax(logits, -1) == y,
  )


def start(seed, condition, canonical=False):
  """Adapters with singular values of one half, in a gauge of a condition."""
  empty = [
    {'lora_a': jnp.zeros((w.shape[0], RANK)),
     'lora_b': jnp.zeros((RANK, w.shape[1]))} for w in FROZEN
  ]  # fmt: skip
  balanced = lora.initialize(empty, seed, method='balanced', size=0.5)
  rng = np.random.default_rng((seed, 1))
  out = []
  for pair in balanced:
    left, right = np.linalg.qr(rng.normal(size=(2, RANK, RANK)))[0]
    sizes = np.geomspace(condition**0.5, condition**-0.5, RANK)
    k, inverse = (left * sizes) @ right, (right.T / sizes) @ left.T
    a, b = (np.asarray(pair[x], float) for x in ('lora_a', 'lora_b'))
    out.append(
      {
        'lora_a': jnp.asarray(a @ k, jnp.float32),
        'lora_b': jnp.asarray(inverse @ b, jnp.float32),
      }
    )
  return lora.canonicalize(out) if canonical else out


def batches(seed):
  """Poisson batches, padded: rows (steps, LARGEST) and weights."""
  rng = np.random.default_rng((seed, 2))
  rows = np.zeros((STEPS, LARGEST), np.int32)
  there = np.zeros((STEPS, LARGEST), np.float32)
  for t in range(STEPS):
    drawn = np.flatnonzero(rng.random(TRAIN) < BATCH / TRAIN)[:LARGEST]
    rows[t, : len(drawn)], there[t, : len(drawn)] = drawn, 1
  return rows, there


def one_loss(params, x, y):
  return losses(params, x, y)[0]


def released(method, params, x, y, there, stddev, key):
  """The noisy mean of clipped gradients, and nothing else of the rows."""
  per_row = jax.vmap(jax.grad(one_loss), (None, 0, 0))(params, x, y)
  if method == 'prism':
    coordinates = prism_optax.tangent_coordinates(params)
    per_row = jax.vmap(coordinates)(per_row)
    keys = jax.random.split(key, len(params))
    ambient = [
      jax.random.normal(k, w.shape) for k, w in zip(keys, FROZEN, strict=True)
    ]

    # A matrix goes in as the gradient of what it is paired with.
    def paired(p):
      return sum(
        jnp.sum(xi * z) for xi, z in zip(ambient, dense(p), strict=True)
      )

    noise = coordinates(jax.grad(paired)(params))
  else:
    noise = optax.tree.random_like(key, params)
  norms = jax.vmap(optax.tree.norm)(per_row)
  weights = there * jnp.minimum(1, CLIP / norms) / BATCH
  return jax.tree.map(
    lambda g, z: jnp.tensordot(weights, g, 1) + stddev * z, per_row, noise
  )


@functools.partial(jax.jit, static_argnames=('method',))
def train(method, params, rate, stddev, rows, there, key, splits):
  """Loss on the tuning rows at the end, accuracy on the test rows by step."""
  (x, y), tuning, test = splits
  tx = {
    'prism': lambda: methods.behind_the_noise(rate, stddev),
    'dp-adamw': lambda: optax.adamw(rate, weight_decay=0.0),
  }[method]()

  def step(carry, batch):
    params, state = carry
    chosen, is_there, key = batch
    grads = released(
      method, params, x[chosen], y[chosen], is_there, stddev, key
    )
    updates, state = tx.update(grads, state, params)
    params = optax.apply_updates(params, updates)
    return (params, state), jnp.mean(losses(params, *test)[1])

  begun = jnp.mean(losses(params, *test)[1])
  keys = jax.random.split(key, STEPS)
  (params, _), curve = jax.lax.scan(
    step, (params, tx.init(params)), (rows, there, keys)
  )
  return jnp.mean(losses(params, *tuning)[0]), jnp.append(begun, curve)


def measure():
  """All numbers of the figure."""
  splits = [tuple(map(jnp.asarray, part)) for part in data()]
  sigma = float(
    accounting.calibrate_noise_multiplier(EPSILON, DELTA, BATCH / TRAIN, STEPS)
  )
  stddev = sigma * CLIP / BATCH
  out = {}
  for name, (method, canonical) in METHODS.items():
    found = {}
    for condition in CONDITIONS:
      for rate in RATES:
        runs = [
          train(
            method, start(seed, condition, canonical), rate, stddev,
            *batches(seed), jax.random.key(seed), splits,
          )
          for seed in SEEDS
        ]  # fmt: skip
        loss, curve = (np.mean(x, 0) for x in zip(*runs, strict=True))
        found[condition, rate] = float(loss), curve

    def best(condition, found=found):
      return min(RATES, key=lambda each: found[condition, each][0])

    rate = best(1.0)
    out[name] = {
      'rate': rate,
      'curves': {
        f'{c:g}': np.round(100 * found[c, rate][1], 2).tolist()
        for c in CONDITIONS
      },
      # Would a rate of its own have saved a gauge?
      'tuned for the gauge': {
        f'{c:g}': {
          'rate': best(c),
          'accuracy': round(100 * float(found[c, best(c)][1][-1]), 2),
        }
        for c in CONDITIONS
      },
    }
    print(name, rate, {c: x[-1] for c, x in out[name]['curves'].items()},
          out[name]['tuned for the gauge'])  # fmt: skip
  return {
    'environment': results.environment(),
    'epsilon': EPSILON, 'delta': DELTA, 'noise multiplier': sigma,
    'steps': STEPS, 'rates': RATES, 'seeds': len(SEEDS), 'methods': out,
  }  # fmt: skip


@mpl.rc_context({'font.size': 11})
def plot(facts, path):
  """One panel a method, one line a gauge, labelled where it ends."""
  figure, axes = plt.subplots(
    1, 3, figsize=(9, 3.4), sharey=True, layout='constrained'
  )
  last = facts['steps']
  plots.finish(axes)
  for axis, (name, row) in zip(axes, facts['methods'].items(), strict=True):
    ends = [row['curves'][c][-1] for c in SHOWN]
    # From wide to narrow: lines that coincide are all seen.
    places = plots.apart(ends[::-1], 8)[::-1]
    for c, place, (colour, width) in zip(SHOWN, places, LOOKS, strict=True):
      curve = row['curves'][c]
      axis.plot(curve, color=colour, lw=width, solid_capstyle='round')
      axis.annotate(
        f'{float(c):,.0f}: {curve[-1]:.0f} %',
        (last * 1.04, place),
        color=colour if colour != '#E69F00' else '#9A6A00',
        va='center',
        annotation_clip=False,
      )
    axis.annotate(
      '(condition)',
      (last * 1.04, min(places) - 9),
      va='center',
      annotation_clip=False,
    )
    axis.set_title(name, fontsize=13, loc='left')
    axis.set(xlabel='step', xlim=(0, last), ylim=(0, 100))
  axes[0].set_ylabel('accuracy, %')
  plots.save(figure, path, 160)
  plt.close(figure)


def main():
  parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
  parser.add_argument('--plot-only', action='store_true', help='no training')
  path = results.FOLDER / 'three_gauges.json'
  if not parser.parse_args().plot_only:
    results.write(path, measure())
  plot(json.loads(path.read_text('utf-8')), FIGURE)


if __name__ == '__main__':
  main()
