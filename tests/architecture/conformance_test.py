"""Known failures of DP libraries, one test each: the names read as the list.

Each test states what is right here and, where it is not obvious, shows that the
failure would be seen.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import prism_optax
from tests import cases

# Of one shape: they are one stack, and one program works on both.
SHAPES = [(9, 7, 3)] * 2
STDDEV = 0.8 / 16


def _grads(params, batch, scale=1.0, seed=1):
  """Gradients of examples, as functions of the products have them."""
  rng = np.random.default_rng(seed)
  dense = [scale * rng.normal(size=(batch, m, n)) for m, n, _ in SHAPES]
  extra = scale * rng.normal(size=(batch, 4))
  return cases.factor_gradients(
    cases.factors_of(params), dense, extra, jnp.float32
  )


@jax.jit
def _mechanism(params, grads, seed, padding):
  tx = optax.chain(
    prism_optax.intrinsic_clip(1.0, normalize_by=16.0),
    prism_optax.tangent_privatizer(STDDEV, prng_key=jax.random.key(seed)),
  )
  return tx.update(grads, tx.init(params), params, is_padding_example=padding)[
    0
  ]


def _release(params, grads, seed=3, is_padding_example=None):
  """What leaves the mechanism in one step of `prism`: clip, noise, project.

  Batches of fewer than eight examples are filled with padding: one program.
  """
  size = len(grads['extra'])
  if is_padding_example is None:
    is_padding_example = np.zeros(size, bool)
  if size < 8:
    is_padding_example = np.arange(8) >= size
    grads = jax.tree.map(
      lambda x: np.concatenate([x, np.ones((8 - size, *x.shape[1:]), x.dtype)]),
      grads,
    )
  return jax.device_get(_mechanism(params, grads, seed, is_padding_example))


def _minus(x, y):
  return jax.tree.map(np.subtract, x, y)


def _nobody(params):
  """The gradients of an empty batch."""
  return jax.tree.map(lambda x: np.zeros((0, *x.shape), x.dtype), params)


def test_realised_batch_size_as_divisor():
  """Twice the examples, twice the signal: nothing divides by how many came."""
  params = cases.adapters(SHAPES, extra=4)
  grads = _grads(params, 4, scale=1e-3)  # Nothing is clipped.
  twice = jax.tree.map(lambda x: np.concatenate([x, x]), grads)
  noise = _release(params, _nobody(params))
  once = _minus(_release(params, grads), noise)
  both = _minus(_release(params, twice), noise)
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(2 * x, y, atol=1e-7), once, both
  )


def test_empty_batch_without_noise():
  params = cases.adapters(SHAPES, extra=4)
  padded = _grads(params, 8)
  for release in (
    _release(params, _nobody(params)),
    _release(params, padded, is_padding_example=np.ones(8, bool)),
  ):
    energy = cases.norm(release) ** 2 / STDDEV**2
    dimension = sum(r * (m + n - r) for m, n, r in SHAPES) + 4
    assert abs(energy / dimension - 1) < 5 * np.sqrt(2 / dimension)


@pytest.mark.parametrize('size', [1e-4, 1e-6, 1e-12, 0.0])
def test_damped_whitening(size):
  """Small factors: signal and noise are whitened alike, or masked alike."""
  params = cases.adapters(SHAPES, extra=4)
  params['m0']['lora_b'] = size * np.asarray(params['m0']['lora_b'])
  empty = _nobody(params)
  energy = []
  for seed in range(40):
    noise = _release(params, empty, seed=seed)['m0']
    energy.append(sum(float(np.sum(x**2)) for x in noise.values()))
  m, n, rank = SHAPES[0]
  dimension = rank * (m + n - rank) if size else m * rank
  expected = STDDEV**2 * dimension
  assert abs(np.mean(energy) / expected - 1) < 5 * np.sqrt(2 / dimension / 40)
  grads = _grads(params, 8, scale=100.0)
  signal = _minus(_release(params, grads), _release(params, empty))
  assert cases.norm(signal) <= 8 / 16
