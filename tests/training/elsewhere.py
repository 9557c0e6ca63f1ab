"""One step of a run, saved before it, in a process of its own.

Usage: python -m tests.training.elsewhere FOLDER begin|again [journal]
"""

import json
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tests import cases

SIZE = 1000


def loss(params, frozen, x, y):
  return 0.0 * (jnp.sum(params) * frozen * x[0] + y[0])


def main(folder, what, *options):
  folder = pathlib.Path(folder)
  made = cases.make(
    optax.sgd(1.0),
    loss=loss,
    params=jnp.zeros(SIZE),
    prng_key=None,
    journal=folder / 'journal' if options else None,
  )
  file = folder / 'state.npz'
  state = made.init(jnp.zeros(SIZE))
  leaves, treedef = jax.tree.flatten(state)
  is_key = [jnp.issubdtype(x.dtype, jax.dtypes.prng_key) for x in leaves]
  if what == 'begin':
    bare = [
      jax.random.key_data(x) if k else x
      for x, k in zip(leaves, is_key, strict=True)
    ]
    np.savez(file, *map(np.asarray, bare))
  stored = np.load(file)
  leaves = [
    jax.random.wrap_key_data(x, impl=jax.random.key_impl(like)) if k else x
    for x, like, k in zip(stored.values(), leaves, is_key, strict=True)
  ]
  state = jax.tree.unflatten(treedef, leaves)
  try:
    batch = next(iter(made.batches(state, cases.DATA)))
    state = made.step(state, batch, jnp.ones(()))
  except ValueError as error:
    print(json.dumps({'refused': str(error)}))
    return
  noise = np.asarray(state.params, np.float64).tolist()
  releases = made._owner.count().releases
  print(
    json.dumps(
      {'noise': noise, 'releases': releases, 'epsilon': made.epsilon()}
    )
  )


if __name__ == '__main__':
  main(*sys.argv[1:])
