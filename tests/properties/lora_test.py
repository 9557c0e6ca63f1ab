"""Laws of trees: pairs, stacks, parts, differences and merged weights."""

import functools

import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given

import prism_optax
from prism_optax import lora
from tests.cases import assert_same_bits
from tests.properties import cases

DTYPES = st.sampled_from([jnp.float32, jnp.bfloat16])


def _close(a, b, rtol=1e-5):
  for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
    x, y = np.float64(x), np.float64(y)
    np.testing.assert_allclose(x, y, atol=rtol * np.abs(y).max(initial=1e-30))


def _products(tree, layout):
  """scale * left @ right.T of each module by its name, in float64."""
  return {
    name: np.float64(x.left) @ np.swapaxes(np.float64(x.right), -1, -2)
    for name, x in lora.deltas(tree, layout=layout).items()
  }


@pytest.mark.slow
@cases.few
@given(cases.trees, cases.seeds, DTYPES)
def test_stacked_adapters_are_the_same_adapters(name, seed, dtype):
  """Without a layout, whatever the scale; and they come back."""
  params, layout = cases.draw_tree(name, seed), cases.layout_of(name)
  params = jax.tree.map(lambda x: x.astype(dtype), params)
  stacked = lora.stack(params, layout=layout)
  back = lora.unstack(stacked, params, layout=layout)
  assert cases.shapes_of(back) == cases.shapes_of(params)
  assert [x.dtype for x in jax.tree.leaves(back)] == [
    x.dtype for x in jax.tree.leaves(params)
  ]
  # A scale goes in and comes out as its root: two roundings.
  _close(back, params, 0 if layout is None else jnp.finfo(dtype).eps)
  products = _products(stacked, None)
  ours = np.sort(np.concatenate([x.ravel() for x in products.values()]))
  wide = jax.tree.map(lambda x: x.astype(jnp.float32), params)
  products = _products(wide, layout)
  theirs = np.sort(np.concatenate([x.ravel() for x in products.values()]))
  np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


@functools.cache
def _gradients(batched):
  def losses(params, x):
    y = lora.per_example_product(x, params['lora_a'], params['lora_b'])
    axes = tuple(range(1, y.ndim))
    return jnp.sum(jnp.sin(y), axes) * jnp.mean(x, axes)

  def one(params, x):
    return losses(params, x[None])[0]

  if batched:
    return jax.jit(lora.per_example_gradients(losses))
  return jax.jit(jax.vmap(jax.grad(one), (None, 0)))


@pytest.mark.slow
@cases.few
@given(
  cases.seeds,
  st.sampled_from([(0, 2), (1,), (3,), (3, 2), (3, 2, 4)]),
  st.sampled_from([(1, 1, 1), (3, 5, 2), (5, 3, 3)]),
)
def test_one_backward_pass_is_that_of_every_example(seed, lead, shape):
  rows, columns, rank = shape
  keys = jax.random.split(jax.random.key(seed), 3)
  params = {
    'lora_a': jax.random.normal(keys[0], (rows, rank)),
    'lora_b': jax.random.normal(keys[1], (rank, columns)),
  }
  x = jax.random.normal(keys[2], (*lead, rows))
  batched, mapped = (_gradients(kind)(params, x) for kind in (True, False))
  _close(batched, mapped)


@functools.cache
def _sum_by_parts(size):
  """Of six examples, whose gradients are the examples; None is all at once."""
  tx = prism_optax.chain(
    prism_optax.intrinsic_clip(1.0),
    prism_optax.tangent_privatizer(1e-3, prng_key=0),
    retract_elsewhere=True,
  )
  params = cases.draw_tree('one', 0)
  state = tx.init(params)

  def gradients(params, batch):
    del params
    return batch

  if size is not None:
    gradients = lora.in_microbatches(gradients, size)
  return jax.jit(
    lambda batch, is_padding: tx.update(
      gradients(params, batch), state, params, is_padding_example=is_padding
    )[0]
  )


@pytest.mark.slow
@cases.settings
@given(
  cases.seeds,
  cases.scales,
  cases.oddities,
  st.sampled_from([1, 2, 7]),
  hnp.arrays(bool, 6),
)
def test_parts_of_any_size_give_one_sum(seed, scale, odd, size, is_padding):
  batch = cases.draw_tree('one', seed, lead=(6,), scale=scale)
  batch = cases.spoiled(batch, odd, seed)
  whole, parts = (_sum_by_parts(x)(batch, is_padding) for x in (None, size))
  assert_same_bits(parts, whole)
