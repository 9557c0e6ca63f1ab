"""The Flax modules: the layer sees the noised state, and nothing else."""

import hidden_state_modules
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

N, M, R = 7, 5, 2
OPTIONS = {'l2_clip_norm': 1.5, 'stddev': 0.8}
KINDS = pytest.mark.parametrize('kind', ['nnx', 'linen'])


def released(kind, layer, hidden, mask=None, *, seed=0, params=None, **options):
  """What a layer makes of a state that is released."""
  if kind == 'nnx':
    module = hidden_state_modules.NoisyInputNnx(
      layer, rngs=nnx.Rngs(seed), **OPTIONS | options
    )
    return np.asarray(module(hidden, mask))
  module = hidden_state_modules.NoisyInputLinen(layer, **OPTIONS | options)
  variables = {} if params is None else {'params': {'layer': params}}
  noise = {'noise': jax.random.key(seed)}
  return np.asarray(module.apply(variables, hidden, mask, rngs=noise))


@pytest.mark.slow
@KINDS
def test_the_layer_sees_the_privatised_state(kind):
  hidden = jax.random.normal(jax.random.key(1), (4, N)) * 9
  seen = released(kind, lambda h: h, hidden)
  # Clip 1.5 on norms of about 24, and noise on all of it.
  clipped = hidden / jnp.linalg.norm(hidden, axis=-1, keepdims=True) * 1.5
  assert 0.4 < np.std(seen - clipped) < 1.2
  assert np.all(seen != released(kind, lambda h: h, hidden, seed=1))
  if kind == 'nnx':
    layer, params = nnx.LoRA(N, R, M, rngs=nnx.Rngs(0)), None
    layer.lora_b[...] = np.random.default_rng(0).normal(size=(R, M))
    expected = layer(seen)
  else:
    layer = linen.Dense(M)
    params = layer.init(jax.random.key(2), hidden)['params']
    expected = layer.apply({'params': params}, seen)
  found = released(kind, layer, hidden, params=params)
  np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
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


@pytest.mark.slow
@KINDS
def test_masks_and_blocks_are_passed_on(kind):
  mask = jnp.array([[True, True, False], [True, True, True]])
  found = released(
    kind, lambda h: h, jnp.ones((2, 3, N)), mask, stddev=0.0, block_ndim=2
  )
  np.testing.assert_array_equal(found[0, 2], 0)
  np.testing.assert_allclose(np.linalg.norm(found, axis=(1, 2)), 1.5, rtol=2e-5)
