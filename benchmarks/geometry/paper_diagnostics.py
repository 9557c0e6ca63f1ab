"""The three issues of DP-SGD on LoRA factors, measured on a small real model.

    python -m benchmarks.geometry.paper_diagnostics

After the diagnostics of the PRISM paper (arXiv:2606.00944, Appendix C), on the
vision transformer of ``prism-optax train`` and public digits:

I.   Clip fraction and mean coefficient against the gauge ``(c L, R / c)``, at
     the first and at the last step of private training.
II.  Noise that reaches Z against the gauge, for fixed Z: median and 10 to 90 %
     band of the norm over draws, with the closed forms (Eq. 8, 9 and 21).
III. Norm of the preconditioned noise, and by how much the preconditioner
     amplifies it, against the noise multiplier.

Each with DP on the factors beside PRISM. Some minutes on two CPU cores.
All data here are public, so raw per-example norms may be shown.
"""

import argparse
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import prism_optax
from benchmarks.common import private, runner
from benchmarks.geometry import amplification, paper_report
from benchmarks.geometry.paper_report import GAUGES, METHODS, SIGMAS
from prism_optax import diagnostics, fixed_rank, lora, training
from prism_optax.finetune import tasks

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


@functools.cache
def pretrained():
  """``(params, frozen, rows, losses)``: adapters of full rank, digits."""
  task = tasks.mirrored_digits(
    argparse.Namespace(rank=4, lora_targets=['attention']),
    runner.ROOT / 'runs' / 'paper_diagnostics',
  )

  def losses(params, frozen, x, y):
    logits = nnx.merge(task.graphdef, params, frozen)(x)
    return optax.softmax_cross_entropy_with_integer_labels(logits, y)

  rows = tuple(map(np.asarray, task.train))
  params, tx = task.params, optax.adam(3e-3)
  state = tx.init(params)
  gradient = jax.jit(
    jax.grad(lambda p, *batch: jnp.mean(losses(p, task.frozen, *batch)))
  )
  for step in range(60):  # So that no factor is zero any more.
    updates, state = tx.update(gradient(params, *batch_of(rows, step)), state)
    params = optax.apply_updates(params, updates)
  return params, task.frozen, rows, losses


def batch_of(rows: Any, step: int) -> Any:
  """Some rows."""
  order = np.random.default_rng((1, step)).permutation(len(rows[1]))
  return tuple(x[order[:BATCH]] for x in rows)


def loss(params: Any, frozen: Any, x: Any, y: Any) -> jax.Array:
  """Of one example."""
  return pretrained()[3](params, frozen, x[None], y[None])[0]


gradients_of = jax.jit(jax.vmap(jax.grad(loss), (None, None, 0, 0)))


def statistics(method: str, params: Any, step: int, norm: float) -> Any:
  """What the clip would do to one batch."""
  _, frozen, rows, _ = pretrained()
  gradients = gradients_of(params, frozen, *batch_of(rows, step))
  return diagnostics.nonprivate_clip_statistics(
    gradients, params, norm,
    space='tangent' if method == 'PRISM' else 'factor',
  )  # fmt: skip


@functools.cache
def clip_norm(method: str) -> float:
  """Half of the examples are clipped at c = 1, in either space."""
  found = statistics(method, pretrained()[0], 0, 1.0)
  return float(jnp.median(found.norms))


def optimizer_of(method: str, rate: float) -> Any:
  """As `make_private` takes it."""
  if method == 'PRISM':
    return functools.partial(prism_optax.prism, rate, b2=0.95)
  return optax.adam(rate, b2=0.95)


@functools.cache
def program(method: str, sigma: float, steps: int) -> private.Program:
  """Private training by `make_private`."""
  params, _, rows, _ = pretrained()
  norm = clip_norm(method)
  return private.Program(
    lambda numbers, key: training.make_private(
      loss,
      params,
      optimizer=optimizer_of(method, LEARNING_RATE),
      l2_clip_norm=norm,
      noise_multiplier=sigma,
      expected_batch_size=BATCH,
      dataset_size=len(rows[1]),
      steps=steps,
      delta=1e-5,
      prng_key=key,
    )
  )


def train(method: str, params: Any, sigma: float, steps: int) -> Any:
  """Parameters and the optimizer's state after private training."""
  _, frozen, rows, _ = pretrained()
  run = program(method, sigma, steps)
  batches = run.batches(params, rows, {}, 0)
  return run.train(params, frozen, batches, {}, 0)


def clip(
  method: str, gauge: float, steps: int = STEPS, **_: Any
) -> list[runner.Row]:
  """I: clipped fraction and mean coefficient, before and after training."""
  norm = clip_norm(method)
  params = regauge(pretrained()[0], gauge)
  last, _ = train(method, params, SIGMA, steps)
  found = []
  for when, at, step in (('first', params, 0), ('last', last, steps)):
    s = statistics(method, at, step, norm)
    found.append(
      {
        'step': when,
        'clip norm': norm,
        'clipped fraction': float(s.clipped_fraction),
        'mean coefficient': float(s.mean_coefficient),
      }
    )
  return found


def largest_pair(params: Any) -> tuple[np.ndarray, np.ndarray]:
  """(left, right) of the module with the largest Z, float64."""
  pairs = (map(np.float64, pair) for pair in lora.deltas(params).values())
  return max(map(tuple, pairs), key=lambda p: np.linalg.norm(p[0] @ p[1].T))


def noise(draws: int = 200, **_: Any) -> list[runner.Row]:
  """II: norms of the noise in Z over the gauges, in units of its stddev."""
  left, right = largest_pair(pretrained()[0])
  (m, rank), n = left.shape, len(right)
  rng = np.random.default_rng(2)
  pair = fixed_rank.Factors(jnp.asarray(left), jnp.asarray(right))
  found: list[runner.Row] = []
  for c in paper_report.SWEEP.tolist():
    drawn = rng.normal(size=(draws, m + n, rank))
    dl, dr = drawn[:, :m], drawn[:, m:]
    first = dl @ (right / c).T + c * left @ np.swapaxes(dr, 1, 2)
    second = dl @ np.swapaxes(dr, 1, 2)
    # The gauge is inside of the frame: a new one for each c.
    turned = fixed_rank.frame(fixed_rank.Factors(c * pair.left, pair.right / c))
    x = jax.vmap(fixed_rank.project, (None, 0))(
      turned, fixed_rank.Tangent(jnp.asarray(dl), jnp.asarray(dr))
    )
    # Proposition 2.2, Eq. 8 and 9; Theorem 3.1, Eq. 21.
    squares = np.sum((right / c) ** 2), np.sum((c * left) ** 2)
    first_order = m * squares[0] + n * squares[1]
    second_order, tangent = m * n * rank, rank * (m + n - rank)
    for method, norms, squared in (
      ('factors', np.linalg.norm(first, axis=(1, 2)), first_order),
      ('bilinear', np.linalg.norm(second, axis=(1, 2)), second_order),
      ('PRISM', np.asarray(jax.vmap(optax.tree.norm)(x)), tangent),
    ):
      bands = map(float, np.percentile(norms, (10, 50, 90)))
      found.append(
        {
          'issue': 'noise', 'method': method, 'gauge': c,
          **dict(zip(('low', 'median', 'high'), bands, strict=True)),
          'closed form': float(squared) ** 0.5,
        }
      )  # fmt: skip
  best = (m * np.sum(right**2) / (n * np.sum(left**2))) ** 0.25
  return [
    *found,
    {'issue': 'noise', 'method': 'best gauge', 'gauge': float(best)},
  ]


def preconditioned(
  steps: int = STEPS // 2, draws: int = 5, **setting: Any
) -> runner.Row:
  """III: raw and preconditioned norm, means over draws."""
  method, sigma = setting['method'], setting['noise multiplier']
  params, state = train(method, pretrained()[0], sigma, steps)
  stddev = sigma * clip_norm(method) / BATCH
  keys = list(map(jax.random.key, range(draws)))
  optimizer = optimizer_of(method, amplification.RATE)
  return amplification.amplified(optimizer, params, state, stddev, keys)


def measure(issue: str, **setting: Any) -> runner.Row | list[runner.Row]:
  """Rows of an issue."""
  measures = {'clip': clip, 'noise': noise, 'preconditioned': preconditioned}
  return measures[issue](**setting)


if __name__ == '__main__':
  runner.main(
    __doc__,
    'paper_diagnostics',
    [
      *(
        {'issue': 'clip', 'method': method, 'gauge': gauge}
        for method in METHODS
        for gauge in GAUGES
      ),
      {'issue': 'noise'},
      *(
        {'issue': 'preconditioned', 'method': method, 'noise multiplier': sigma}
        for method in METHODS
        for sigma in SIGMAS
      ),
    ],
    measure,
    # One program for both issues.
    smoke={'steps': 2, 'method': 'PRISM', 'noise multiplier': SIGMA},
    plot=paper_report.plot,
    by_device=False,
  )
