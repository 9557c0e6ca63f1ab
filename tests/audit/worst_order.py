"""Records whose float sum one of them moves by several clip norms.

The first half are ones, which add up to a power of two, 2^k, with the canary
alone: above it floats lie twice as far apart. Each of the second half takes
away one float's distance below 2^k. Above, this is half a distance, and is
rounded back to where the sum was: the two sums drift apart.

    python -m tests.audit.worst_order

prints what the exact sums of 65,536 of them are, on the devices that it finds.
"""

import hashlib
import json

import jax
import jax.numpy as jnp
import numpy as np

from tests.core import seams

COUNT, ORDERS, STDDEV = 65_536, 10, 4.0


def records(count):
  """(count, 2) of norm about one at most; the canary comes first."""
  half = count // 2
  distance = 2.0 ** (np.log2(half) - 24)
  x = np.zeros((count, 2), np.float32)
  x[:half, 0] = 1
  x[half, 0] = 4 * distance
  x[half + 1 :, 0] = -distance
  # And something that does not fit between the others.
  x[:, 1] = 1e-3 * np.random.default_rng(0).normal(size=count)
  return x


def float_sum_moves_by(count):
  """How far the canary moves a sum that is taken in turn."""
  x = records(count)[:, 0]
  with_it, without = (np.cumsum(y, dtype=np.float32)[-1] for y in (x, x[1:]))
  return float(with_it - without)


def _exact_sum(rows, absent):
  return seams.exact_sum(rows, absent, jnp.float32(STDDEV))


def exact_sums():
  """What 65,536 records add up to in several orders, with and without jit.

  The batch is spread over the devices. Without the canary it counts as padding.
  """
  auto = jax.sharding.AxisType.Auto
  mesh = jax.make_mesh((jax.device_count(),), ('data',), (auto,))
  rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec('data'))
  x, canary = records(COUNT), np.arange(COUNT) == 0
  compiled, found, moves = jax.jit(_exact_sum), set(), []
  for seed in range(ORDERS):
    order = np.arange(COUNT)
    if seed:
      order = np.random.default_rng(seed).permutation(COUNT)
    present = jax.device_put((x[order], np.zeros(COUNT, bool)), rows)
    without = jax.device_put((x[order], canary[order]), rows)
    for run in (compiled, _exact_sum):
      total, less = run(*present), run(*without)
      sums = [seams.integers_of(x) for x in (total, less)]
      moved = np.linalg.norm(np.subtract(*sums))
      moves.append(float(moved * np.float64(total.unit)))
      found.add(hashlib.sha256(np.stack(sums).tobytes()).hexdigest())
  return {'sums': sorted(found), 'moves': [min(moves), max(moves)]}


if __name__ == '__main__':
  print(json.dumps({'devices': jax.device_count(), **exact_sums()}))
