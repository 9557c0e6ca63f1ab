"""One of several processes that train together.

    python -m tests.scale_out.two_processes PORT PROCESSES INDEX OUTPUT

Writes the final parameters, and the seed that ``prng_key=None`` took.
"""

import sys

import jax
import numpy as np

from tests.scale_out import training


def main():
  port, processes, index, output = sys.argv[1:]
  processes, index = int(processes), int(index)
  if processes > 1:
    jax.config.update('jax_cpu_collectives_implementation', 'gloo')
    jax.distributed.initialize(
      f'localhost:{port}', num_processes=processes, process_id=index
    )
  assert jax.device_count() == 8
  mesh = jax.make_mesh((8,), ('data',), (jax.sharding.AxisType.Auto,))
  everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
  rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec('data'))
  tx = training.optimizer_of('prism')
  params = training.make_params()
  state = tx.init(params)
  step = jax.jit(
    lambda *args: training.step(tx, *args),
    in_shardings=(everywhere, everywhere, rows, rows, rows),
    out_shardings=everywhere,
  )
  for number in range(training.STEPS):
    # Each process has its own part of the batch, and nothing of the others'.
    batch = [
      jax.make_array_from_process_local_data(
        rows, np.split(x, processes)[index]
      )
      for x in training.make_batch(number)
    ]
    params, state = step(params, state, *batch)
  local = jax.tree.map(lambda x: np.asarray(x.addressable_data(0)), params)

  # Without a key: one seed for all, from the operating system.
  fresh = training.optimizer_of('prism', prng_key=None).init(local)
  seed = jax.random.key_data(fresh[1].inner)
  np.savez(
    output,
    seed=np.asarray(seed),
    **{jax.tree_util.keystr(p): x
       for p, x in jax.tree_util.tree_flatten_with_path(local)[0]},
  )  # fmt: skip


if __name__ == '__main__':
  main()
