"""The Flax modules: the layer sees the noised state, and nothing else."""

import hidden_state_modules
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

from prism_optax import inference

N, M, R = 7, 5, 2
OPTIONS = {'l2_clip_norm': 1.5, 'stddev': 0.8}


def lora(seed=0):
  layer = nnx.LoRA(N, R, M, rngs=nnx.Rngs(seed))
  layer.lora_b[...] = np.random.default_rng(seed).normal(size=(R, M))
  return layer


def recorded(seen):
  def layer(hidden):
    seen.append(hidden)
    return hidden

  return layer


def test_nnx_module_is_the_layer_on_the_privatised_state():
  layer = lora()
  module = hidden_state_modules.NoisyInputNnx(
    layer, rngs=nnx.Rngs(noise=3), **OPTIONS
  )
  hidden = jax.random.normal(jax.random.key(1), (4, N)) * 9
  # The stream that the module was given, one key further.
  stream = nnx.Rngs(noise=nnx.Rngs(noise=3).noise())
  noised = inference.privatize_hidden_states(hidden, stream.noise(), **OPTIONS)
  expected = inference.lora_delta(
    noised, layer.lora_b[...].T, layer.lora_a[...]
  )
  np.testing.assert_allclose(module(hidden), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('jit', [False, True])
def test_nnx_noise_is_fresh_in_every_call_and_layer(jit):
  rngs = nnx.Rngs(0)
  modules = [
    hidden_state_modules.NoisyInputNnx(lambda h: h, rngs=rngs, **OPTIONS)
    for _ in range(2)
  ]
  call = nnx.jit(lambda module, h: module(h)) if jit else lambda m, h: m(h)
  hidden = jnp.ones((3, N))
  drawn = [call(module, hidden) for module in modules for _ in range(2)]
  for i, first in enumerate(drawn):
    for second in drawn[:i]:
      assert np.all(np.asarray(first) != np.asarray(second))


def test_linen_module_is_the_layer_on_the_privatised_state():
  module = hidden_state_modules.NoisyInputLinen(linen.Dense(M), **OPTIONS)
  hidden = jax.random.normal(jax.random.key(1), (4, N)) * 9
  keys = {'params': jax.random.key(2), 'noise': jax.random.key(3)}
  variables = module.init(keys, hidden)
  seen = []
  spy = hidden_state_modules.NoisyInputLinen(recorded(seen), **OPTIONS)
  noise = {'noise': jax.random.key(5)}
  spy.apply({}, hidden, rngs=noise)
  kernel = variables['params']['layer']['kernel']
  bias = variables['params']['layer']['bias']
  found = jax.jit(module.apply)(variables, hidden, rngs=noise)
  np.testing.assert_allclose(
    found, seen[0] @ kernel + bias, rtol=1e-4, atol=1e-5
  )
  # Clip 1.5 on norms of about 24, and noise on all of it.
  clipped = hidden / jnp.linalg.norm(hidden, axis=-1, keepdims=True) * 1.5
  error = np.asarray(seen[0] - clipped)
  assert 0.4 < error.std() < 1.2
  other = module.apply(variables, hidden, rngs={'noise': jax.random.key(6)})
  assert np.all(np.asarray(other) != np.asarray(found))


@pytest.mark.parametrize('kind', ['nnx', 'linen'])
def test_masks_and_blocks_are_passed_on(kind):
  options = {'l2_clip_norm': 1.5, 'stddev': 0.0, 'block_ndim': 2}
  hidden = jnp.ones((2, 3, N))
  mask = jnp.array([[True, True, False], [True, True, True]])
  if kind == 'nnx':
    module = hidden_state_modules.NoisyInputNnx(
      lambda h: h, rngs=nnx.Rngs(0), **options
    )
    found = module(hidden, mask)
  else:
    found = hidden_state_modules.NoisyInputLinen(lambda h: h, **options).apply(
      {}, hidden, mask, rngs={'noise': jax.random.key(0)}
    )
  found = np.asarray(found)
  np.testing.assert_array_equal(found[0, 2], 0)
  np.testing.assert_allclose(np.linalg.norm(found, axis=(1, 2)), 1.5, rtol=2e-5)
