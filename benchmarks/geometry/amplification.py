"""By how much preconditioners amplify the noise, after some private training.

    python -m benchmarks.geometry.amplification --data FOLDER

The third issue of the PRISM paper (arXiv:2606.00944) for all methods: after 10
private steps on SST-2 (the set-up of ``utility.py``) the mean gradient is
changed by noise of the size that it carries, and the change of all
``Z = B A`` together, over the learning rate, is compared with the same noise
lifted to Z without any preconditioner. Both for a range of noise multipliers.
Writes ``benchmarks/results/amplification.json`` and ``.png``. Four minutes on
one core.
"""

import math
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax

import prism_optax
from benchmarks.accuracy import sentences
from benchmarks.common import methods, plots, runner
from prism_optax import lora

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


# So small a step that products of two steps do not matter.
RATE = 1e-3


def distance(first: Any, second: Any) -> float:
  """Frobenius norm of the difference in Z, over all modules."""
  pair = [lora.deltas(x, dense=True) for x in (first, second)]
  return float(optax.tree.norm(optax.tree.sub(*pair)))


def step_after(optimizer: Any, stddev: float) -> Callable[..., Any]:
  """``(params, state, mean) -> params``: a step without its clip.

  ``state`` is that of a training: of the clip, and of all that follows.
  """
  tx, last = optimizer, 2  # Of clip, noise and optimizer.
  if callable(optimizer):
    last = slice(1, None)
    tx = optimizer(
      l2_clip_norm=1.0, noise_multiplier=stddev, expected_batch_size=1,
      prng_key=0, per_example_gradients=False,
    )  # fmt: skip

  @jax.jit
  def after(params, state, mean):
    updates, _ = tx.update(mean, state[last], params)
    return optax.apply_updates(params, updates)

  return after


def plain_step(is_tangent: bool) -> Callable[..., Any]:
  """What plain SGD makes of noise: a step of the factors, or a retraction."""
  if not is_tangent:
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


def amplified(
  optimizer: Any, params: Any, state: Any, stddev: float, keys: list[jax.Array]
) -> dict[str, float]:
  """``{'in': noise in Z, 'out': preconditioned noise in Z}``, means over draws.

  The noise is drawn by hand: it stands for a mean that is nothing but noise.

  Args:
    optimizer: As `make_private` takes it, with the learning rate ``RATE``.
    params: Where the training has arrived.
    state: That of the training's clip, noise and optimizer.
    stddev: Of the noise on the mean.
    keys: One for each draw.
  """
  step, plain = step_after(optimizer, stddev), plain_step(callable(optimizer))
  still = step(params, state, optax.tree.zeros_like(params))
  sizes = []
  for key in keys:
    noise = optax.tree.random_like(key, params, jax.random.normal)
    noise = optax.tree.scale(stddev, noise)
    ends = (plain(params, noise), params), (step(params, state, noise), still)
    sizes.append([distance(*pair) / RATE for pair in ends])
  return dict(zip(('in', 'out'), np.mean(sizes, 0).tolist(), strict=True))


def measure(folders: runner.Folders, **given: Any) -> dict[str, float]:
  """One row."""
  name, sigma = given['method'], given.pop('noise multiplier')
  setting = sentences.Setting(
    rate=RATES[name], epsilon=1.0, seed=0, **{'steps': STEPS, **given}
  )
  params, state, _ = sentences.train(setting, folders, sigma)
  stddev = sigma * setting.clip / setting.batch
  optimizer = methods.optimizer(name, lambda count: RATE, stddev=stddev)
  return amplified(optimizer, params, state, stddev, [jax.random.key(7)])


def plot(rows: list[runner.Row], path: pathlib.Path) -> None:
  """Noise in Z after the preconditioner, and over the noise before it."""
  figure, (left, right) = plots.panels(3.2, columns=2)
  ends = {}
  for name in RATES:
    found = [row for row in rows if row['method'] == name]
    x = [row['noise multiplier'] for row in found]
    out = [row['out'] for row in found]
    ratio = [row['out'] / row['in'] for row in found]
    for axis, y in ((left, out), (right, ratio)):
      axis.plot(x, y, ms=4, **plots.look(name))
    ends[name] = x[-1], math.log10(ratio[-1])
  heights = plots.apart([y for _, y in ends.values()], 0.36)
  for (name, (x, _)), y in zip(ends.items(), heights, strict=True):
    right.annotate(
      plots.name(name), (1.3 * x, 10**y), va='center',
      color=plots.colour(name), annotation_clip=False,
    )  # fmt: skip
  left.set(title='noise in Z, at a rate of one')
  right.set(title='the same over the noise before')
  for axis in (left, right):
    axis.set(xscale='log', yscale='log', xlabel='noise multiplier')
    axis.set_xticks(SIGMAS, [f'{x:g}' for x in SIGMAS])
    axis.minorticks_off()
    plots.numbers(axis.yaxis, '{x:,g}')
  plots.finish((left, right))
  plots.save(figure, path)


if __name__ == '__main__':
  runner.main(
    __doc__,
    'amplification',
    [
      {'method': name, 'noise multiplier': sigma}
      for sigma in SIGMAS
      for name in RATES
    ],
    measure,
    smoke={'task': 'banking77', 'steps': 2, 'batch': 32, 'pooled': True},
    plot=plot,
    by_device=False,
    reads_text=True,
  )
