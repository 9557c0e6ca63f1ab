"""Adapters for NNX models: the same function at the start, then trained."""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prism_optax import lora

nnx = pytest.importorskip('flax.nnx', reason='needs flax')


class _Block(nnx.Module):
  def __init__(self, rngs):
    self.attn = nnx.MultiHeadAttention(2, 6, decode=False, rngs=rngs)
    self.up = nnx.Linear(6, 9, rngs=rngs)
    self.conv = nnx.Conv(6, 6, 3, rngs=rngs)

  def __call__(self, x):
    return self.conv(self.up(x + self.attn(x))[..., :6])


class _Model(nnx.Module):
  def __init__(self):
    rngs = nnx.Rngs(0)
    self.blocks = nnx.List([_Block(rngs), _Block(rngs)])
    self.tied = self.blocks[0].up

  def __call__(self, x):
    for block in self.blocks:
      x = block(x)
    return self.tied(x)


RNGS = nnx.Rngs(0)
X = np.random.default_rng(0).normal(size=(3, 4, 6)).astype(np.float32)
CHOSEN = [
  f'blocks/{i}/{name}/lora' for i in (0, 1) for name in ('attn/out', 'up')
]


@functools.cache
def _adapted():
  model = _Model()
  before = nnx.split(model)
  model, adapters = lora.add_adapters(model, 'out|up', 2, rngs=nnx.Rngs(1))
  return before, model, adapters


def test_the_function_and_the_weights_are_those_from_before():
  (graph, state), model, adapters = _adapted()
  _, params, frozen = nnx.split(model, adapters, ...)
  # The same paths, so that a checkpoint of the base model still fits.
  jax.tree.map(np.testing.assert_array_equal, frozen, state)
  # Bit for bit: what is added is exactly zero.
  np.testing.assert_array_equal(model(X), nnx.merge(graph, state)(X))
  assert sorted(lora.deltas(params)) == CHOSEN
  for a in (model.blocks[0].up.lora.lora_a, model.blocks[1].up.lora.lora_a):
    np.testing.assert_allclose(a[...].T @ a[...], np.eye(2), atol=1e-6)
  a, b = (x.up.lora.lora_a[...] for x in model.blocks)
  assert np.abs(a - b).max() > 0.1  # Each has its own.
  # Every reference to a layer has its adapter.
  assert model.tied is model.blocks[0].up


@pytest.mark.slow
def test_each_adapter_adds_its_matrix_to_the_kernel():
  """The model with adapters is that with ``lora.merge``d weights."""
  (graph, state), model, adapters = _adapted()
  graph_of_both, params, frozen = nnx.split(model, adapters, ...)
  params = lora.initialize(params, 0, method='balanced', size=0.5)
  merged = lora.merge(params, frozen)
  run = jax.jit(lambda graph, *states: nnx.merge(graph, *states)(X),
                static_argnums=0)  # fmt: skip
  got, want = run(graph_of_both, params, frozen), run(graph, merged)
  # Float32, two layers; and the adapters do something.
  np.testing.assert_allclose(got, want, atol=2e-5)
  assert np.abs(want - run(graph, state)).max() > 0.01


@pytest.mark.slow
def test_stacked_layers_have_an_adapter_each():
  @nnx.split_rngs(splits=3)
  @nnx.vmap
  def stacked(rngs):
    return nnx.Linear(6, 5, param_dtype=jnp.bfloat16, rngs=rngs)

  layers, adapters = lora.add_adapters(
    stacked(nnx.Rngs(0)), '', 2, rngs=nnx.Rngs(1)
  )
  shapes = jax.tree.map(
    jnp.shape, nnx.to_pure_dict(nnx.state(layers, adapters))
  )
  assert shapes == {'lora': {'lora_a': (3, 6, 2), 'lora_b': (3, 2, 5)}}
  x = jnp.ones((3, 6), jnp.bfloat16)
  # Float32 factors do not widen what the model computes.
  out = nnx.vmap(lambda layer, x: layer(x))(layers, x)
  assert (out.shape, out.dtype) == ((3, 5), jnp.bfloat16)


@pytest.mark.parametrize(
  ('pattern', 'rank', 'match'),
  [
    ('quary', 2, r"no linear layer; the nearest of 10 are \['blocks/1/attn/qu"),
    ('p', 2, 'no linear layer'),  # A whole name: not the end of `up`.
    ('.*', 2, "matches 'blocks/0/conv', of type Conv"),
    ('up', 7, "rank=7, in=6, out=9 for 'blocks/0/up'"),
    ('up', 0, 'rank'),
    ('(up', 2, r"a regular expression, got '\(up'"),
    (['up'], 2, r"pattern to be a string, .* got \['up'\]"),
  ],
)
def test_a_choice_that_does_not_fit_is_refused(pattern, rank, match):
  model = _Model()
  with pytest.raises(ValueError, match=match):
    lora.add_adapters(model, pattern, rank, rngs=nnx.Rngs(1))
  assert not jax.tree.leaves(nnx.state(model, nnx.LoRAParam))


def _linear(**options):
  return nnx.LinearGeneral(6, 5, rngs=RNGS, **options)


def _turned():
  layer = _linear()
  layer.kernel = nnx.Param(jnp.zeros((5, 6)))
  return layer


def test_models_that_do_not_fit_are_refused(monkeypatch):
  linen = pytest.importorskip('flax.linen')
  for model, pattern, match in (
    (_adapted()[1], 'up', 'of type LoRALinear'),  # They are added once.
    (_adapted()[1], 'out', 'of type LoRALinear'),
    (_linear(axis=0), '', 'work on the last axes'),
    (_linear(axis=-1, batch_axis={0: 3}), '', 'work on the last axes'),
    (_turned(), '', r'Expected a kernel .* = \(6,\), \(5,\) .*got \(5, 6\)'),
    (nnx.LayerNorm(6, rngs=RNGS), 'up', 'LayerNorm has no nnx.Linear'),
    (linen.Dense(6), 'up', 'an nnx.Module, got Dense. For Flax linen use qwix'),
  ):
    with pytest.raises(ValueError, match=match):
      lora.add_adapters(model, pattern, 2, rngs=nnx.Rngs(1))
  with pytest.raises(ValueError, match=r'nnx.Rngs\(0\), got int'):
    lora.add_adapters(_Model(), 'up', 2, rngs=0)
  monkeypatch.setitem(sys.modules, 'flax', None)
  with pytest.raises(ImportError, match='pip install flax'):
    lora.add_adapters(None, 'up', 2, rngs=None)
