"""A private step on 64 and 256 chips, by the compiler and without a chip.

    pip install --no-deps libtpu
    python -m benchmarks.speed.at_scale [--only 4b]
    python -m benchmarks.speed.at_scale --table

Decoders with the shapes of Gemma 3, adapters of rank 16 on five matrices of
each layer, compiled ahead of time for slices of TPU v5e. Frozen weights are
split over groups of chips, batches over the groups. Non-private AdamW, and
``prism`` with its clip, part by part: one example on each group at a time. For
each step what a chip has to hold, and what chips tell one another. All arrays
are abstract. Rows go to ``benchmarks/results/at_scale.json`` as they are
finished, a few minutes each, and are not computed twice.
"""

import os
from typing import Any

# None is there: none is looked for.
os.environ |= {'TPU_SKIP_MDS_QUERY': '1', 'JAX_PLATFORMS': 'cpu'}

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

import prism_optax
from benchmarks.common import hlo, runner
from benchmarks.speed import decoder
from prism_optax import lora

RANK, LENGTH = 16, 1024
# Examples of a batch for each group of chips, one after the other.
PARTS = 4
LAYOUT = lora.Layout(a_stack_axes=(0,), b_stack_axes=(0,))
SHAPES = {
  '4b': decoder.Shape(
    34, 2560, 8, 4, 256, 10240, 262_144, LENGTH, 0, 0, jnp.bfloat16
  ),
  '27b': decoder.Shape(
    62, 5376, 32, 16, 128, 21504, 262_144, LENGTH, 0, 0, jnp.bfloat16
  ),
}
# Chips that share the weights.
GROUP = {'4b': 4, '27b': 8}
TOPOLOGY = {64: 'v5e:8x8', 256: 'v5e:16x16'}
METHODS = ('adamw, not private', 'prism')


def mesh_of(chips: int, group: int) -> jax.sharding.Mesh:
  """Chips as (groups, chips of a group)."""
  topology = topologies.get_topology_desc(
    platform='tpu',
    topology_name=TOPOLOGY[chips],
    chips_per_host_bounds=(2, 2, 1),
  )
  devices = np.asarray(topology.devices).reshape(-1, group)
  return jax.sharding.Mesh(devices, ('data', 'model'))


def split_weights(mesh: jax.sharding.Mesh, weights: Any) -> Any:
  """Matrices by heads and inner units, embeddings by words."""

  def spec(path: Any, leaf: Any) -> PartitionSpec:
    name = path[-1].key
    if name == 'words':
      return PartitionSpec('model')
    if leaf.ndim < 3:
      return PartitionSpec()
    axis = 1 if name in ('output', 'down') else 2
    return PartitionSpec(*[None] * axis, 'model')

  return jax.tree.map_with_path(
    lambda path, leaf: _placed(leaf, mesh, *spec(path, leaf)), weights
  )


def _placed(leaf: Any, mesh: jax.sharding.Mesh, *spec: Any) -> Any:
  return jax.ShapeDtypeStruct(
    leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, PartitionSpec(*spec))
  )


def plain_step(shape: decoder.Shape, mesh: jax.sharding.Mesh):
  """AdamW on the mean of the batch, a part at a time."""
  adamw, gradient = optax.adamw(1e-3), jax.grad(decoder.make_loss(shape))

  def step(params, state, frozen, tokens):
    # Every so-many-th row, so that each group has its share of a part.
    parts = tokens.reshape(mesh.shape['data'], PARTS, -1).swapaxes(0, 1)
    total, _ = jax.lax.scan(
      lambda total, x: (optax.tree.add(total, gradient(params, frozen, x)), 0),
      optax.tree.zeros_like(params),
      parts,
    )
    mean = optax.tree.scale(1 / PARTS, total)
    updates, state = adamw.update(mean, state, params)
    return optax.apply_updates(params, updates), state

  return adamw.init, step


def private_step(shape: decoder.Shape, mesh: jax.sharding.Mesh):
  """Gradients of one example on each group at a time, clipped and added."""
  groups = mesh.shape['data']
  tx = prism_optax.prism(
    1e-3,
    l2_clip_norm=1.0,
    noise_multiplier=1.0,
    expected_batch_size=groups * PARTS,
    prng_key=jax.random.key(0),
    layout=LAYOUT,
  )
  loss = decoder.make_loss(shape)

  def of_one(params, example, frozen):
    return loss(params, frozen, example[None])

  def gradients(params, tokens, frozen):
    found = jax.vmap(jax.grad(of_one), (None, 0, None))(params, tokens, frozen)
    # All of an example's gradient is on every chip of its group. Otherwise the
    # compiler would split the update's small matrices as the weights are.
    return jax.lax.with_sharding_constraint(
      found, NamedSharding(mesh, PartitionSpec('data'))
    )

  in_parts = lora.in_microbatches(gradients, groups)

  def step(params, state, frozen, tokens):
    updates, state = tx.update(in_parts(params, tokens, frozen), state, params)
    return optax.apply_updates(params, updates), state

  return tx.init, step


def measure(model: str, chips: int, method: str) -> dict[str, Any]:
  """One row. Bytes are of one chip; gigabytes are 10^9 of them."""
  shape, group = SHAPES[model], GROUP[model]
  mesh, groups = mesh_of(chips, group), chips // group
  make = private_step if method == 'prism' else plain_step
  init, step = make(shape, mesh)
  params = jax.eval_shape(
    lambda key: decoder.adapters(shape, RANK, key), jax.random.key(0)
  )
  frozen = jax.eval_shape(
    lambda key: decoder.weights(shape, key), jax.random.key(0)
  )
  everywhere = jax.tree.map(
    lambda x: _placed(x, mesh), (params, jax.eval_shape(init, params))
  )
  tokens = jax.ShapeDtypeStruct((groups * PARTS, LENGTH + 1), jnp.int32)
  lowered = jax.jit(
    step,
    donate_argnums=(0, 1),
    out_shardings=jax.tree.map(lambda x: x.sharding, everywhere),
  ).lower(
    *everywhere, split_weights(mesh, frozen), _placed(tokens, mesh, 'data')
  )
  compiled = lowered.compile()
  memory, text = compiled.memory_analysis(), compiled.as_text()
  moved = hlo.collectives(text)
  # The loops are one over the parts of a batch, and in it over the layers.
  rounds = 1, PARTS, PARTS * shape.layers
  places: dict[str, dict[str, float]] = {}
  for each in moved:
    place = places.setdefault(
      ('a step', 'a part', 'a layer')[each.loops],
      {'collectives': 0, 'GB': 0.0, 'largest GB': 0.0, 'GB of a step': 0.0},
    )
    size = each.bytes / 1e9
    place['collectives'] += 1
    place['GB'] += size
    place['largest GB'] = max(place['largest GB'], size)
    place['GB of a step'] += size * rounds[each.loops]
  sizes = [sum(x.size for x in jax.tree.leaves(y)) for y in (frozen, params)]
  return {
    'chips of a group': group,
    'frozen, billions': sizes[0] / 1e9,
    'trained, millions': sizes[1] / 1e6,
    'factors GB': 4 * sizes[1] / 1e9,
    'arguments GB': memory.argument_size_in_bytes / 1e9,
    'temporary GB': memory.temp_size_in_bytes / 1e9,
    'once in': places,
  }


def show(rows: list[dict[str, Any]]) -> str:
  """The rows as Markdown, in 10^9 bytes of one chip."""
  lines = []
  for row in rows:
    at = [row['once in'].get(x, {}) for x in ('a layer', 'a part', 'a step')]
    once = [f'{x.get("GB", 0.0):.3f}' for x in at]
    total = sum(x.get('GB of a step', 0.0) for x in at)
    sizes = (f'{row[f"{x} GB"]:.2f}' for x in ('arguments', 'temporary'))
    lines.append(
      [row['model'], row['chips'], row['method'], *sizes,
       f'{row["factors GB"]:.3f}', *once, f'{total:.1f}']
    )  # fmt: skip
  head = [
    'model', 'chips', 'method', 'arguments', 'temporary', 'factors',
    'told to others in a layer', 'in a part', 'in a step', 'in all',
  ]  # fmt: skip
  return runner.markdown(head, lines)


if __name__ == '__main__':
  runner.main(
    __doc__,
    'at_scale',
    [
      {'model': model, 'chips': chips, 'method': method}
      for model in SHAPES
      for chips in TOPOLOGY
      for method in METHODS
    ],
    measure,
    show=show,
    by_device=False,
  )
