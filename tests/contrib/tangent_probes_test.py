"""Probes against the general route, and where they are better."""

import functools

import jax
import jax.numpy as jnp
import jax_privacy
import numpy as np
import pytest
from flax import nnx

import prism_optax
from benchmarks.geometry import probe_accuracy
from prism_optax import contrib, lora
from tests import cases
from tests.oracles import oracles

SHAPES = [(9, 7, 3), (9, 7, 3), (6, 9, 2)]


def _params(condition=1.0, dtype=jnp.float64, zero=None, seed=0):
  rng = np.random.default_rng(seed)
  factors = []
  for shape in SHAPES:
    gauge = oracles.random_gauge(rng, shape[2], condition)
    pair = oracles.change_gauge(oracles.random_factors(rng, *shape), gauge)
    last = len(factors) == 2  # The others then do not matter to the loss.
    factors.append(
      [0 * x if last and zero == i else x for i, x in enumerate(pair)]
    )
  return cases.tree_of(factors, rng.normal(size=6), dtype)


def _loss(params, x, scale=1.0):
  """Any ranks: what it computes from is the product of the factors."""

  def apply(h, pair):
    return scale * (h @ pair['lora_a'] @ pair['lora_b'])

  h = jnp.tanh(apply(x, params['m0'])) + jnp.sin(apply(x, params['m1']))
  return jnp.sum(jnp.cos(apply(h, params['m2']) + params['extra']))


def _batch(dtype=jnp.float64, size=4):
  return jnp.asarray(np.random.default_rng(9).normal(size=(size, 7)), dtype)


@functools.partial(jax.jit, static_argnames=('scale',))
def _both(params, batch, scale=1.0):
  layout = lora.Layout(scale=scale)
  loss = functools.partial(_loss, scale=scale)
  grads = jax.vmap(jax.grad(loss), (None, 0))(params, batch)
  transform = prism_optax.tangent_coordinates(params, layout=layout)
  probes = contrib.tangent_probes(params, layout=layout)
  probed = jax.vmap(
    jax.grad(lambda p, x: loss(probes.attach(p), x)), (None, 0)
  )(probes.zeros, batch)
  return jax.vmap(transform)(grads), jax.vmap(probes.coordinates)(probed)


def _worst(got, want):
  return max(
    oracles.relative_error(np.float64(a), np.float64(b))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    if np.any(b)
  )


@pytest.mark.parametrize('condition', [1.0, 1e3, 1e6])
@pytest.mark.usefixtures('x64')
def test_both_routes_agree_where_both_are_defined(condition):
  """Up to the rounding of a whitened gradient: eps times the condition."""
  general, probed = _both(_params(condition), _batch())
  assert _worst(general, probed) < 1e-14 * max(condition, 10)


@pytest.mark.parametrize('zero', [0, 1])  # left, right
@pytest.mark.usefixtures('x64')
def test_both_routes_agree_at_a_zero_factor(zero):
  general, probed = _both(_params(zero=zero), _batch())
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=1e-12), general, probed
  )
  unseen, seen = ('lora_a', 'lora_b') if zero == 0 else ('lora_b', 'lora_a')
  assert not np.any(probed['m2'][unseen])
  assert np.any(probed['m2'][seen])


@pytest.mark.usefixtures('x64')
def test_scale_of_the_module_is_kept():
  """The same Z from smaller factors and a scale: the same coordinates."""
  params = _params()
  small = {
    k: v if k == 'extra' else jax.tree.map(lambda x: x / 4, v)
    for k, v in params.items()
  }
  for got, want in zip(
    _both(small, _batch(), scale=16.0), _both(params, _batch()), strict=True
  ):
    assert _worst(got, want) < 1e-12


@pytest.mark.parametrize(
  ('condition', 'dtype', 'bound'),
  [
    (1e2, jnp.float32, 3e-6),  # A few float32 roundings, at any condition.
    (1e4, jnp.float32, 3e-6),
    (30.0, jnp.bfloat16, 2e-2),  # The probes' gradients are bfloat16.
    (1e2, jnp.bfloat16, 2e-2),
  ],
)
def test_probes_are_exact_where_whitening_is_not(condition, dtype, bound):
  """Whitening multiplies the rounding of a factor gradient by the condition."""
  general, probed = probe_accuracy.errors(condition, dtype)
  assert probed < bound
  assert general > 3 * probed


class _Model(nnx.Module):
  def __init__(self, rngs):
    self.base = nnx.Linear(7, 7, rngs=rngs)
    self.lora = nnx.LoRA(7, 2, 7, rngs=rngs)
    self.out = nnx.LoRALinear(7, 7, lora_rank=2, rngs=rngs)

  def __call__(self, x):
    return self.out(jnp.tanh(self.base(x) + self.lora(x)))


@pytest.mark.slow
def test_flax_nnx_with_clipped_grad_and_with_vmap():
  """The pipeline of jax-privacy, differentiated with respect to probes."""
  graph, params, frozen = nnx.split(_Model(nnx.Rngs(0)), nnx.LoRAParam, ...)
  rng = np.random.default_rng(1)
  params = jax.tree.map(
    lambda x: np.float32(x + 0.3 * rng.standard_normal(x.shape)), params
  )

  def loss(params, x):
    return jnp.sum(nnx.merge(graph, params, frozen)(x) ** 2)

  @jax.jit
  def clipped_both_ways(params, batch):
    probes = contrib.tangent_probes(params)
    options = {'l2_clip_norm': 0.5, 'keep_batch_dim': False}
    by_probes = jax_privacy.clipped_grad(
      lambda p, x: loss(probes.attach(p), x),
      pre_clipping_transform=probes.coordinates, microbatch_size=2, **options,
    )(probes.zeros, batch)  # fmt: skip
    general = jax_privacy.clipped_grad(
      loss,
      pre_clipping_transform=prism_optax.tangent_coordinates(params),
      microbatch_size=2,
      **options,
    )(params, batch)
    clip = prism_optax.intrinsic_clip(0.5)
    grads = jax.vmap(jax.grad(lambda p, x: loss(p, x[None])), (None, 0))(
      params, batch
    )
    plain, _ = clip.update(grads, clip.init(params), params)
    return by_probes, general, plain

  probed, general, plain = clipped_both_ways(
    params, _batch(jnp.float32)[:, None, :].squeeze(1)
  )
  for other in (general, plain):
    jax.tree.map(
      lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), probed, other
    )
