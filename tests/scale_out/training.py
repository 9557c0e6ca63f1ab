"""A private training step on any mesh, shared by the programs of the tests.

The parameters are replicated or, each factor along its long axis, sharded; the
batch is sharded. Nothing in the step says how it is laid out.
"""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

import prism_optax

BATCH, WIDTH, MODULES, STEPS = 64, 32, 3, 3
RANK = 4
# Three adaptive steps magnify the rounding of sums in another order: about
# 2e-5 of a leaf's largest entry. Another draw of noise would move it by 1.
ROUNDING = 2e-4
OPTIONS = {
  'l2_clip_norm': 1.0,
  'noise_multiplier': 0.5,
  'expected_batch_size': BATCH,
}


def make_params():
  """Modules of one shape (two would be compiled twice) and a vector."""
  rng = np.random.default_rng(0)

  def factor(*shape):
    return rng.normal(size=shape).astype(np.float32) / 4

  params = {
    f'm{i}': {'lora_a': factor(WIDTH, RANK), 'lora_b': factor(RANK, WIDTH)}
    for i in range(MODULES)
  }
  return params | {'head': np.zeros(WIDTH, np.float32)}


def make_batch(step):
  """Inputs, targets and padding of a step."""
  rng = np.random.default_rng((1, step))
  x, y = rng.normal(size=(2, BATCH, WIDTH)).astype(np.float32)
  return x, y, rng.random(BATCH) < 0.2


def loss(params, x, y):
  for i in range(MODULES):
    x = x + jnp.tanh(x @ params[f'm{i}']['lora_a']) @ params[f'm{i}']['lora_b']
  return jnp.mean((x + params['head'] - y) ** 2)


def gradients(params, x, y):
  return jax.vmap(jax.grad(loss), (None, 0, 0))(params, x, y)


def optimizer_of(name, prng_key=3):
  if name == 'prism':
    return prism_optax.prism(0.05, **OPTIONS, prng_key=prng_key)
  options = {'l2_clip_norms': 1.0, **OPTIONS}
  del options['l2_clip_norm']
  return prism_optax.dp_muon(0.05, **options, prng_key=prng_key)


def step(tx, params, state, x, y, padding):
  """One step, of all the batch."""
  grads = gradients(params, x, y)
  updates, state = tx.update(grads, state, params, is_padding_example=padding)
  return optax.apply_updates(params, updates), state


def sharded_axis(path, leaf, axis='data'):
  """FSDP: factors along the axis that is not the rank."""
  name = jax.tree_util.keystr(path)
  if 'lora_a' in name:
    return PartitionSpec(axis, None)
  if 'lora_b' in name:
    return PartitionSpec(None, axis)
  return PartitionSpec(axis) if leaf.ndim == 1 else PartitionSpec()


def shardings_of(tree, mesh, layout):
  """Of a tree of parameters: 'data' replicates it, 'fsdp' shards it."""
  return jax.tree_util.tree_map_with_path(
    lambda path, leaf: NamedSharding(
      mesh, sharded_axis(path, leaf) if layout == 'fsdp' else PartitionSpec()
    ),
    tree,
  )


def train(tx, mesh=None, layout='data', steps=STEPS):
  """Parameters after some steps, as NumPy arrays, and the last compilation."""
  params = make_params()
  if mesh is None:
    state = tx.init(params)
  else:
    params = jax.device_put(params, shardings_of(params, mesh, layout))
    # The moments lie where `init` puts them; the rest is the same everywhere.
    state = jax.tree.map(
      lambda x: (
        x
        if isinstance(x.sharding, NamedSharding)
        else jax.device_put(x, NamedSharding(mesh, PartitionSpec()))
      ),
      tx.init(params),
    )
  batches = [make_batch(number) for number in range(steps)]
  if mesh is not None:
    batches = jax.device_put(
      batches, NamedSharding(mesh, PartitionSpec('data'))
    )
  where = None if mesh is None else jax.tree.map(lambda x: x.sharding,
                                                 (params, state))  # fmt: skip
  compiled = (
    jax.jit(functools.partial(step, tx), out_shardings=where)
    .lower(params, state, *batches[0])
    .compile()
  )
  for batch in batches:
    params, state = compiled(params, state, *batch)
  return jax.tree.map(np.asarray, params), compiled


COLLECTIVES = (
  'all-gather', 'all-reduce', 'all-to-all', 'collective-permute',
  'reduce-scatter', 'collective-broadcast', 'ragged-all-to-all',
)  # fmt: skip


def collectives(hlo):
  """(kind, number of entries) of every collective in a compiled program."""
  found = []
  kinds = '|'.join(COLLECTIVES)
  for line in hlo.splitlines():
    match = re.search(rf'= (.*?) ({kinds})(-start)?\(', line)
    if match:
      shapes = re.findall(r'\w+\[([\d,]*)\]', match[1])
      sizes = [math.prod(map(int, filter(None, s.split(',')))) for s in shapes]
      found.append((match[2], sum(sizes)))
  return found


def worst_difference(one, other):
  """Largest difference of two trees, relative to the largest entry."""
  return max(
    float(np.max(np.abs(x - y)) / np.max(np.abs(y)))
    for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
  )
