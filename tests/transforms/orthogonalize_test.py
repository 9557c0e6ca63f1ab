"""The transformation: layouts of weights."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from prism_optax import transforms
from tests.oracles import muon_oracle

Dims = optax.contrib.MuonDimensionNumbers


def _apply(updates, **options):
  tx = transforms.orthogonalize(**options)
  return jax.jit(tx.update)(updates, tx.init(updates))[0]


def _random(*shape):
  return np.random.default_rng(0).normal(size=shape).astype(np.float32)


# Shape of a leaf, its dimension numbers, and its axes as (*stack, *in, *out)
# with the number of each.
LAYOUTS = {
  'attention, in': ((6, 2, 4), Dims(0, (1, 2)), (0, 1, 2), 0, 1),
  'attention, by head': ((6, 2, 4), Dims(0, 2), (1, 0, 2), 1, 1),
  'attention, out': ((2, 4, 6), Dims((0, 1), -1), (0, 1, 2), 0, 2),
  'convolution': ((3, 2, 5, 7), Dims((0, 1, 2), 3), (0, 1, 2, 3), 0, 3),
  'scanned': ((4, 3, 5), Dims(1, 2), (0, 1, 2), 1, 1),
  'output first': ((5, 4, 3), Dims(2, 0), (1, 2, 0), 1, 1),
  'axes out of order': ((3, 6, 2, 4), Dims(1, (3, 2)), (0, 1, 3, 2), 1, 1),
}


@pytest.mark.parametrize('name', LAYOUTS)
def test_matrices_of_every_layout(name):
  shape, dims, axes, stack, inputs = LAYOUTS[name]
  # Layers of many sizes: each is a matrix of its own.
  size = 10.0 ** np.arange(shape[axes[0]]) if stack else 1.0
  x = np.moveaxis(np.moveaxis(_random(*shape), axes[0], -1) * size, -1, axes[0])
  found = _apply(np.float32(x), weight_dimension_numbers=dims)
  x, found = (np.transpose(y, axes) for y in (x, found))
  rows = math.prod(x.shape[stack : stack + inputs])
  x, found = (y.reshape(*y.shape[:stack], rows, -1) for y in (x, found))
  for i in np.ndindex(x.shape[:-2]):
    expected = muon_oracle.orthogonalize(x[i], 2, 5)
    np.testing.assert_allclose(found[i], expected, atol=1e-6)


def test_options_are_those_of_the_iteration():
  updates = {'tall': _random(7, 3), 'wide': _random(2, 5)}
  out = _apply(updates, degree=3, steps=4, normalize='frobenius')
  for k, x in updates.items():
    expected = muon_oracle.orthogonalize(x, 3, 4, 'frobenius')
    np.testing.assert_allclose(out[k], expected, atol=1e-6)
  # Products of eight bits.
  short = _apply(updates, matmul_dtype=jnp.bfloat16)['wide']
  error = np.abs(short - muon_oracle.orthogonalize(updates['wide'], 2, 5)).max()
  assert 1e-4 < error < 0.1


@pytest.mark.parametrize(
  'dims', [None, {'w': Dims(), 'x': None, 'y': None, 't': None}]
)
def test_leaves_that_are_no_matrices_pass(dims):
  """By default all but those of two axes: the groups of clip and noise."""
  updates = {'w': _random(3, 4), 'x': _random(3), 'y': _random(2, 3, 4)}
  updates |= {'t': _random(9, 2)} if dims else {}
  out = _apply(updates, weight_dimension_numbers=dims)
  expected = muon_oracle.orthogonalize(updates['w'], 2, 5)
  np.testing.assert_allclose(out['w'], expected, atol=1e-6)
  for name in updates.keys() - {'w'}:
    np.testing.assert_array_equal(out[name], updates[name])


def test_masked_leaves_and_types_are_kept():
  updates = {
    'w': jnp.asarray(_random(3, 4), jnp.bfloat16),
    'x': optax.MaskedNode(), 'y': None,
  }  # fmt: skip
  out = _apply(updates)
  assert out['w'].dtype == jnp.bfloat16
  assert jax.tree.structure(out) == jax.tree.structure(updates)
  assert jax.tree.leaves(transforms.orthogonalize().init(updates)) == []
