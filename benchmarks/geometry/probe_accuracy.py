"""Accuracy of tangent coordinates: whitened factor gradients against probes.

    python -m benchmarks.geometry.probe_accuracy

For gauges of growing condition and both types of parameters, the relative error
of ``tangent_coordinates`` of a factor gradient and of ``tangent_probes``.
Results go to ``benchmarks/results``; a few seconds.
"""

import jax
import jax.numpy as jnp
import numpy as np

import prism_optax
from benchmarks.common import runner
from prism_optax import contrib, fixed_rank

CONDITIONS = (1e0, 1e1, 1e2, 1e3, 1e4, 1e6)


def problem(
  condition: float,
  dtype: jax.typing.DTypeLike,
  seed: int = 0,
  m: int = 40,
  n: int = 30,
  rank: int = 4,
) -> tuple[dict[str, jax.Array], jax.Array]:
  """Factors in a gauge of that condition, and one gradient in Z."""
  rng = np.random.default_rng(seed)
  u, _ = np.linalg.qr(rng.normal(size=(rank, rank)))
  v, _ = np.linalg.qr(rng.normal(size=(rank, rank)))
  gauge = u @ np.diag(np.geomspace(condition**0.5, condition**-0.5, rank)) @ v
  left = rng.normal(size=(m, rank)) @ gauge
  right = rng.normal(size=(n, rank)) @ np.linalg.inv(gauge).T
  params = {
    'lora_a': jnp.asarray(right, dtype),
    'lora_b': jnp.asarray(left.T, dtype),
  }
  return params, jnp.asarray(rng.normal(size=(m, n)), dtype)


def errors(
  condition: float, dtype: jax.typing.DTypeLike
) -> tuple[float, float]:
  """(error of whitened gradients, error of probes), largest over entries.

  Both against ``(I - P_L) G Q_R`` and ``G^T Q_L`` in float64, with the frames
  that both use: what is compared is the way to the coordinates.
  """
  params, dense = problem(condition, dtype)

  def loss(p):
    return jnp.sum((dense.T @ p['lora_b'].T) * p['lora_a'])

  # Gradients in programs of their own: inside of one, XLA may keep in float32
  # what is bfloat16 between two operations.
  grads = jax.jit(jax.grad(loss))(params)
  general = prism_optax.tangent_coordinates(params)(grads)
  probes = contrib.tangent_probes(params)
  attached, pull_back = jax.vjp(probes.attach, probes.zeros)
  (grads,) = pull_back(jax.jit(jax.grad(loss))(attached))
  probed = probes.coordinates(grads)

  factors = fixed_rank.Factors(params['lora_b'].T, params['lora_a'])
  frame = fixed_rank.frame(jax.tree.map(jnp.float32, factors))
  q_left, q_right = np.float64(frame.left), np.float64(frame.right)
  g = np.float64(dense)
  outer = g @ q_right
  want = (outer - q_left @ (q_left.T @ outer)).T, g.T @ q_left

  def error(tree):
    got = np.float64(tree['lora_b']), np.float64(tree['lora_a'])
    size = max(np.abs(x).max() for x in want)
    return max(
      np.abs(x - y).max() / size for x, y in zip(got, want, strict=True)
    )

  return error(general), error(probed)


def measure(arithmetic: str, condition: float) -> dict[str, float]:
  """One row."""
  whitened, probes = errors(condition, jnp.dtype(arithmetic))
  return {'whitened': float(whitened), 'probes': float(probes)}


if __name__ == '__main__':
  runner.main(
    __doc__,
    'probe_accuracy',
    [
      {'arithmetic': arithmetic, 'condition': condition}
      for arithmetic in ('float32', 'bfloat16')
      for condition in CONDITIONS
    ],
    measure,
  )
