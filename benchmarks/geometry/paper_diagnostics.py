"""The three issues of DP-SGD on LoRA factors, measured on a small real model.

    python benchmarks/geometry/paper_diagnostics.py [--output FOLDER]
        [--plot-only]

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
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tqdm

ROOT = pathlib.Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / 'examples')]

from finetuning import sampling, tasks, training  # noqa: E402

import prism_optax  # noqa: E402
from benchmarks.common import methods, results  # noqa: E402
from benchmarks.geometry import paper_report  # noqa: E402
from benchmarks.geometry.paper_report import (  # noqa: E402
  GAUGES,
  METHODS,
  SIGMAS,
  SWEEP,
)
from prism_optax import _modules, diagnostics, fixed_rank  # noqa: E402
from prism_optax.fixed_rank import _lifts  # noqa: E402

BATCH, STEPS, LEARNING_RATE, SIGMA = 128, 60, 5e-3, 1.0


def regauge(params: Any, c: float) -> Any:
  """The same Z from ``(c L, R / c)``; other leaves stay."""
  return jax.tree_util.tree_map_with_path(
    lambda path, x: x * {'lora_a': 1 / c, 'lora_b': c}.get(name_of(path), 1.0),
    params,
  )


def name_of(path: tuple) -> str:
  """The name of a factor in a path; empty for another leaf."""
  return next(
    (str(k.key) for k in path if getattr(k, 'key', '') in ('lora_a', 'lora_b')),
    '',
  )


class Problem:
  """A model with adapters of full rank, and batches of public digits."""

  def __init__(self, folder: pathlib.Path):
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

  def per_example(self, params: Any, step: int) -> Any:
    """Gradients of the examples of one batch."""
    rows = np.random.default_rng((1, step)).permutation(len(self.data.labels))
    batch, _ = sampling.gather(self.data, rows[:BATCH])
    return self.grads(params, batch)

  def statistics(self, method: str, params: Any, step: int, norm: float):
    """What the clip would do to one batch."""
    return diagnostics.nonprivate_clip_statistics(
      self.per_example(params, step), params, norm,
      space='tangent' if method == 'PRISM' else 'factor',
    )  # fmt: skip


def optimizer(
  method: str, norm: float, sigma: float
) -> optax.GradientTransformation:
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


def train(
  problem: Problem,
  method: str,
  params: Any,
  norm: float,
  sigma: float,
  steps: int,
) -> tuple[Any, Any]:
  """Parameters and optimizer state after private training."""
  tx = optimizer(method, norm, sigma)
  state = tx.init(params)
  update = jax.jit(tx.update)
  for step in range(steps):
    updates, state = update(problem.per_example(params, step), state, params)
    params = optax.apply_updates(params, updates)
  return params, state


def issue_one(
  problem: Problem, norms: dict[str, float]
) -> dict[str, dict[str, list[tuple[float, float]]]]:
  """Clipped fraction and mean coefficient by method, step and gauge."""
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


def largest_pair(params: Any) -> tuple[np.ndarray, np.ndarray]:
  """(left, right) of the module with the largest Z, float64."""
  stacks = _modules.ModuleTree(params).factors(params)
  pairs = [
    (np.float64(left), np.float64(right))
    for stack in stacks.pairs
    for left, right in zip(stack.left, stack.right, strict=True)
  ]
  return max(pairs, key=lambda p: np.linalg.norm(p[0] @ p[1].T))


def issue_two(problem: Problem, draws: int = 200):
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


def noise_through(
  method: str, params: Any, state: Any, stddev: float, key: jax.Array
) -> tuple[float, float]:
  """Norms in Z of the noise and of the preconditioned noise, all adapters."""
  tree = _modules.ModuleTree(params)
  frames = tree.frames(params)
  like = tree.coordinates(params)
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
    x = [
      fixed_rank.project(frame, pair)
      for frame, pair in zip(frames, noise.pairs, strict=True)
    ]
    out = methods.preconditioned(state[2], frames, x, b2=0.95)
    return total(x), total(out)
  adam = state[1]
  correction = 1 - 0.95 ** int(adam.count)
  second = tree.coordinates(adam.nu)
  scaled = jax.tree.map(
    lambda g, v: g / (jnp.sqrt(v / correction) + 1e-8), noise, second
  )
  in_z = [
    [
      _lifts.tangent_from_steps(frame, fixed_rank.Factors(*pair))
      for frame, pair in zip(frames, steps.pairs, strict=True)
    ]
    for steps in (noise, scaled)
  ]
  return total(in_z[0]), total(in_z[1])


def issue_three(
  problem: Problem, norms: dict[str, float], draws: int = 5
) -> dict[str, list[list[float]]]:
  """Raw and preconditioned norm for each sigma, means over draws."""
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


def main():
  parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
  parser.add_argument('--output', type=pathlib.Path, default=results.FOLDER)
  parser.add_argument(
    '--plot-only', action='store_true', help='draw the stored numbers again'
  )
  options = parser.parse_args()
  folder = options.output
  folder.mkdir(parents=True, exist_ok=True)
  if options.plot_only:
    stored = json.loads((folder / 'paper_diagnostics.json').read_text('utf-8'))
    two = (stored[x] for x in ('noise', 'noise_closed_form', 'best_gauge'))
    paper_report.plot(
      stored['clipping'], tuple(two), stored['preconditioned'],
      folder / 'paper_diagnostics.png',
    )  # fmt: skip
    return
  problem = Problem(ROOT / 'runs' / 'paper_diagnostics')
  # Half of the examples are clipped at c = 1, in either space.
  norms = {
    m: float(jnp.median(problem.statistics(m, problem.params, 0, 1.0).norms))
    for m in METHODS
  }
  one = issue_one(problem, norms)
  two = issue_two(problem)
  three = issue_three(problem, norms)
  paper_report.table(one, two, three)
  paper_report.plot(one, two, three, folder / 'paper_diagnostics.png')
  facts = {
    'environment': results.environment(),
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
  results.write(folder / 'paper_diagnostics.json', facts)
  print(f'\nThe plot and the numbers are in {folder}.')


if __name__ == '__main__':
  main()
