"""Tests of a process with eight devices, which `scale_out_test` starts."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from jax_privacy import noise_addition
from jax_privacy.matrix_factorization import streaming_matrix, toeplitz

import prism_optax
from prism_optax import lora, transforms
from prism_optax.training import Execution, make_private
from tests import cases
from tests.scale_out import training
from tests.scale_out.training import ROUNDING

AUTO, EXPLICIT = jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit
MESH = jax.make_mesh((8,), ('data',), (AUTO,))
ROWS = NamedSharding(MESH, PartitionSpec('data'))
EVERYWHERE = NamedSharding(MESH, PartitionSpec())
PARAMS = training.make_params()
TRAINABLE = sum(x.size for x in jax.tree.leaves(PARAMS))


@functools.cache
def alone(name):
  return training.train(training.optimizer_of(name))


@pytest.mark.parametrize(
  ('name', 'layout', 'kind'),
  [
    *itertools.product(('prism', 'dp_muon'), ('data', 'fsdp'), (AUTO,)),
    ('prism', 'data', EXPLICIT),
  ],
)
def test_eight_devices_give_what_one_gives(name, layout, kind):
  """And no gradient of an example is moved or copied.

  What moves is at most two integers for each trainable entry.
  """
  one, compiled_alone = alone(name)
  mesh = jax.make_mesh((8,), ('data',), (kind,))
  with jax.set_mesh(mesh):
    found, compiled = training.train(training.optimizer_of(name), mesh, layout)
  assert training.worst_difference(found, one) < ROUNDING
  moved = training.collectives(compiled.as_text())
  assert max(size for _, size in moved) <= 2 * TRAINABLE
  if layout == 'data':
    # One sum of everything, and it is the only thing that moves.
    assert moved == [('all-reduce', 2 * TRAINABLE)]
  # An eighth of the examples each: the rest of the memory is small here.
  memory, memory_alone = (
    x.memory_analysis().temp_size_in_bytes for x in (compiled, compiled_alone)
  )
  assert memory < memory_alone / 3


def test_a_program_that_gathers_per_example_gradients_is_seen():
  @functools.partial(jax.jit, out_shardings=EVERYWHERE)
  def gathering(params, x, y):
    grads = training.gradients(params, x, y)
    grads = jax.lax.with_sharding_constraint(grads, EVERYWHERE)
    return jax.tree.map(lambda g: jnp.sort(g, axis=0)[0], grads)

  batch = jax.device_put(training.make_batch(0)[:2], ROWS)
  hlo = gathering.lower(PARAMS, *batch).compile().as_text()
  assert max(size for _, size in training.collectives(hlo)) > 2 * TRAINABLE


def test_one_backward_pass_of_a_sharded_batch_moves_nothing():
  def losses(params, x):
    for i in range(training.MODULES):
      x = x + jnp.tanh(lora.per_example_product(x, **params[f'm{i}']))
    return jnp.mean((x + params['head']) ** 2, -1)

  x = training.make_batch(0)[0]
  gradients = lora.per_example_gradients(losses)
  expected = jax.tree.map(np.asarray, jax.jit(gradients)(PARAMS, x))
  sharded = jax.jit(gradients, out_shardings=ROWS)
  args = jax.device_put(PARAMS, EVERYWHERE), jax.device_put(x, ROWS)
  found = jax.tree.map(np.asarray, sharded(*args))
  assert training.worst_difference(found, expected) < 1e-6
  assert not training.collectives(sharded.lower(*args).compile().as_text())


def test_the_same_step_written_for_each_device():
  """By ``shard_map`` and ``psum``."""
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

  # Where a step leaves them: else the second one would be compiled anew.
  params, state = jax.device_put((PARAMS, tx.init(PARAMS)), EVERYWHERE)
  for number in range(training.STEPS):
    params, state = step(params, state, *training.make_batch(number))
  found = jax.tree.map(np.asarray, params)
  assert training.worst_difference(found, alone('prism')[0]) < ROUNDING
  for leaf in jax.tree.leaves(params):
    first, *others = (np.asarray(s.data) for s in leaf.addressable_shards)
    assert all(np.array_equal(first, x) for x in others)


@pytest.mark.parametrize('impl', ['threefry2x32', 'rbg'])
def test_noise_is_the_same_on_every_mesh(impl):
  """Also for a key of the hardware generator: it only seeds the draws."""
  zeros = jax.tree.map(jnp.zeros_like, PARAMS)
  tx = prism_optax.tangent_privatizer(
    1.0, prng_key=jax.random.key(11, impl=impl)
  )
  draw = jax.jit(lambda params, state: tx.update(zeros, state, params)[0])
  found, plane = [], jax.make_mesh((2, 4), ('other', 'data'), (AUTO,) * 2)
  for mesh in (None, MESH, plane):
    params, state = PARAMS, tx.init(PARAMS)
    if mesh is not None:
      shardings = training.shardings_of(params, mesh, 'fsdp')
      params = jax.device_put(params, shardings)
      state = jax.device_put(state, NamedSharding(mesh, PartitionSpec()))
    found.append(jax.tree.map(np.asarray, draw(params, state)))
  for x in found:
    # The head is not projected: bits. The rest is, in another order.
    np.testing.assert_array_equal(x['head'], found[0]['head'])
    assert training.worst_difference(x, found[0]) < 1e-5
  values = np.concatenate(jax.tree.leaves(found[2]), None)
  assert len(np.unique(values)) == values.size
  # The default: 128 bits, split by Threefry.
  key = prism_optax.tangent_privatizer(1.0).init(PARAMS).inner
  assert str(jax.random.key_impl(key)) == 'rbg'
  assert jax.config.jax_threefry_partitionable


@functools.cache
def trained(sharding, size):
  """By `make_private`: how batches lie, and the parameters."""
  data = np.random.default_rng(2).normal(size=(2, 256, training.WIDTH))
  private = make_private(
    training.loss, PARAMS, optimizer=optax.sgd(0.1),
    # Noise is another one where numbers are rounded in another way.
    **training.OPTIONS | {'noise_multiplier': 0.0},
    dataset_size=256, steps=2, delta=1e-4, prng_key=3,
    execution=Execution(size, 128, sharding),
  )  # fmt: skip
  state = private.init(PARAMS)
  for batch in private.batches(state, tuple(data.astype(np.float32))):
    state = private.step(state, batch)
  return batch.examples[0].sharding, jax.tree.map(np.asarray, state.params)


@pytest.mark.parametrize(
  ('kind', 'size'), [*itertools.product((AUTO, EXPLICIT), (None, 32))]
)
def test_a_private_training_with_sharded_batches(kind, size):
  mesh = jax.make_mesh((8,), ('data',), (kind,))
  rows = NamedSharding(mesh, PartitionSpec('data'))
  sharding, found = trained(rows, size)
  assert sharding == rows
  assert training.worst_difference(found, trained(None, None)[1]) < 1e-5


# Correlated noise: a plain module and a stack of two, a vector beside them.
SHAPE = M, N, R = 24, 16, 3
ONE, *LAYERS = (cases.adapters([SHAPE], seed, extra=N) for seed in range(3))
MIXED = ONE | {
  'm1': jax.tree.map(lambda *x: np.stack(x), *(x['m0'] for x in LAYERS))
}
SPECS = {
  name: {
    'lora_a': PartitionSpec(*lead, 'data', None),
    'lora_b': PartitionSpec(*lead, None, 'data'),
  }
  for name, lead in (('m0', ()), ('m1', (None,)))
} | {'extra': PartitionSpec('data')}
COEFS = toeplitz.optimal_max_error_strategy_coefs(3)
NOISING = {
  'gaussian': streaming_matrix.identity(),
  'dense': np.linalg.inv(toeplitz.materialize_lower_triangular(COEFS)),
  'banded': toeplitz.inverse_as_streaming_matrix(COEFS[:2]),
}
STRATEGIES = noise_addition.SupportedStrategies
BY_HAND = 'banded', STRATEGIES.ZERO  # Buffers that lie on explicit axes alone.


def on_mesh(mesh, tree):
  return jax.tree.map(
    lambda x, s: jax.device_put(x, NamedSharding(mesh, s)), tree, SPECS
  )


def correlated(name, strategy):
  """The noise, and the privatizer of jax-privacy in it."""

  def make(key):
    return noise_addition.matrix_factorization_privatizer(
      NOISING[name], stddev=0.5, prng_key=key, intermediate_strategy=strategy
    )

  tx = prism_optax.correlated_tangent_privatizer(make, steps=3, prng_key=1)
  return tx, make(jax.random.key(1))


def init_and_update(kind, name, strategy):
  """On explicit axes geometry is for the compiler."""

  def auto(init, update):
    return (
      jax.sharding.auto_axes(init, out_sharding=PartitionSpec()),
      jax.sharding.auto_axes(update, out_sharding=(SPECS, PartitionSpec())),
    )

  tx, outer = correlated(name, strategy)
  if kind == AUTO:
    return tx.init, tx.update
  if (name, strategy) != BY_HAND:
    return auto(tx.init, tx.update)
  init, update, _ = transforms.augmented_optimizer(optax.identity())
  start, after_noise = auto(init, update)

  def beside(signal, state, params):
    noisy, inner = outer.update(signal, state[1])
    # The parameters stay.
    return after_noise(noisy, state[0], params)[0], (state[0], inner)

  return lambda params: (start(params), outer.init(params)), beside


@pytest.mark.parametrize(
  ('kind', 'name', 'strategy'),
  [
    (kind, *x)
    for kind in (AUTO, EXPLICIT)
    for x in itertools.product(NOISING, STRATEGIES)
    # Dense noise has no buffers: the way without correlation is taken.
    if (x != BY_HAND if kind == AUTO else x[0] != 'dense')
  ],
)
def test_correlated_noise_is_drawn_once_and_lies_as_parameters_do(
  kind, name, strategy
):
  mesh = jax.make_mesh((8,), ('data',), (kind,))
  tenth = jax.tree.map(lambda x: np.full_like(x, 0.1), MIXED)
  silent = prism_optax.tangent_privatizer(0.0, prng_key=0)
  bare, _ = jax.jit(silent.update)(tenth, silent.init(MIXED), MIXED)
  drawn = []
  with jax.set_mesh(mesh):
    init, update = init_and_update(kind, name, strategy)
    params, signal = on_mesh(mesh, MIXED), on_mesh(mesh, tenth)
    zeros = jax.tree.map(jnp.zeros_like, params)
    state, step = jax.jit(init)(params), jax.jit(update)
    for _ in range(3):
      noise, _ = step(zeros, state, params)
      # The same noise on another signal: their difference is bare.
      noisy, state = step(signal, state, params)
      found = jax.tree.map(np.subtract, *map(jax.device_get, (noisy, noise)))
      cases.assert_close(found, bare, 2e-6)
      for x, y in zip(*map(jax.tree.leaves, (noise, signal)), strict=True):
        assert x.sharding.is_equivalent_to(y.sharding, x.ndim)
      drawn.append(np.concatenate(jax.tree.leaves(noise), None))
  # Drawn once, not once for each device: no value comes twice.
  assert len(np.unique(drawn)) == np.size(drawn)
  kept = 3 * ((M + N) * R - R * R) + N
  stddevs = transforms.correlated_noise_stddev(NOISING[name], 0.5, 3)
  ratios = np.sum(np.square(drawn), 1) / np.square(stddevs) / kept
  assert np.abs(ratios - 1).max() < 5 * np.sqrt(2 / kept)


def test_buffers_that_are_sharded_by_hand_need_explicit_axes():
  tx, _ = correlated(*BY_HAND)
  with jax.set_mesh(MESH), pytest.raises(ValueError, match='Auto'):
    jax.jit(tx.init)(on_mesh(MESH, MIXED))
