"""One small regression that all tests of private trainings share."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from prism_optax import training

N, B = 200, 20
_rng = np.random.default_rng(0)
FROZEN = _rng.normal(size=(6, 4)).astype(np.float32)
PARAMS = {
  'head': jnp.zeros(4),
  'layer': {
    'lora_a': jnp.asarray(_rng.normal(size=(6, 2)), jnp.float32),
    'lora_b': jnp.asarray(_rng.normal(size=(2, 4)), jnp.float32),
  },
}
DATA = (
  _rng.normal(size=(N, 6)).astype(np.float32),
  _rng.normal(size=(N, 4)).astype(np.float32),
)
RECORD = (
  jax.ShapeDtypeStruct((6,), 'float32'),
  jax.ShapeDtypeStruct((4,), 'float32'),
)


def loss(params, frozen, x, y):
  """Squared error of one record."""
  pair = params['layer']
  z = x @ frozen + x @ pair['lora_a'] @ pair['lora_b'] + params['head']
  return jnp.sum((z - y) ** 2)


def make(optimizer, **options):
  """A training of three steps with known keys, unless told otherwise."""
  constants = {
    'l2_clip_norm': 1.0,
    'expected_batch_size': B,
    'dataset_size': N,
    'steps': 3,
    'delta': 1e-4,
    'noise_multiplier': 1.0,
    'prng_key': 7,
  }
  return training.make_private(
    options.pop('loss', loss),
    options.pop('params', PARAMS),
    optimizer=optimizer,
    **constants | options,
  )


def trained(private, state=None, data=DATA, frozen=FROZEN, **options):
  """The state after the steps that are left."""
  state = private.init(PARAMS) if state is None else state
  for batch in private.batches(state, data, **options):
    state = private.step(state, batch, frozen)
  return state


def by_keys_alone(private, data=DATA):
  """The parameters after all steps, with noise that is blind to the program.

  So two programs with the same keys can be compared.
  """
  state = private.init(PARAMS)
  params, optimizer = state.params, state.optimizer
  for batch in private.batches(state, data):
    params, optimizer, _ = private._step(
      params,
      optimizer,
      FROZEN,
      batch.examples,
      batch.is_padding_example,
      batch.is_present,
    )
  return params


@functools.cache
def gradients():
  """Per-record gradients of the start, NumPy, leaves (N, *shape)."""
  of_all = jax.jit(jax.vmap(jax.grad(loss), (None, None, 0, 0)))
  return jax.tree.map(np.asarray, of_all(PARAMS, FROZEN, *DATA))


def assert_same_bits(one, other):
  for x, y in zip(*map(jax.tree.leaves, (one, other)), strict=True):
    np.testing.assert_array_equal(x, y)
