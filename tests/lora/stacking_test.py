"""Adapters in few leaves train as they do in many."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import prism_optax
from prism_optax import lora

SCALE, BATCH = 0.5, 3
LAYOUT = lora.Layout(scale=SCALE)


def _params():
  """Two modules of one shape beside a scanned layer of it, another, a head."""
  keys = iter(jax.random.split(jax.random.key(0), 9))

  def module(n, m, stack=()):
    return {
      'lora_a': jax.random.normal(next(keys), (*stack, n, 2)) / 3,
      'lora_b': jax.random.normal(next(keys), (*stack, 2, m)) / 3,
    }

  return {
    'first': module(6, 5),
    'wide': module(5, 9),
    'scanned': module(6, 5, (2,)),
    'last': module(6, 5),
    'bias': jnp.ones(3),
  }


def _loss(params, x):
  total = jnp.sum(jnp.sin(params['bias'] * x[:3]))
  for name in ('first', 'scanned', 'last'):
    y = x @ params[name]['lora_a'] @ params[name]['lora_b']
    z = SCALE * jnp.tanh(y) @ params['wide']['lora_a']
    total += jnp.sum(jnp.square(z @ params['wide']['lora_b']))
  return total


def _train(params, loss, layout):
  tx = prism_optax.prism(
    0.1, l2_clip_norm=0.5, noise_multiplier=0.0, expected_batch_size=BATCH,
    prng_key=0, layout=layout,
  )  # fmt: skip

  @jax.jit
  def step(params, state, x):
    grads = jax.vmap(jax.grad(loss), (None, 0))(params, x)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  state = tx.init(params)
  for t in range(4):
    x = jax.random.normal(jax.random.key(t), (BATCH, 6))
    params, state = step(params, state, x)
  return params


@pytest.mark.slow
def test_training_is_the_same():
  """Clip, moments, decay, rate and retraction, with a scale, without noise."""
  params = _params()
  plain = _train(params, _loss, LAYOUT)

  def loss(stacked, x):
    return _loss(lora.unstack(stacked, params, layout=LAYOUT), x)

  stacked = _train(lora.stack(params, layout=LAYOUT), loss, None)
  assert len(jax.tree.leaves(stacked)) == 5  # Two shapes, and a bias.
  found = lora.unstack(stacked, params, layout=LAYOUT)
  before, after, ours = (
    lora.deltas(x, layout=LAYOUT) for x in (params, plain, found)
  )
  for name in before:
    z, wanted, got = (
      np.float64(x[name].left) @ np.swapaxes(x[name].right, -1, -2)
      for x in (before, after, ours)
    )
    moved = np.abs(wanted - z).max()
    assert moved > 0.01  # Or nothing would be compared.
    # Rounding, of four steps whose preconditioner divides by small numbers.
    np.testing.assert_allclose(got, wanted, atol=1e-4 * moved)
  np.testing.assert_allclose(found['bias'], plain['bias'], rtol=1e-5)


def test_the_derivative_adds_nothing_up():
  """Of k slices it would be a sum of k arrays as large as the stack."""
  params = _params()
  stacked = lora.stack(params)

  def loss(stacked):
    return sum(map(jnp.sum, jax.tree.leaves(lora.unstack(stacked, params))))

  text = str(jax.make_jaxpr(jax.grad(loss))(stacked))
  assert 'concatenate' in text
  assert ' pad' not in text
  assert 'add_any' not in text


def test_stacks_of_another_tree_are_refused():
  params = _params()
  stacked = lora.stack(params)
  del params['last']
  with pytest.raises(ValueError, match='stack\\(like\\)'):
    lora.unstack(stacked, params)
  with pytest.raises(ValueError, match='structure and shapes'):
    lora.unstack(params, params)
