"""One model in three factorisations, trained privately by three methods.

    python -m benchmarks.geometry.three_gauges [--table]

Adapters of rank 4 on the two layers of a frozen random network learn
handwritten digits (scikit-learn's) from 1,297 rows at epsilon 3. The same
adapters ``A B`` are written as ``(A K) (K^-1 B)``, with ``K`` of condition 1,
100 and 1,000: the same function in three gauges (the stored results have 10
too, which makes little difference to any method). DP-AdamW clips and noises the
factors, as they are given or after ``lora.canonicalize``, which writes every
start in its balanced gauge; PRISM clips and noises the tangent space.
Everything else is shared: rows, Poisson batches, clip norm, noise multiplier,
draws of the noise (one on the factors, by `make_private`, and one ambient
matrix that PRISM projects, see ``given_noise.py``), no weight decay. Each
method has the learning rate that is best for it at condition 1, by the loss on
250 public rows; the figure shows 250 others, means over five seeds.

Writes ``three_gauges.json`` beside the other results and the picture of the
first page, ``docs/figures/three_gauges.png``. Three minutes of CPU.
"""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn import datasets

import prism_optax
from benchmarks.common import plots, private, runner
from benchmarks.geometry import given_noise
from prism_optax import lora, training

FIGURE = runner.ROOT / 'docs' / 'figures' / 'three_gauges.png'
EPSILON, DELTA, CLIP, BATCH, STEPS = 3.0, 1e-5, 1.0, 256, 60
TRAIN, HIDDEN, RANK, SEEDS = 1297, 64, 4, range(5)
CONDITIONS, SHOWN = (1.0, 10.0, 100.0, 1000.0), (1.0, 100.0, 1000.0)
LOOKS = ((plots.ORANGE, 6), (plots.BLUE, 3), ('#000000', 1.2))
RATES = (1e-2, 3e-2, 1e-1, 3e-1)
# Method, and whether `lora.canonicalize` rewrites the start first.
METHODS = {
  'DP-AdamW on the factors': ('dp-adamw', False),
  'canonicalised first': ('dp-adamw', True),
  'PRISM': ('prism', False),
}
TITLES = {
  'DP-AdamW on the factors': 'DP-AdamW',
  'canonicalised first': 'DP-AdamW, canonicalised',
  'PRISM': 'prism',
}


@functools.cache
def splits():
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


def adamw_training(params, rate, key=None, **noise):
  """DP-AdamW by `make_private`: noise on the factors."""
  return training.make_private(
    lambda params, x, y: losses(params, x, y)[0],
    params,
    optimizer=optax.adamw(rate, weight_decay=0.0),
    l2_clip_norm=CLIP,
    expected_batch_size=BATCH,
    dataset_size=TRAIN,
    steps=STEPS,
    delta=DELTA,
    prng_key=key,
    **noise,
  )


@functools.cache
def adamw_program(sigma: float) -> private.Program:
  """Its runs; the noise is one draw for a seed."""
  params = start(0, 1.0)
  return private.Program(
    lambda numbers, key: adamw_training(
      params, numbers['rate'], key, noise_multiplier=sigma
    )
  )


@jax.jit
def prism_step(params, state, batch, rate, stddev, key):
  """PRISM on the same batches, with an ambient draw for both layers."""
  (x, y), is_padding, _ = batch
  per_row = jax.vmap(jax.grad(lambda *args: losses(*args)[0]), (None, 0, 0))
  keys = jax.random.split(key, len(params))
  ambient = [
    jax.random.normal(k, w.shape) for k, w in zip(keys, FROZEN, strict=True)
  ]

  # A matrix goes in as the gradient of what it is paired with.
  def paired(p):
    return sum(jnp.sum(xi * z) for xi, z in zip(ambient, dense(p), strict=True))

  noise = prism_optax.tangent_coordinates(params)(jax.grad(paired)(params))
  step = given_noise.tangent_step(rate, CLIP, BATCH, stddev)
  updates, state = step.update(
    per_row(params, x, y), noise, state, params, is_padding
  )
  return optax.apply_updates(params, updates), state


@functools.cache
def batches_of(seed: int, sigma: float) -> list[Any]:
  """The batches of a seed, the same for all methods and gauges."""
  program = adamw_program(sigma)
  data = splits()[0]
  return list(program.batches(start(0, 1.0), data, {'rate': 0.1}, seed))


def train(
  method: str, params: Any, rate: float, sigma: float, seed: int, steps: int
) -> tuple[float, list[float]]:
  """Loss on the tuning rows at the end, accuracy on the test rows by step."""
  _, tuning, test = splits()
  program, key = adamw_program(sigma), jax.random.key(seed)
  numbers, stddev = {'rate': rate}, sigma * CLIP / BATCH
  curve = [float(accuracy(params, *test))]
  if method == 'prism':
    state = given_noise.tangent_step(rate, CLIP, BATCH, stddev).init(params)
  else:
    params = jax.tree.map(jnp.array, params)  # They are donated.
    state = program.init(params, numbers, key)
  for t, batch in enumerate(batches_of(seed, sigma)[:steps]):
    if method == 'prism':
      params, state = prism_step(
        params, state, batch, rate, stddev, jax.random.fold_in(key, t)
      )
    else:
      params, state = program.step(params, state, None, batch, numbers, key)
    curve.append(float(accuracy(params, *test)))
  return float(jnp.mean(losses(params, *tuning)[0])), curve


@jax.jit
def accuracy(params, x, y):
  return jnp.mean(losses(params, x, y)[1])


@functools.cache
def noise_multiplier() -> float:
  made = adamw_training(start(0, 1.0), 0.1, target_epsilon=EPSILON)
  return made.noise_multiplier


@functools.cache
def curves(name: str, condition: float, smoke: bool) -> dict[float, Any]:
  """By rate: loss on the tuning rows, and accuracies by seed and step."""
  method, canonical = METHODS[name]
  found = {}
  for rate in RATES[:1] if smoke else RATES:
    runs = [
      train(
        method, start(seed, condition, canonical), rate,
        1.0 if smoke else noise_multiplier(), seed, 2 if smoke else STEPS,
      )
      for seed in (SEEDS[:1] if smoke else SEEDS)
    ]  # fmt: skip
    losses, accuracies = zip(*runs, strict=True)
    found[rate] = float(np.mean(losses)), 100 * np.asarray(accuracies)
  return found


def measure(method: str, condition: float, smoke: bool = False) -> dict:
  """One line of the figure, at the rate that is best at condition 1."""
  found = curves(method, condition, smoke)
  first = curves(method, 1.0, smoke)
  rate = min(first, key=lambda each: first[each][0])
  # Would a rate of its own have saved the gauge?
  own = min(found, key=lambda each: found[each][0])
  return {
    'rate': rate,
    'curve': np.round(found[rate][1].mean(0), 2).tolist(),
    'spread': np.round(found[rate][1].std(0), 2).tolist(),
    'best rate': own,
    'accuracy at the best rate': round(float(found[own][1][:, -1].mean()), 2),
    'seeds': len(SEEDS),
  }


def plot(rows, path):
  """One panel a method, one line a gauge; bands are one standard deviation."""
  path = path if path.parent != runner.FOLDER else FIGURE
  figure, axes = plots.panels(3.3, columns=3, sharey=True)
  plots.finish(axes)
  for axis, name in zip(axes, METHODS, strict=True):
    found = {x['condition']: x['curve'] for x in rows if x['method'] == name}
    spread = {x['condition']: x['spread'] for x in rows if x['method'] == name}
    last = len(found[1.0]) - 1
    ends = [found[c][-1] for c in SHOWN]
    # From wide to narrow: lines that coincide are all seen.
    places = plots.apart(ends[::-1], 7)[::-1]
    for c, place, (colour, width) in zip(SHOWN, places, LOOKS, strict=True):
      axis.fill_between(
        range(last + 1), np.subtract(found[c], spread[c]),
        np.add(found[c], spread[c]), color=colour, alpha=0.2, lw=0,
      )  # fmt: skip
      axis.plot(
        found[c], color=colour, lw=width, solid_capstyle='round',
        label=f'$K$ of condition {c:,.0f}',
      )  # fmt: skip
      axis.annotate(
        f'{found[c][-1]:.0f} %', (last * 1.04, place),
        color=colour if colour != plots.ORANGE else '#9A6A00', va='center',
        annotation_clip=False,
      )  # fmt: skip
    axis.set_title(TITLES[name])
    axis.set(xlabel='step', xlim=(0, last), ylim=(0, 100))
  axes[0].set_ylabel('accuracy, %')
  plots.legend(
    figure, axes[0], 'lower center', ncols=3,
    title='the same model, its adapter written as $(A K)(K^{-1} B)$',
  )  # fmt: skip
  plots.save(figure, path)


if __name__ == '__main__':
  runner.main(
    __doc__,
    'three_gauges',
    [
      {'method': method, 'condition': condition}
      for condition in CONDITIONS
      for method in METHODS
    ],
    measure,
    smoke={'smoke': True},
    plot=plot,
    by_device=False,
  )
