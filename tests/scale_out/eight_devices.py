"""Prints what eight host devices do, one JSON object a line."""

import functools
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

import prism_optax
from prism_optax import lora
from prism_optax.training import Execution, make_private
from tests.scale_out import training

AUTO = jax.sharding.AxisType.Auto
MESH = jax.make_mesh((8,), ('data',), (AUTO,))
EXPLICIT = jax.make_mesh((8,), ('data',), (jax.sharding.AxisType.Explicit,))


def report(**values):
  print(json.dumps(values), flush=True)


def layouts():
  """One device, then replicated and sharded parameters on eight."""
  for name in ('prism', 'dp_muon'):
    tx = training.optimizer_of(name)
    one, alone = training.train(tx)
    cases = [(MESH, 'data'), (MESH, 'fsdp')]
    if name == 'prism':
      cases.append((EXPLICIT, 'data'))
    for mesh, layout in cases:
      with jax.set_mesh(mesh):
        found, compiled = training.train(tx, mesh, layout)
      report(
        kind='layout',
        name=f'{name}, {layout}, {mesh.axis_types[0].name}',
        difference=training.worst_difference(found, one),
        collectives=training.collectives(compiled.as_text()),
        temporary=compiled.memory_analysis().temp_size_in_bytes,
        temporary_alone=alone.memory_analysis().temp_size_in_bytes,
      )
    if name == 'prism':
      expected = one
  return expected


def planted():
  """A program that does gather per-example gradients: it must be seen."""
  rows = NamedSharding(MESH, PartitionSpec('data'))
  everywhere = NamedSharding(MESH, PartitionSpec())

  @functools.partial(jax.jit, out_shardings=everywhere)
  def gathering(params, x, y):
    grads = training.gradients(params, x, y)
    grads = jax.lax.with_sharding_constraint(grads, everywhere)
    return jax.tree.map(lambda g: jnp.sort(g, axis=0)[0], grads)

  batch = jax.device_put(training.make_batch(0)[:2], rows)
  hlo = gathering.lower(training.make_params(), *batch).compile().as_text()
  report(kind='planted', collectives=training.collectives(hlo))


def one_backward_pass():
  """Gradients of all examples of a sharded batch."""
  rows = NamedSharding(MESH, PartitionSpec('data'))

  def losses(params, x):
    for i in range(training.MODULES):
      x = x + jnp.tanh(lora.per_example_product(x, **params[f'm{i}']))
    return jnp.mean((x + params['head']) ** 2, -1)

  params, x = training.make_params(), training.make_batch(0)[0]
  gradients = lora.per_example_gradients(losses)
  expected = jax.tree.map(np.asarray, jax.jit(gradients)(params, x))
  sharded = jax.jit(gradients, out_shardings=rows)
  args = jax.device_put(params, NamedSharding(MESH, PartitionSpec()))
  args = args, jax.device_put(x, rows)
  found = jax.tree.map(np.asarray, sharded(*args))
  hlo = sharded.lower(*args).compile().as_text()
  report(
    kind='one backward pass',
    collectives=training.collectives(hlo),
    difference=training.worst_difference(found, expected),
  )


def manual(expected):
  """The same step written for each device: ``shard_map`` and ``psum``."""
  clip = prism_optax.intrinsic_clip(1.0, normalize_by=training.BATCH)
  tx = prism_optax.prism(
    0.05, **training.OPTIONS, per_example_gradients=False, prng_key=3
  )

  @jax.jit
  @functools.partial(
    jax.shard_map,
    mesh=MESH,
    in_specs=(PartitionSpec(), PartitionSpec(), *[PartitionSpec('data')] * 3),
    out_specs=PartitionSpec(),
    # Branches and loops over replicated values confuse the check.
    check_vma=False,
  )
  def step(params, state, x, y, padding):
    grads = training.gradients(params, x, y)
    part, _ = clip.update(
      grads, optax.EmptyState(), params, is_padding_example=padding
    )
    # One sum over all devices; the noise after it, with the same key on all.
    mean = jax.lax.psum(part, 'data')
    updates, state = tx.update(mean, state, params)
    return optax.apply_updates(params, updates), state

  params = training.make_params()
  state = tx.init(params)
  for number in range(training.STEPS):
    params, state = step(params, state, *training.make_batch(number))
  copies = [
    np.concatenate([np.ravel(s.data) for s in leaf.addressable_shards])
    for leaf in jax.tree.leaves(params)
  ]
  report(
    kind='shard_map',
    name='shard_map',
    difference=training.worst_difference(
      jax.tree.map(np.asarray, params), expected
    ),
    same_on_all=all(
      np.array_equal(x.reshape(8, -1), np.tile(x.reshape(8, -1)[:1], (8, 1)))
      for x in copies
    ),
  )


def noise():
  """The draws, for meshes and kinds of keys."""
  zeros = jax.tree.map(jnp.zeros_like, training.make_params())
  for impl in ('threefry2x32', 'rbg'):
    key = jax.random.key(11, impl=impl)
    tx = prism_optax.tangent_privatizer(1.0, prng_key=key)

    @jax.jit
    def draw(params, state, tx=tx):
      return tx.update(zeros, state, params)

    found = []
    for mesh, layout in (
      (None, ''),
      (MESH, 'fsdp'),
      (jax.make_mesh((2, 4), ('other', 'data'), (AUTO, AUTO)), 'fsdp'),
    ):
      params = training.make_params()
      state = tx.init(params)
      if mesh is not None:
        params = jax.device_put(
          params, training.shardings_of(params, mesh, layout)
        )
        state = jax.device_put(state, NamedSharding(mesh, PartitionSpec()))
      drawn, _ = draw(params, state)
      found.append(jax.tree.map(np.asarray, drawn))
    values = np.concatenate([np.ravel(x) for x in jax.tree.leaves(found[2])])
    report(
      kind='noise',
      impl=impl,
      # The head is not projected: bits. The rest is, in another order.
      heads_equal=all(np.array_equal(x['head'], found[0]['head'])
                      for x in found),
      difference=max(training.worst_difference(x, found[0]) for x in found),
      distinct=len(np.unique(values)) == values.size,
    )  # fmt: skip
  state = prism_optax.tangent_privatizer(1.0).init(training.make_params())
  report(
    kind='default',
    impl=str(jax.random.key_impl(state.inner)),
    partitionable=bool(jax.config.jax_threefry_partitionable),
  )


def one_call():
  """A private training whose batches are sharded, in micro-batches or not."""
  data = np.random.default_rng(2).normal(size=(2, 256, training.WIDTH))

  def trained(sharding, size):
    private = make_private(
      training.loss,
      training.make_params(),
      optimizer=optax.sgd(0.1),
      # Noise is another one where numbers are rounded in another way.
      **training.OPTIONS | {'noise_multiplier': 0.0},
      dataset_size=256,
      steps=2,
      delta=1e-4,
      execution=Execution(size, 128, sharding),
      prng_key=3,
    )
    state = private.init(training.make_params())
    for batch in private.batches(state, tuple(data.astype(np.float32))):
      state = private.step(state, batch)
    return batch.examples[0].sharding, jax.tree.map(np.asarray, state.params)

  _, expected = trained(None, None)
  for mesh, size in itertools.product((MESH, EXPLICIT), (None, 32)):
    rows = NamedSharding(mesh, PartitionSpec('data'))
    sharding, found = trained(rows, size)
    report(
      kind='make_private',
      sharded=sharding == rows,
      difference=training.worst_difference(found, expected),
    )


if __name__ == '__main__':
  manual(layouts())
  planted()
  one_backward_pass()
  noise()
  one_call()
