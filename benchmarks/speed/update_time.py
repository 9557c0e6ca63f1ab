"""Time of the optimizer's update alone: PRISM, and AdamW on the factors.

    python benchmarks/speed/update_time.py [--threads 1 2] [--quick]

Two workloads, those of the timings of the authors' PyTorch step (arXiv:
2606.00944): 24 modules 384 x 384 of rank 8 with a batch of 32, and 60 large
ones of rank 16 with a batch of 4. With and without the clip of per-example
gradients. Then the cost against the number of modules, the rank and the width,
with the time that the memory traffic alone would take, and compile times.
The workloads once more with glibc told to ask for huge pages, which saves time
where much memory is taken and given back at every step.
Results go to ``benchmarks/results/update_time_<platform>.json`` and ``.png``.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib as mpl
import optax

mpl.use('agg')
from matplotlib import pyplot as plt

ROOT = pathlib.Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / 'examples')]

import prism_optax  # noqa: E402
from benchmarks.common import baselines, results, timing  # noqa: E402
from prism_optax import contrib, fixed_rank  # noqa: E402
from prism_optax.fixed_rank import _tangents  # noqa: E402

STDDEV = 0.1
WORKLOADS = {
  'small': ([(384, 384)] * 24, 8, 32),
  'large': (
    [(2560, 2560)] * 36 + [(10240, 2560)] * 12 + [(2560, 10240)] * 12,
    16,
    4,
  ),
}
# Of the authors' PyTorch step (begin, accumulate, finalize), float32, one
# thread, measured on another x86 machine: seconds.
AUTHORS = {'small': 0.074, 'large': 0.60}


def problem(shapes: Sequence[tuple[int, int]], rank: int):
  """Canonical factors of modules (outputs, inputs), and gradients."""
  params, grads = {}, {}
  for i, (outputs, inputs) in enumerate(shapes):
    keys = jax.random.split(jax.random.key(i), 4)
    params[f'm{i}'] = {
      'lora_a': jax.random.normal(keys[0], (inputs, rank)) / inputs**0.5,
      'lora_b': 0.01 * jax.random.normal(keys[1], (rank, outputs)),
    }
    grads[f'm{i}'] = {
      'lora_a': 0.01 * jax.random.normal(keys[2], (inputs, rank)),
      'lora_b': 0.01 * jax.random.normal(keys[3], (rank, outputs)),
    }
  return prism_optax.lora.canonicalize(params), grads


def noisy_adamw() -> optax.GradientTransformation:
  """What a DP-AdamW does behind its clip."""
  return optax.chain(
    baselines.add_noise(STDDEV, jax.random.key(0)), optax.adamw(1e-3)
  )


def prism(
  per_example_gradients: bool = False, batch: int = 1
) -> optax.GradientTransformation:
  """PRISM with the same noise."""
  return prism_optax.prism(
    1e-3,
    l2_clip_norm=1.0,
    noise_multiplier=STDDEV * batch,
    expected_batch_size=batch,
    per_example_gradients=per_example_gradients,
  )


def compiled(
  tx: optax.GradientTransformation, params: Any, grads: Any
) -> timing.Step:
  """The update and its application, as one program."""

  def step(carried, grads):
    params, state = carried
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  return timing.Step(step, (params, tx.init(params)), grads)


def workload(name: str, runs: int) -> dict[str, dict[str, float]]:
  """Times of one workload, and ratios to noise + AdamW of the same round."""
  shapes, rank, batch = WORKLOADS[name]
  params, grads = problem(shapes, rank)
  one_by_one = jax.tree.map(lambda g: jnp.stack([g] * batch), grads)
  steps = {
    'adamw': compiled(optax.adamw(1e-3), params, grads),
    'noise + adamw': compiled(noisy_adamw(), params, grads),
    'prism': compiled(prism(), params, grads),
    'prism with clip': compiled(prism(True, batch), params, one_by_one),
  }
  times = timing.in_turn(steps, runs, progress=True)
  found = {
    method: {
      **timing.summary(seconds),
      'to noise + adamw': timing.ratio(times, method, 'noise + adamw'),
      'compile seconds': steps[method].compile_seconds,
    }
    for method, seconds in times.items()
  }
  found['prism with clip']['times faster than the authors'] = (
    1e3 * AUTHORS[name] / found['prism with clip']['median']
  )
  return found


def float_noise() -> optax.GradientTransformation:
  """The privatizer with normal numbers, added as floats: not exact."""

  def update(stacks, key, step):
    key, draw = jax.random.split(key)
    stacks = stacks.map_pairs(fixed_rank.multiply_out)
    normal = optax.tree.random_like(draw, stacks, jax.random.normal)
    noisy = optax.tree.add_scale(stacks, STDDEV, normal)
    return noisy.map_pairs(
      lambda x, frame: _tangents.projected(frame, x), step.frames
    ), key

  return prism_optax.transforms.tangent_transformation(
    'float_noise', update, lambda step: jax.random.key(0), adds_noise=True
  )


def spelled_out(
  chain: Callable[..., Any],
  rate: Callable[..., Any],
  noise: Callable[..., Any] = lambda: prism_optax.tangent_privatizer(STDDEV),
  *behind_noise: optax.GradientTransformation,
) -> optax.GradientTransformation:
  """The lines of ``prism`` behind the clip, and others behind the noise."""
  return chain(
    noise(),
    *behind_noise,
    prism_optax.scale_by_rank_preconditioner(noise_stddev=STDDEV),
    prism_optax.add_decayed_factors(0.1),
    rate(1e-3),
    prism_optax.retract(),
  )


def chains(name: str, runs: int) -> dict[str, dict[str, float]]:
  """The alias against its lines, chained by this library and by optax.

  Also without the lattice: with noise as floats. And with row scales, and with
  the clip.
  """
  shapes, rank, batch = WORKLOADS[name]
  params, grads = problem(shapes, rank)
  one_by_one = jax.tree.map(lambda g: jnp.stack([g] * batch), grads)
  ours = prism_optax.scale_by_learning_rate
  theirs = optax.scale_by_learning_rate
  steps = {
    'prism': compiled(prism(), params, grads),
    'prism_optax.chain': compiled(
      spelled_out(prism_optax.chain, ours), params, grads
    ),
    'optax.chain': compiled(spelled_out(optax.chain, ours), params, grads),
    "optax.chain, optax's rate": compiled(
      spelled_out(optax.chain, theirs), params, grads
    ),
    'noise as floats': compiled(
      spelled_out(prism_optax.chain, ours, float_noise), params, grads
    ),
    'row scales': compiled(
      spelled_out(
        prism_optax.chain,
        ours,
        lambda: prism_optax.tangent_privatizer(STDDEV),
        contrib.scale_by_row_moments(noise_stddev=STDDEV),
      ),
      params,
      grads,
    ),
    'prism with clip': compiled(prism(True, batch), params, one_by_one),
  }
  times = timing.in_turn(steps, runs, progress=True)
  return {
    method: {
      **timing.summary(seconds),
      'to prism': timing.ratio(times, method, 'prism'),
      'compile seconds': steps[method].compile_seconds,
    }
    for method, seconds in times.items()
  }


def scaling(runs: int, quick: bool) -> dict[str, Any]:
  """Milliseconds and compile seconds against modules, rank and width."""
  axes = {
    'modules': [(k, 384, 8) for k in (1, 6, 24, 60, 180, 500)],
    'rank': [(24, 384, r) for r in (4, 8, 16, 32, 64)],
    'width': [(24, w, 8) for w in (128, 384, 1024, 2048, 4096)],
  }
  bandwidth = timing.copy_bandwidth()
  out = {'copy bandwidth, bytes per second': bandwidth}
  for axis, points in axes.items():
    out[axis] = []
    for modules, width, rank in points[:3] if quick else points:
      params, grads = problem([(width, width)] * modules, rank)
      steps = {
        'prism': compiled(prism(), params, grads),
        'noise + adamw': compiled(noisy_adamw(), params, grads),
      }
      times = timing.in_turn(steps, runs)
      state = prism().init(params)
      # Gradients are read, parameters and state read and written.
      moved = 3 * timing.tree_bytes(params) + 2 * timing.tree_bytes(state)
      out[axis].append(
        {
          'modules': modules,
          'width': width,
          'rank': rank,
          'byte limit': 1e3 * moved / bandwidth,
          **{
            name: {
              **timing.summary(seconds),
              'compile seconds': steps[name].compile_seconds,
            }
            for name, seconds in times.items()
          },
        }
      )
      print(f'  {axis}: {modules} x {width}, rank {rank}', file=sys.stderr)
  return out


def plot(found: dict[str, Any], path: pathlib.Path) -> None:
  """Time against modules, rank and width."""
  figure, axes = plt.subplots(1, 3, figsize=(11, 3.4), sharey=True)
  last = list(found['threads'])[-1]
  data = found['threads'][last]['scaling']
  for ax, axis in zip(axes, ('modules', 'rank', 'width'), strict=True):
    points = data[axis]
    x = [p[axis] for p in points]
    for method, style in (('prism', 'o-'), ('noise + adamw', 's--')):
      ax.plot(x, [p[method]['median'] for p in points], style, label=method)
    ax.plot(x, [p['byte limit'] for p in points], 'k:', label='memory traffic')
    ax.set(xscale='log', yscale='log', xlabel=axis, xticks=x, xticklabels=x)
    ax.minorticks_off()
    ax.grid(alpha=0.3)
  axes[0].set_ylabel('milliseconds per update')
  axes[0].legend(frameon=False)
  figure.suptitle(
    'Update alone; where not on the axis: 24 modules, width 384, rank 8'
  )
  figure.tight_layout()
  figure.savefig(path, dpi=110)
  plt.close(figure)


HUGE_PAGES = {'GLIBC_TUNABLES': 'glibc.malloc.hugetlb=1'}


def measure_chains(runs: int) -> dict[str, Any]:
  """Times of chains with the threads that this process has."""
  out: dict[str, Any] = {'environment': results.environment()}
  for name in WORKLOADS:
    print(f'{name} workload, chains', file=sys.stderr)
    out[name] = chains(name, runs if name == 'small' else max(2, runs // 2))
    for method, x in out[name].items():
      print(
        f'{name:>8}{method:>28}{x["median"]:11.2f} ms, {x["to prism"]:.3f} of'
        f' prism, compiled in {x["compile seconds"]:.1f} s',
        file=sys.stderr,
      )
  return out


def measure(runs: int, quick: bool, with_scaling: bool) -> dict[str, Any]:
  """All times with the threads that this process has."""
  out = {'environment': results.environment(), 'workloads': {}}
  for name in WORKLOADS:
    print(f'{name} workload', file=sys.stderr)
    count = runs if name == 'small' else max(2, runs // 5)
    out['workloads'][name] = workload(name, count)
  if with_scaling:
    out['scaling'] = scaling(max(2, runs // 5), quick)
  return out


def measured(
  threads: int, runs: int, quick: bool, huge_pages: bool
) -> dict[str, Any]:
  """:func:`measure` in a process of its own: its start fixes the threads."""
  command = [sys.executable, __file__, '--child', str(threads)]
  command += ['--runs', str(runs)] + ['--quick'] * quick
  command += ['--huge-pages'] * huge_pages
  environment = os.environ | (HUGE_PAGES if huge_pages else {})
  done = subprocess.run(
    command, stdout=subprocess.PIPE, check=True, text=True, env=environment
  )
  return json.loads(done.stdout)


def show(title: str, found: dict[str, Any]) -> None:
  """Prints the workloads."""
  for name, methods in found['workloads'].items():
    print(f'\n{name}, {title}')
    print(
      f'{"method":>18}{"median ms":>11}{"min":>8}{"ratio":>7}{"compile s":>11}'
    )
    for method, x in methods.items():
      print(
        f'{method:>18}{x["median"]:11.2f}{x["min"]:8.2f}'
        f'{x["to noise + adamw"]:7.2f}{x["compile seconds"]:11.1f}'
      )
    faster = methods['prism with clip']['times faster than the authors']
    print(f"  with clip: {faster:.0f} times faster than the authors' step")


def main():
  parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
  parser.add_argument('--threads', type=int, nargs='+', default=[1, 2])
  parser.add_argument('--runs', type=int, default=50)
  parser.add_argument('--quick', action='store_true', help='fewer points')
  parser.add_argument('--child', type=int, help=argparse.SUPPRESS)
  parser.add_argument(
    '--huge-pages', action='store_true', help=argparse.SUPPRESS
  )
  parser.add_argument(
    '--chains',
    action='store_true',
    help='only the alias against its chains, beside what is stored',
  )
  args = parser.parse_args()
  if args.chains:
    timing.use_threads(args.threads[0])
    path = results.path_of('update_time')
    stored = json.loads(path.read_text()) if path.exists() else {}
    stored['chains'] = measure_chains(args.runs)
    results.save('update_time', stored)
    print(f'Written to {path}')
    return
  if args.child is not None:
    timing.use_threads(args.child)
    print(json.dumps(measure(args.runs, args.quick, not args.huge_pages)))
    return
  stored = {
    'threads': {},
    'huge pages': HUGE_PAGES | {'threads': {}},
    'chains': measure_chains(args.runs),
  }
  for threads in args.threads:
    found = measured(threads, args.runs, args.quick, huge_pages=False)
    stored['threads'][str(threads)] = found
    show(f'{threads} threads', found)
    found = measured(threads, args.runs, args.quick, huge_pages=True)
    stored['huge pages']['threads'][str(threads)] = found
    show(f'{threads} threads, huge pages', found)
  path = results.save('update_time', stored)
  plot(stored, path.with_suffix('.png'))
  print(f'\nWritten to {path} and {path.with_suffix(".png").name}')


if __name__ == '__main__':
  main()
