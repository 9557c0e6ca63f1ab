"""The three issues of DP-SGD on LoRA factors, measured on a small real model.

    python benchmarks/paper_diagnostics.py [--output FOLDER]

After the diagnostics of the PRISM paper (arXiv:2606.00944, Appendix C), on the
vision transformer of ``examples/finetune.py`` and public digits:

I.   Clip fraction and mean coefficient against the gauge ``(c L, R / c)``, at
     the first and at the last step of private training.
II.  Noise that reaches Z against the gauge, for fixed Z: median and 10 to 90 %
     band of the norm over draws, with the closed forms (Eq. 8, 9 and 21).
III. Norm of the preconditioned noise, and by how much the preconditioner
     amplifies it, against the noise multiplier.

Each with DP on the factors beside PRISM. Prints a table, writes
``paper_diagnostics.png`` and ``.json``. Two to three minutes on two CPU cores.
All data here are public, so raw per-example norms may be shown.
"""

import argparse
import json
import pathlib
import sys

import jax
import jax.numpy as jnp
import matplotlib as mpl
import numpy as np
import optax
import tqdm

mpl.use('agg')
from matplotlib import pyplot as plt

ROOT = pathlib.Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / 'examples')]

from finetuning import sampling, tasks, training  # noqa: E402

import prism_optax  # noqa: E402
from prism_optax import diagnostics, fixed_rank, lora  # noqa: E402
from prism_optax.preconditioning import _orthonormal  # noqa: E402

BATCH, STEPS, LEARNING_RATE, SIGMA = 128, 60, 5e-3, 1.0
GAUGES = (0.25, 0.5, 1.0, 2.0, 4.0)
SWEEP = np.logspace(-3, 3, 61)
SIGMAS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
METHODS = ('factors', 'PRISM')
COLOURS = {'factors': 'tab:red', 'PRISM': 'tab:blue'}


def regauge(params, c):
  """The same Z from ``(c L, R / c)``; other leaves stay."""
  return jax.tree_util.tree_map_with_path(
    lambda path, x: x * {'lora_a': 1 / c, 'lora_b': c}.get(name_of(path), 1.0),
    params,
  )


def name_of(path):
  return next(
    (str(k.key) for k in path if getattr(k, 'key', '') in ('lora_a', 'lora_b')),
    '',
  )


class Problem:
  """A model with adapters of full rank, and batches of public digits."""

  def __init__(self, folder):
    task = tasks.mirrored_digits(
      folder, rank=4, targets=('attention',), init_seed=0
    )
    loss = training.make_loss(task.graphdef)
    self.data = task.train
    frozen = task.frozen

    def one(params, batch):
      batch = jax.tree.map(lambda x: x[None], batch)
      return loss(params, frozen, batch)[0]

    self.grads = jax.jit(jax.vmap(jax.grad(one), (None, 0)))
    params, tx = task.params, optax.adam(3e-3)
    state = tx.init(params)
    for step in range(60):  # So that no factor is zero any more.
      grads = jax.tree.map(lambda g: g.mean(0), self.per_example(params, step))
      updates, state = tx.update(grads, state, params)
      params = optax.apply_updates(params, updates)
    self.params = params

  def per_example(self, params, step):
    rows = np.random.default_rng((1, step)).permutation(len(self.data.labels))
    batch, _ = sampling.gather(self.data, rows[:BATCH])
    return self.grads(params, batch)

  def statistics(self, method, params, step, norm):
    return diagnostics.nonprivate_clip_statistics(
      self.per_example(params, step), params, norm,
      space='tangent' if method == 'PRISM' else 'factor',
    )  # fmt: skip


def optimizer(method, norm, sigma):
  """Per-example gradients in, updates of the parameters out."""
  if method == 'PRISM':
    return prism_optax.prism(
      LEARNING_RATE, l2_clip_norm=norm, noise_multiplier=sigma,
      expected_batch_size=BATCH, prng_key=0, b2=0.95,
    )  # fmt: skip
  return optax.chain(
    optax.contrib.differentially_private_aggregate(norm, sigma, 0),
    optax.scale_by_adam(b2=0.95),
    optax.scale_by_learning_rate(LEARNING_RATE),
  )


def train(problem, method, params, norm, sigma, steps):
  """Parameters and optimizer state after private training."""
  tx = optimizer(method, norm, sigma)
  state = tx.init(params)
  update = jax.jit(tx.update)
  for step in range(steps):
    updates, state = update(problem.per_example(params, step), state, params)
    params = optax.apply_updates(params, updates)
  return params, state


def issue_one(problem, norms):
  """{method: {when: [(fraction, coefficient) for each gauge]}}."""
  out = {m: {'first': [], 'last': []} for m in METHODS}
  for method in METHODS:
    for c in tqdm.tqdm(GAUGES, desc=f'I {method}', leave=False):
      params = regauge(problem.params, c)
      last, _ = train(problem, method, params, norms[method], SIGMA, STEPS)
      for when, at, step in (('first', params, 0), ('last', last, STEPS)):
        s = problem.statistics(method, at, step, norms[method])
        out[method][when].append(
          (float(s.clipped_fraction), float(s.mean_coefficient))
        )
  return out


def largest_pair(params):
  """(left, right) of the module with the largest Z, float64."""
  blocks = lora.Adapters(params).factors(params)
  pairs = [
    (np.float64(left), np.float64(right))
    for stack in blocks.pairs
    for left, right in zip(stack.left, stack.right, strict=True)
  ]
  return max(pairs, key=lambda p: np.linalg.norm(p[0] @ p[1].T))


def issue_two(problem, draws=200):
  """Norms of the noise in Z over the gauges, in units of its stddev."""
  left, right = largest_pair(problem.params)
  (m, rank), n = left.shape, len(right)
  rng = np.random.default_rng(2)
  pair = fixed_rank.Factors(jnp.asarray(left), jnp.asarray(right))
  frame = fixed_rank.frame(pair)
  norms = {'factors': [], 'bilinear': [], 'PRISM': []}
  for c in tqdm.tqdm(SWEEP, desc='II', leave=False):
    noise = rng.normal(size=(draws, m + n, rank))
    dl, dr = noise[:, :m], noise[:, m:]
    first = dl @ (right / c).T + c * left @ np.swapaxes(dr, 1, 2)
    norms['factors'].append(np.linalg.norm(first, axis=(1, 2)))
    second = dl @ np.swapaxes(dr, 1, 2)
    norms['bilinear'].append(np.linalg.norm(second, axis=(1, 2)))
    # The gauge is inside of the frame: a new one for each c.
    turned = fixed_rank.frame(fixed_rank.Factors(c * pair.left, pair.right / c))
    x = jax.vmap(fixed_rank.project, (None, 0))(
      turned, fixed_rank.Tangent(jnp.asarray(dl), jnp.asarray(dr))
    )
    norms['PRISM'].append(np.asarray(fixed_rank.norm(x)))
  bands = {k: np.percentile(v, (10, 50, 90), axis=1) for k, v in norms.items()}
  energy = [
    diagnostics.factor_noise_energy(c * left, right / c, 1.0) for c in SWEEP
  ]
  closed = {
    'factors': np.sqrt([float(e.first_order) for e in energy]),
    'bilinear': np.sqrt([e.second_order for e in energy]),
    'PRISM': np.full(
      len(SWEEP), diagnostics.tangent_noise_energy(m, n, rank, 1.0) ** 0.5
    ),
  }
  best = (m * np.sum(right**2) / (n * np.sum(left**2))) ** 0.25
  del frame
  return {k: v.tolist() for k, v in bands.items()}, closed, float(best)


def noise_through(method, params, state, stddev, key):
  """(||noise|| in Z, ||preconditioned noise|| in Z) of all adapters."""
  adapters = lora.Adapters(params)
  frames = adapters.frames(params)
  like = adapters.coordinates(params)
  leaves, treedef = jax.tree.flatten(like)
  keys = jax.random.split(key, len(leaves))
  noise = jax.tree.unflatten(
    treedef,
    [
      stddev * jax.random.normal(k, x.shape)
      for k, x in zip(keys, leaves, strict=True)
    ],
  )

  def total(pairs):
    return float(jnp.sqrt(sum(jnp.sum(fixed_rank.norm(x) ** 2) for x in pairs)))

  if method == 'PRISM':
    x = lora.map_pairs(fixed_rank.project, frames, noise.pairs)
    precondition = state[2]
    correction = 1 - 0.95 ** int(precondition.count)
    out = [
      _orthonormal.direction(
        moments._replace(mu=y), y.right.mT @ frame.right, frame,
        mu_correction=1.0, nu_correction=correction, eps=1e-8,
        floor_factor=1.0, debias=False,
        max_condition_number=1e4,
      )
      for moments, frame, y in zip(precondition.pairs, frames, x, strict=True)
    ]  # fmt: skip
    out = lora.map_pairs(fixed_rank.multiply_out, frames, out)
    return total(x), total(out)
  adam = state[1]
  correction = 1 - 0.95 ** int(adam.count)
  second = adapters.coordinates(adam.nu)
  scaled = jax.tree.map(
    lambda g, v: g / (jnp.sqrt(v / correction) + 1e-8), noise, second
  )
  in_z = [
    [
      fixed_rank.tangent_from_steps(frame, fixed_rank.Factors(*pair))
      for frame, pair in zip(frames, steps.pairs, strict=True)
    ]
    for steps in (noise, scaled)
  ]
  return total(in_z[0]), total(in_z[1])


def issue_three(problem, norms, draws=5):
  """{method: [(raw, preconditioned) for each sigma]}, means over draws."""
  out = {m: [] for m in METHODS}
  for method in METHODS:
    for sigma in tqdm.tqdm(SIGMAS, desc=f'III {method}', leave=False):
      params, state = train(
        problem, method, problem.params, norms[method], sigma, 30
      )
      stddev = sigma * norms[method] / BATCH
      sizes = [
        noise_through(method, params, state, stddev, jax.random.key(i))
        for i in range(draws)
      ]
      out[method].append(np.mean(sizes, 0).tolist())
  return out


def plot(one, two, three, path):
  bands, closed, best = two
  figure, axes = plt.subplots(2, 3, figsize=(15, 8), layout='constrained')
  for row, (k, label) in enumerate(
    ((0, 'clipped fraction'), (1, 'mean clip coefficient'))
  ):
    axis = axes[row, 0]
    for method in METHODS:
      for when, style in (('first', '-o'), ('last', '--s')):
        axis.plot(
          GAUGES, [x[k] for x in one[method][when]], style,
          color=COLOURS[method], label=f'{method}, {when} step',
        )  # fmt: skip
    axis.set(xscale='log', xlabel='gauge c', ylabel=label, ylim=(-0.05, 1.05))
    axis.legend()
  axes[0, 0].set_title('I: what the clip does depends on the gauge')
  axis = axes[0, 1]
  for name, colour in (*COLOURS.items(), ('bilinear', 'tab:orange')):
    low, middle, high = bands[name]
    axis.fill_between(SWEEP, low, high, color=colour, alpha=0.3)
    label = 'bilinear (/ stddev squared)' if name == 'bilinear' else name
    axis.plot(SWEEP, middle, color=colour, label=f'{label}, 10 to 90 %')
    axis.plot(SWEEP, closed[name], 'k:', linewidth=1)
  axis.axvline(best, color='gray', linewidth=0.8)
  axis.set(
    xscale='log', yscale='log', xlabel='gauge c', ylabel='noise in Z / stddev',
    title='II: the same Z, another noise (dotted: closed forms)',
  )  # fmt: skip
  axis.legend()
  axis = axes[1, 1]
  ratio = np.array(bands['factors'][1]) / np.array(bands['PRISM'][1])
  axis.plot(SWEEP, ratio, color='tab:red')
  axis.axhline(1, color='tab:blue')
  axis.set(
    xscale='log', yscale='log', xlabel='gauge c',
    ylabel='noise in Z: factors / PRISM',
  )  # fmt: skip
  for method in METHODS:
    raw, out = np.array(three[method]).T
    axes[0, 2].plot(SIGMAS, out, '-o', color=COLOURS[method], label=method)
    axes[1, 2].plot(SIGMAS, out / raw, '-o', color=COLOURS[method],
                    label=method)  # fmt: skip
  axes[0, 2].set(
    xscale='log', ylim=(0, None), xlabel='noise multiplier',
    ylabel='preconditioned noise in Z', title='III: adaptive steps and noise',
  )  # fmt: skip
  axes[1, 2].set(
    xscale='log', yscale='log', xlabel='noise multiplier',
    ylabel='amplification by the preconditioner',
  )  # fmt: skip
  axes[0, 2].legend()
  axes[1, 2].legend()
  for axis, ticks in (
    *((a, GAUGES) for a in axes[:, 0]), *((a, SIGMAS) for a in axes[:, 2])
  ):  # fmt: skip
    axis.minorticks_off()
    axis.set_xticks(ticks, [f'{t:g}' for t in ticks])
  figure.savefig(path, dpi=110)


def report(one, two, three):
  print('\nI. clipped fraction / mean coefficient')
  print(f'{"":22}' + ''.join(f'{f"c = {c:g}":>15}' for c in GAUGES))
  for method in METHODS:
    for when in ('first', 'last'):
      cells = ''.join(f'{f"{f:.2f} / {c:.2f}":>15}' for f, c in
                      one[method][when])  # fmt: skip
      print(f'{f"{method}, {when} step":22}{cells}')
  bands, closed, best = two
  print('\nII. norm of the noise in Z over its stddev, median (closed form)')
  picks = [0, 15, 30, 45, 60]
  print(f'{"":22}' + ''.join(f'{f"c = {SWEEP[i]:.2g}":>18}' for i in picks))
  for name in ('factors', 'bilinear', 'PRISM'):
    cells = ''.join(
      f'{f"{bands[name][1][i]:.1f} ({closed[name][i]:.1f})":>18}' for i in picks
    )
    print(f'{name:22}{cells}')
  measured = SWEEP[int(np.argmin(bands['factors'][1]))]
  print(
    f'smallest for the factors at c = {measured:.2f}, by formula {best:.2f}'
  )
  print('\nIII. preconditioned noise in Z (amplification)')
  print(f'{"noise multiplier":22}' + ''.join(f'{s:>16g}' for s in SIGMAS))
  for method in METHODS:
    cells = ''.join(f'{f"{b:.2f} ({b / a:.0f})":>16}' for a, b in
                    three[method])  # fmt: skip
    print(f'{method:22}{cells}')


def main():
  parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
  parser.add_argument('--output', default=str(ROOT / 'benchmarks' / 'results'))
  folder = pathlib.Path(parser.parse_args().output)
  folder.mkdir(parents=True, exist_ok=True)
  problem = Problem(ROOT / 'runs' / 'paper_diagnostics')
  # Half of the examples are clipped at c = 1, in either space.
  norms = {
    m: float(jnp.median(problem.statistics(m, problem.params, 0, 1.0).norms))
    for m in METHODS
  }
  one = issue_one(problem, norms)
  two = issue_two(problem)
  three = issue_three(problem, norms)
  report(one, two, three)
  plot(one, two, three, folder / 'paper_diagnostics.png')
  facts = {
    'versions': {'jax': jax.__version__, 'optax': optax.__version__},
    'device': jax.devices()[0].device_kind,
    'clip_norms': norms,
    'gauges': GAUGES,
    'clipping': one,
    'sweep': SWEEP.tolist(),
    'noise': two[0],
    'noise_closed_form': {k: np.asarray(v).tolist() for k, v in two[1].items()},
    'best_gauge': two[2],
    'noise_multipliers': SIGMAS,
    'preconditioned': three,
  }
  (folder / 'paper_diagnostics.json').write_text(json.dumps(facts, indent=1))
  print(f'\nThe plot and the numbers are in {folder}.')


if __name__ == '__main__':
  main()
