"""qwix: LoRA for dot_general, einsum and conv of unchanged models."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prism_optax import lora
from tests.ecosystem import checks

qwix = pytest.importorskip('qwix', reason='needs qwix')
nnx = pytest.importorskip('flax.nnx', reason='needs flax')
linen = pytest.importorskip('flax.linen', reason='needs flax')

RANK, ALPHA = 2, 6.0


class _Dense(nnx.Module):
  def __init__(self, rngs):
    self.layer = nnx.Linear(6, 5, rngs=rngs)

  def __call__(self, x):
    return self.layer(x)


class _Einsum(nnx.Module):
  def __init__(self, rngs):
    self.layer = nnx.Einsum('bi,ihk->bhk', (6, 3, 4), rngs=rngs)

  def __call__(self, x):
    return self.layer(x).reshape(len(x), -1)


class _Conv(nnx.Module):
  """As a linear map: an image as large as the window."""

  def __init__(self, rngs):
    self.layer = nnx.Conv(
      4, 8, (3, 3), padding='VALID', use_bias=False, rngs=rngs
    )

  def __call__(self, x):
    return self.layer(x.reshape(-1, 3, 3, 4)).reshape(len(x), -1)


MODULES = {
  'dot_general': (_Dense, 6),
  'einsum': (_Einsum, 6),
  'conv': (_Conv, 36),
}


def _adapted(name):
  make, inputs = MODULES[name]
  provider = qwix.LoraProvider(module_path='.*', rank=RANK, alpha=ALPHA)
  return qwix.apply_lora_to_model(
    make(nnx.Rngs(0)), provider, jnp.ones((2, inputs)), rngs=nnx.Rngs(1)
  ), inputs


def _layer(name):
  model, inputs = _adapted(name)
  graph, factors, rest = nnx.split(model, nnx.LoRAParam, ...)

  def apply(params, x):
    return nnx.merge(graph, params, rest)(x)

  # alpha / rank is not in the tree.
  layout = lora.Layout(scale=ALPHA / RANK)
  return checks.Layer(checks.randomised(factors), apply, inputs, layout)


@pytest.mark.parametrize('name', MODULES)
def test_intrinsic_is_the_change_of_the_weight(name):
  checks.intrinsic_is_the_change_of_the_weight(_layer(name))


# What moves them is the same for all, once they are found (above).
@pytest.mark.slow
@pytest.mark.parametrize(
  'name',
  [
    pytest.param(name, marks=() if name == 'dot_general' else pytest.mark.slow)
    for name in MODULES
  ],
)
def test_all_adapters_move(name):
  checks.all_adapters_move(_layer(name))


@pytest.mark.slow
def test_no_frozen_weight_moves():
  model, _ = _adapted('dot_general')
  frozen = nnx.to_pure_dict(nnx.state(model, nnx.Not(nnx.LoRAParam)))
  before = jax.tree.map(np.array, frozen)
  nnx.update(model, checks.all_adapters_move(_layer('dot_general')))
  after = nnx.to_pure_dict(nnx.state(model, nnx.Not(nnx.LoRAParam)))
  jax.tree.map(np.testing.assert_array_equal, before, after)


@pytest.mark.parametrize('axis', [0, 1])
def test_scanned_layers_are_stacks(axis):
  """Scanned over axis 1 the shapes have two readings: the user says which."""

  class Block(linen.Module):
    @linen.compact
    def __call__(self, x, _):
      return linen.Dense(6, use_bias=False, name='d')(x), None

  class Model(linen.Module):
    @linen.compact
    def __call__(self, x):
      scan = linen.scan(
        Block,
        variable_axes={'params': axis},
        split_rngs={'params': True},
        length=3,
      )
      return scan(name='layers')(x, None)[0]

  provider = qwix.LoraProvider(module_path='.*', rank=RANK, alpha=ALPHA)
  model = qwix.apply_lora_to_model(Model(), provider)
  x = np.eye(6, dtype=np.float32)
  variables = jax.device_get(jax.jit(model.init)(jax.random.key(0), x))
  variables = variables['params']['layers']['d']
  params = {k: v for k, v in variables.items() if 'lora' in k}
  params = checks.randomised(params)
  layout = lora.Layout(scale=ALPHA / RANK)
  if axis == 1:
    with pytest.raises(ValueError, match='in several ways'):
      lora.deltas(params, layout=layout)
    layout = lora.Layout(-1, 0, (1,), (1,), scale=ALPHA / RANK)
  (z,) = lora.deltas(params, layout=layout, dense=True).values()
  out = x  # The product of the three layers' effective weights.
  for i in range(3):
    kernel = np.take(variables['kernel'], i, axis)
    out = out @ (kernel + np.asarray(z)[i].T)
  got = jax.jit(model.apply)(
    {'params': {'layers': {'d': {**variables, **params}}}}, x
  )
  np.testing.assert_allclose(got, out, rtol=2e-4, atol=2e-3)
