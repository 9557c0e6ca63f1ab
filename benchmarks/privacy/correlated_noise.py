"""How much of correlated noise cancels on the manifold, step size by step size.

    python -m benchmarks.privacy.correlated_noise

Training on noise alone: 100 steps with the optimal Toeplitz strategy for prefix
sums (arXiv:2202.11205) on one 64 x 64 module of rank 4. In flat space the
accumulated noise after 100 steps, in units of that of independent noise of the
same privacy (single participation), is the promise. On the manifold each noise
moves Z by ``learning_rate T``; what accumulates in Z is compared with what
independent noise accumulates there, at the end. Fixed coordinates
(``correlated_tangent_privatizer``) against moving ones (``tangent_privatizer``
with the same privatizer), from full rank and from the zero start of LoRA. About
a minute on a CPU.
"""

import functools
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax_privacy import noise_addition
from jax_privacy.matrix_factorization import streaming_matrix, toeplitz

import prism_optax
from benchmarks.common import methods, plots, runner
from prism_optax.accounting import _matrix_mechanism

STEPS, SIZE, RANK = 100, 64, 4
# Length of one step over the smallest singular value of Z at the start.
RATIOS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
STARTS = {'condition 1': 1.0, 'condition 30': 30.0, 'zero': None}


@functools.cache
def noising(kind: str) -> tuple[streaming_matrix.StreamingMatrix, float]:
  """A noising matrix, and its noise at the same epsilon for all kinds."""
  if kind == 'independent':
    return streaming_matrix.identity(), 1.0
  coefs = toeplitz.optimal_max_error_strategy_coefs(STEPS)
  strategy = toeplitz.materialize_lower_triangular(coefs)
  # More noise for the larger sensitivity: the same epsilon for all.
  sensitivity = _matrix_mechanism.matrix_mechanism_sensitivity(
    strategy, max_participations=1
  )
  return toeplitz.inverse_as_streaming_matrix(coefs), sensitivity


def flat_promise() -> float:
  """Accumulated noise over independent noise, at the end."""
  matrix, sensitivity = noising('correlated')
  b = sensitivity * np.float64(matrix.materialize(STEPS))
  return np.sqrt(np.sum(np.sum(b, axis=0) ** 2) / STEPS)


def transformation(kind: str, coordinates: str, key: jax.Array):
  """Noise alone, in fixed or in moving coordinates."""
  matrix, stddev = noising(kind)
  if coordinates == 'moving':
    privatizer = noise_addition.matrix_factorization_privatizer(
      matrix, stddev=stddev, prng_key=key
    )
    return prism_optax.tangent_privatizer(privatizer=privatizer, steps=STEPS)
  return methods.correlated_privatizer(matrix, stddev, STEPS, key)


def start(
  condition: float | None, rng: np.random.Generator
) -> dict[str, jax.Array]:
  """Factors of this condition number; None for the zero start of LoRA."""
  left, right = (
    np.linalg.qr(rng.standard_normal((SIZE, RANK)))[0] for _ in range(2)
  )
  if condition is None:
    right, left = right, np.zeros_like(left)
  else:
    root = np.sqrt(np.geomspace(condition, 1.0, RANK))
    left, right = left * root, right * root
  return {
    'lora_a': jnp.asarray(right, jnp.float32),
    'lora_b': jnp.asarray(left.T, jnp.float32),
  }


@functools.partial(jax.jit, static_argnums=(0, 1))
def accumulated(kind, coordinates, params, key, rate):
  """||Z_t - Z_0|| after 100 steps of noise alone."""
  noise = transformation(kind, coordinates, key)
  last = prism_optax.retract()
  zeros = jax.tree.map(jnp.zeros_like, params)

  def step(carry, _):
    params, state = carry
    drawn, state = noise.update(zeros, state, params)
    updates, _ = last.update(
      jax.tree.map(lambda x: rate * x, drawn), optax.EmptyState(), params
    )
    return (optax.apply_updates(params, updates), state), None

  # While tracing, the start is not checked: the zero one is shown here.
  carry = params, noise.init(params)
  (end, _), _ = jax.lax.scan(step, carry, length=STEPS)
  return jnp.linalg.norm(
    end['lora_a'] @ end['lora_b'] - params['lora_a'] @ params['lora_b']
  )


def measure(**setting: Any) -> dict[str, float]:
  """Accumulated noise at the end over that of independent noise."""
  seeds, condition = setting['seeds'], STARTS[setting['start']]
  # One independent noise has about this norm: the same rate for all kinds.
  rate = setting['step over smallest singular value'] / np.sqrt(
    RANK * (2 * SIZE - RANK)
  )

  def energy(kind, coordinates):
    runs = [
      accumulated(
        kind,
        coordinates,
        start(condition, np.random.default_rng(seed)),
        jax.random.key(seed),
        rate,
      )
      for seed in range(seeds)
    ]
    return float(np.sqrt(np.mean(np.square(runs))))

  for kind in ('independent', 'correlated'):
    noising(kind)  # With values, before it is asked for while tracing.
  independent = energy('independent', 'fixed')
  return {
    'fixed': energy('correlated', 'fixed') / independent,
    'moving': energy('correlated', 'moving') / independent,
    'flat space': float(flat_promise()),
  }


def plot(rows: list[runner.Row], path: pathlib.Path) -> None:
  """Accumulated noise against the size of a step, for each start."""
  figure, axis = plots.panels(3.4)
  colours = dict(
    zip(STARTS, (plots.BLUE, plots.ORANGE, plots.PURPLE), strict=True)
  )
  for name, colour in colours.items():
    found = [row for row in rows if row['start'] == name]
    x = [row['step over smallest singular value'] for row in found]
    start = 'zero factor' if name == 'zero' else name
    for coordinates, look in (('fixed', 'o-'), ('moving', 's:')):
      axis.plot(
        x, [row[coordinates] for row in found], look, color=colour, ms=5,
        mfc=colour if coordinates == 'fixed' else 'white',
        label=f'{start}, {coordinates} coordinates',
      )  # fmt: skip
  flat = rows[0]['flat space']
  for x, y, text in ((0.0105, 1, 'independent noise'), (1, flat, 'flat space')):
    axis.axhline(y, color='0.3', lw=0.8, ls='--')
    axis.annotate(text, (x, 1.03 * y), color='0.3')
  axis.set(
    xscale='log', yscale='log',
    xlabel='step / smallest singular value of Z at the start',
    ylabel='accumulated noise / independent',
  )  # fmt: skip
  axis.set_xticks(RATIOS, [f'{x:g}' for x in RATIOS])
  ticks = (0.25, 0.5, 1)
  axis.set_yticks(ticks, [f'{y:g}' for y in ticks])
  axis.minorticks_off()
  plots.finish([axis])
  figure.legend(loc='outside right upper')
  plots.save(figure, path)


if __name__ == '__main__':
  runner.main(
    __doc__,
    'correlated_noise',
    [
      {
        'start': start_name, 'step over smallest singular value': ratio,
        'seeds': 4,
      }
      for start_name, condition_number in STARTS.items()
      # From zero there is no scale that a step could be small against.
      for ratio in (RATIOS if condition_number else (1.0,))
    ],
    measure,
    smoke={'seeds': 1},
    plot=plot,
  )  # fmt: skip
