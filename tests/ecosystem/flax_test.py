"""Flax: nnx.LoRA, LoRALinear and stacks of them, and trees of linen."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import prism_optax
from prism_optax import lora
from tests.ecosystem import checks

nnx = pytest.importorskip('flax.nnx', reason='needs flax')
linen = pytest.importorskip('flax.linen', reason='needs flax')


def _nnx_layer(module):
  graph, factors, rest = nnx.split(module, nnx.LoRAParam, ...)

  def apply(params, x):
    return nnx.merge(graph, params, rest)(x)

  return checks.Layer(checks.randomised(factors), apply, 6), module


class _LinenLoRA(linen.Module):
  features: int
  rank: int

  @linen.compact
  def __call__(self, x):
    normal = linen.initializers.normal(1.0)
    a = self.param('lora_a', normal, (x.shape[-1], self.rank))
    b = self.param('lora_b', normal, (self.rank, self.features))
    return linen.Dense(self.features)(x) + x @ a @ b


def _linen_layer():
  module = _LinenLoRA(5, 2)
  variables = module.init(jax.random.key(0), jnp.ones((1, 6)))['params']
  frozen = {k: v for k, v in variables.items() if not k.startswith('lora')}
  params = {k: v for k, v in variables.items() if k.startswith('lora')}

  def apply(params, x):
    return module.apply({'params': {**frozen, **params}}, x)

  return checks.Layer(checks.randomised(params), apply, 6)


LAYERS = {
  'nnx.LoRA': lambda: _nnx_layer(nnx.LoRA(6, 2, 5, rngs=nnx.Rngs(0)))[0],
  'nnx.LoRALinear': lambda: _nnx_layer(
    nnx.LoRALinear(6, 5, lora_rank=2, rngs=nnx.Rngs(0))
  )[0],
  'linen': _linen_layer,
}


@pytest.mark.parametrize('name', LAYERS)
def test_intrinsic_is_the_change_of_the_weight(name):
  checks.intrinsic_is_the_change_of_the_weight(LAYERS[name]())


# What moves them is the same for all, once they are found (above).
@pytest.mark.slow
@pytest.mark.parametrize(
  'name',
  [
    pytest.param(name, marks=() if name == 'nnx.LoRA' else pytest.mark.slow)
    for name in LAYERS
  ],
)
def test_all_adapters_move(name):
  checks.all_adapters_move(LAYERS[name]())


@pytest.mark.slow
def test_they_move_by_the_whole_optimizer():
  checks.all_adapters_move(LAYERS['nnx.LoRA'](), checks.whole_prism)


def test_no_frozen_weight_moves():
  layer, module = _nnx_layer(
    nnx.LoRALinear(6, 5, lora_rank=2, rngs=nnx.Rngs(0))
  )
  frozen = nnx.to_pure_dict(nnx.state(module, nnx.Not(nnx.LoRAParam)))
  before = jax.tree.map(np.array, frozen)
  nnx.update(module, checks.all_adapters_move(layer))
  after = nnx.to_pure_dict(nnx.state(module, nnx.Not(nnx.LoRAParam)))
  jax.tree.map(np.testing.assert_array_equal, before, after)


@pytest.mark.slow
def test_no_frozen_weight_of_linen_moves():
  """An optimizer on the whole tree, adapters and frozen weights."""
  module = _LinenLoRA(5, 2)
  variables = module.init(jax.random.key(0), jnp.ones((1, 6)))['params']
  labels = jax.tree_util.tree_map_with_path(
    lambda path, _: 'trains' if 'lora' in str(path[0]) else 'stays', variables
  )

  def where_trained(tx):
    return optax.partition({'trains': tx, 'stays': optax.set_to_zero()}, labels)

  tx = optax.chain(
    where_trained(optax.identity()),
    prism_optax.intrinsic_clip(1.0, normalize_by=2.0),
    prism_optax.tangent_privatizer(0.5, prng_key=0),
    where_trained(optax.chain(optax.scale(-0.1), prism_optax.retract())),
  )
  x = np.float32(np.random.default_rng(2).standard_normal((2, 1, 6)))

  @jax.jit
  def step(variables, x):
    grads = jax.vmap(
      jax.grad(lambda p, x: jnp.sum(jnp.sin(module.apply({'params': p}, x)))),
      (None, 0),
    )(variables, x)
    updates, _ = tx.update(grads, tx.init(variables), variables)
    return optax.apply_updates(variables, updates)

  variables = jax.device_get(variables)
  new = jax.device_get(step(variables, x))
  for name in ('lora_a', 'lora_b'):
    assert np.all(np.any(new[name] != variables[name], axis=-1))
  jax.tree.map(
    np.testing.assert_array_equal, new['Dense_0'], variables['Dense_0']
  )


def test_stacks_of_modules_are_one_module_each():
  @nnx.vmap(in_axes=0, out_axes=0)
  def make(rngs):
    return nnx.LoRA(6, 2, 5, rngs=rngs)

  stack = make(nnx.Rngs(0).split(3))
  graph, factors = nnx.split(stack)
  params = checks.randomised(factors)
  (z,) = lora.deltas(params, dense=True).values()
  x = np.eye(6, dtype=np.float32)

  @jax.jit
  def outputs(params):
    return nnx.vmap(lambda m: m(x), in_axes=0)(nnx.merge(graph, params))

  np.testing.assert_allclose(np.swapaxes(z, 1, 2), outputs(params), atol=2e-5)
