"""Trees, gradients and one small private training that the tests share."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prism_optax import training
from tests.core import seams
from tests.oracles import oracles

# Trees of modules ``Z = left @ right.T``, and a trainable vector beside them.


def adapters(shapes, seed=0, *, extra=5, condition=1.0, dtype=jnp.float32):
  """Random factors of modules (m, n, r), and a vector of ones, on the host."""
  rng = np.random.default_rng(seed)
  factors = [oracles.random_factors(rng, *x, condition) for x in shapes]
  return jax.device_get(tree_of(factors, np.ones(extra), dtype))


def normal(like, seed, *, lead=(), scale=1.0, dtype=None):
  """Normal entries in the shapes of a tree, with axes before, on the host."""
  rng = np.random.default_rng(seed)
  return jax.tree.map(
    lambda x: np.asarray(
      scale * rng.standard_normal((*lead, *x.shape)), dtype or x.dtype
    ),
    like,
  )


def tree_of(factors, extra=None, dtype=jnp.float64):
  """{'m0': {'lora_a', 'lora_b'}, ..., 'extra'} of a list of (left, right)."""
  tree = {
    f'm{i}': {
      'lora_a': jnp.asarray(right, dtype),
      'lora_b': jnp.asarray(np.swapaxes(left, -1, -2), dtype),
    }
    for i, (left, right) in enumerate(factors)
  }
  if extra is not None:
    tree['extra'] = jnp.asarray(extra, dtype)
  return tree


def factors_of(tree):
  """The inverse of :func:`tree_of`: [(left, right), ...], traced or not."""

  def host(x):
    return x if isinstance(x, jax.core.Tracer) else np.asarray(x)

  return [
    (host(x['lora_b']).swapaxes(-1, -2), host(x['lora_a']))
    for name, x in sorted(tree.items())
    if name != 'extra'
  ]


def products_of(tree):
  """[Z, ...] in float64."""
  return [
    np.float64(left) @ np.swapaxes(np.float64(right), -1, -2)
    for left, right in factors_of(tree)
  ]


def factor_gradients(factors, dense, extra=None, dtype=jnp.float64):
  """The tree of gradients that gradients (..., m, n) in Z give."""
  pairs = [
    (g @ right, np.swapaxes(g, -1, -2) @ left)
    for (left, right), g in zip(factors, dense, strict=True)
  ]
  return tree_of(pairs, extra, dtype)


def random_problem(rng, shapes, batch, condition=1.0):
  """Factors and per-example dense gradients for modules (m, n, r)."""
  factors = [oracles.random_factors(rng, *s, condition) for s in shapes]
  dense = [rng.normal(size=(batch, m, n)) for m, n, _ in shapes]
  return factors, dense


# Cases of tests.


def fast_first(names, fast, every, **options):
  """Parametrizes a test, whose cases that are not `fast` are slow."""
  return pytest.mark.parametrize(
    names,
    [
      pytest.param(
        *(x if isinstance(x, tuple) else [x]),
        marks=() if x in fast else pytest.mark.slow,
      )
      for x in every
    ],
    **options,
  )


# Comparisons of trees.


def assert_same_bits(found, expected):
  for x, y in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
    np.testing.assert_array_equal(x, y)


def assert_close(found, expected, atol, rtol=0.0):
  for x, y in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
    np.testing.assert_allclose(x, y, atol=atol, rtol=rtol)


def norm(tree):
  """Euclidean, in float64 on the host."""
  return float(
    np.sqrt(sum(np.sum(np.float64(x) ** 2) for x in jax.tree.leaves(tree)))
  )


# States on the host, as a checkpoint has them.


def saved(tree):
  """Arrays of NumPy, of keys their words."""

  def host(x):
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return np.array(jax.random.key_data(x) if is_key else x)

  return jax.tree.map(host, tree)


def restored(tree, like):
  """The inverse of :func:`saved`."""

  def device(x, like):
    if isinstance(like, np.ndarray):
      return x
    if jnp.issubdtype(like.dtype, jax.dtypes.prng_key):
      return jax.random.wrap_key_data(x, impl=jax.random.key_impl(like))
    return jnp.array(x)

  return jax.tree.map(device, tree, like)


# One small regression for private trainings.

N, B = 200, 20
_rng = np.random.default_rng(0)
FROZEN = _rng.normal(size=(6, 4)).astype(np.float32)
PARAMS = {
  'head': np.zeros(4, np.float32),
  'layer': {
    'lora_a': _rng.normal(size=(6, 2)).astype(np.float32),
    'lora_b': _rng.normal(size=(2, 4)).astype(np.float32),
  },
}
DATA = (
  _rng.normal(size=(N, 6)).astype(np.float32),
  _rng.normal(size=(N, 4)).astype(np.float32),
)
struct = jax.ShapeDtypeStruct
RECORD = struct((6,), 'float32'), struct((4,), 'float32')
# Of other records.
PIXELS = struct((4,), 'uint8'), struct((), 'int32')
WORDS = {'x': struct((2, 3), 'float32'), 'y': struct((2,), 'bfloat16')}


def loss(params, frozen, x, y):
  """Squared error of one record."""
  pair = params['layer']
  z = x @ frozen + x @ pair['lora_a'] @ pair['lora_b'] + params['head']
  return jnp.sum((z - y) ** 2)


def losses(copies, frozen, x, y):
  """Of a batch, with a copy of the parameters for each record."""
  return jax.vmap(loss, (0, None, 0, 0))(copies, frozen, x, y)


def make(optimizer, **options):
  """A training of three steps with known keys, unless told otherwise."""
  constants = {
    'l2_clip_norm': 1.0, 'expected_batch_size': B, 'dataset_size': N,
    'steps': 3, 'delta': 1e-4, 'noise_multiplier': 1.0, 'prng_key': 7,
  }  # fmt: skip
  return training.make_private(
    options.pop('loss', loss), options.pop('params', PARAMS),
    optimizer=optimizer, **constants | options,
  )  # fmt: skip


def trained(private, state=None, data=DATA, frozen=FROZEN, **options):
  """The state after the steps that are left."""
  state = private.init(PARAMS) if state is None else state
  for batch in private.batches(state, data, **options):
    state = private.step(state, batch, frozen)
  return state


def first_step(private, data=DATA, start=None, frozen=FROZEN, **options):
  """The state after one step of a new run, or of one whose start is kept."""
  if start is None:
    state = private.init(PARAMS)
  else:
    state = jax.tree.map(jnp.copy, start)._replace(step=np.asarray(0))
  batch = next(iter(private.batches(state, data, **options)))
  return private.step(state, batch, frozen)


def by_keys_alone(private, data=DATA):
  """The parameters after all steps, with noise that is blind to the program.

  So two programs with the same keys can be compared.
  """
  state = private.init(PARAMS)
  params, optimizer = state.params, state.optimizer
  for batch in private.batches(state, data):
    rows = batch.examples, batch.is_padding_example, batch.is_present
    params, optimizer, _ = seams.run_step(
      private, params, optimizer, FROZEN, *rows
    )
  return params


@functools.cache
def gradients():
  """Per-record gradients of the start, NumPy, leaves (N, *shape)."""
  of_all = jax.jit(jax.vmap(jax.grad(loss), (None, None, 0, 0)))
  return jax.tree.map(np.asarray, of_all(PARAMS, FROZEN, *DATA))
