"""Adapters as each library makes them: found, understood, moved.

A case is one layer that is linear in its input. What it adds for the unit
vectors is the change of its weight, against which the intrinsic variable is
checked. What moves adapters, once they are found, is the same for all.
"""

import functools
import importlib.util
import math
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import prism_optax
from prism_optax import lora
from tests import cases, conftest

nnx = pytest.importorskip('flax.nnx', reason='needs flax')
linen = pytest.importorskip('flax.linen', reason='needs flax')
os.environ.setdefault('KERAS_BACKEND', 'jax')

BATCH, RANK, ALPHA = 4, 2, 6.0
RNGS = functools.partial(nnx.Rngs, 0)


class Layer(NamedTuple):
  """A layer with adapters.

  Attributes:
    params: Its trainable factors, all random (none zero).
    apply: ``apply(params, x)``, x (b, n) to (b, m).
    inputs: n.
    layout: What is passed to our functions.
    frozen: ``frozen()`` has the other weights, ``trained(params)`` puts new
      factors into the model; None where the weights are not in a model.
    trained: See ``frozen``.
  """

  params: Any
  apply: Callable[[Any, jax.Array], jax.Array]
  inputs: int
  layout: Any = None
  frozen: Callable[[], Any] | None = None
  trained: Callable[[Any], None] | None = None


# Normal entries in the shapes of parameters.
randomised = functools.partial(cases.normal, seed=0, dtype=np.float32)


def of_nnx(module, inputs=6, layout=None):
  graph, factors, rest = nnx.split(module, nnx.LoRAParam, ...)
  return Layer(
    randomised(factors),
    lambda params, x: nnx.merge(graph, params, rest)(x),
    inputs,
    layout,
    lambda: nnx.to_pure_dict(nnx.state(module, nnx.Not(nnx.LoRAParam))),
    lambda params: nnx.update(module, params),
  )


class Linen(linen.Module):
  @linen.compact
  def __call__(self, x):
    normal = linen.initializers.normal(1.0)
    a = self.param('lora_a', normal, (6, RANK))
    b = self.param('lora_b', normal, (RANK, 5))
    return linen.Dense(5)(x) + x @ a @ b


def linen_variables():
  variables = Linen().init(jax.random.key(0), jnp.ones((1, 6)))['params']
  params = {k: v for k, v in variables.items() if k.startswith('lora')}
  return params, {k: v for k, v in variables.items() if k not in params}


def of_linen():
  params, frozen = linen_variables()

  def apply(params, x):
    return Linen().apply({'params': {**frozen, **params}}, x)

  return Layer(randomised(params), apply, 6)


class Qwix(nnx.Module):
  """Unchanged layers; of the convolution an image as large as the window."""

  def __init__(self, kind):
    self.kind = kind
    make, self.inputs = {
      'dot_general': (lambda: nnx.Linear(6, 5, rngs=RNGS()), 6),
      'einsum': (lambda: nnx.Einsum('bi,ihk->bhk', (6, 3, 4), rngs=RNGS()), 6),
      'conv': (
        lambda: nnx.Conv(
          4, 8, (3, 3), padding='VALID', use_bias=False, rngs=RNGS()
        ),
        36,
      ),
    }[kind]
    self.layer = make()

  def __call__(self, x):
    x = x.reshape(-1, 3, 3, 4) if self.kind == 'conv' else x
    return self.layer(x).reshape(len(x), -1)


def of_qwix(kind):
  qwix = pytest.importorskip('qwix', reason='needs qwix')
  provider = qwix.LoraProvider(module_path='.*', rank=RANK, alpha=ALPHA)
  model = Qwix(kind)
  x = jnp.ones((2, model.inputs))
  model = qwix.apply_lora_to_model(model, provider, x, rngs=nnx.Rngs(1))
  # alpha / rank is not in the tree.
  return of_nnx(model, model.inputs, lora.Layout(scale=ALPHA / RANK))


# Those of gemma's transformer, one by one: whole models need kauldron and with
# it TensorFlow. Equation, shapes of weight and input, axis of the batch.
EINSUMS = {
  'q': ('BTD,NDH->BTNH', (3, 6, 4), (1, 6), 0),
  'kv': ('BSD,CKDH->CBSKH', (2, 1, 6, 4), (1, 6), 1),
  'attn_vec': ('BTNH,NHD->BTD', (3, 4, 6), (1, 3, 4), 0),
  'gating': ('...F,NHF->...NH', (2, 7, 6), (1, 6), 0),
  'linear': ('...H,HF->...F', (7, 6), (1, 7), 0),
}


def of_gemma(name):
  peft = pytest.importorskip('gemma.peft', reason='needs gemma')
  equation, shape, one, batch_axis = EINSUMS[name]
  module = peft.LoRAEinsumAdapter(
    rank=RANK, einsum_str=equation, shape=shape, dtype=jnp.float32
  )
  shapes = jax.eval_shape(module.init, jax.random.key(0), jnp.ones((1, *one)))
  weight = np.float32(np.random.default_rng(3).standard_normal(shape))

  def apply(params, x):
    x = x.reshape(-1, *one)
    adapter = module.apply({'params': params['layer']['lora']}, x)
    out = jnp.einsum(equation, x, weight) + adapter
    return jnp.moveaxis(out, batch_axis, 0).reshape(len(x), -1)

  tree = {'layer': {'lora': randomised(shapes['params'])}}
  return Layer(tree, apply, math.prod(one))


def of_keras(kind):
  """Only the factors are trained: the bias is an ordinary parameter."""
  keras = pytest.importorskip('keras', reason='needs keras')
  if kind == 'Dense':
    shape, layer = (6,), keras.layers.Dense(5)
  else:
    shape, layer = (2, 3), keras.layers.EinsumDense(
      'bcd,cde->be', output_shape=(5,), bias_axes='e'
    )  # fmt: skip
  model = keras.Sequential([keras.Input(shape), layer])
  layer.enable_lora(RANK)  # alpha / rank is not in the variables: one here.
  variables = model.trainable_variables
  names = [v.path for v in variables]
  values, rest = (
    [v.value for v in x] for x in (variables, model.non_trainable_variables)
  )
  chosen = [i for i, n in enumerate(names) if 'lora_kernel' in n]
  assert [names[i][-13:] for i in chosen] == ['lora_kernel_a', 'lora_kernel_b']

  def apply(params, x):
    everything = list(values)
    for i, value in zip(chosen, params, strict=True):
      everything[i] = value
    return model.stateless_call(everything, rest, x.reshape(-1, *shape))[0]

  def trained(params):
    for i, value in zip(chosen, params, strict=True):
      variables[i].assign(value)

  params = randomised([values[i] for i in chosen])
  layout = lora.pairs_by_name([names[i] for i in chosen], params)

  def frozen():
    return [np.array(v.value) for v in model.non_trainable_variables]

  return Layer(params, apply, math.prod(shape), layout, frozen, trained)


LAYERS = {
  'nnx.LoRA': lambda: of_nnx(nnx.LoRA(6, RANK, 5, rngs=RNGS())),
  'nnx.LoRALinear': lambda: of_nnx(
    nnx.LoRALinear(6, 5, lora_rank=RANK, rngs=RNGS())
  ),
  'linen': of_linen,
  **{
    f'{of.__name__[3:]} {kind}': functools.partial(of, kind)
    for of, kinds in (
      (of_qwix, ('dot_general', 'einsum', 'conv')),
      (of_gemma, EINSUMS),
      (of_keras, ('Dense', 'EinsumDense')),
    )
    for kind in kinds
  },
}


@cases.fast_first('name', [x for x in LAYERS if 'keras' not in x], LAYERS)
def test_intrinsic_is_the_change_of_the_weight(name):
  layer = LAYERS[name]()
  (z,) = lora.deltas(layer.params, layout=layer.layout, dense=True).values()
  x = np.eye(layer.inputs, dtype=np.float32)
  nothing = jax.tree.map(np.zeros_like, layer.params)
  apply = jax.jit(layer.apply)
  change = np.subtract(apply(layer.params, x), apply(nothing, x))
  assert z.shape == (change.shape[1], layer.inputs)
  # Sums of a few numbers of order one in float32.
  np.testing.assert_allclose(z.T, change, atol=2e-5)


def assert_all_move(old, new):
  for x, y in zip(*map(jax.tree.leaves, (old, new)), strict=True):
    assert np.all(np.isfinite(y))
    assert np.all(np.any(np.asarray(x) != y, axis=-1))


@pytest.mark.slow
@pytest.mark.parametrize('name', LAYERS)
def test_all_adapters_move_and_no_frozen_weight_does(name):
  """One private step from per-example gradients."""
  layer = LAYERS[name]()
  rng = np.random.default_rng(1)
  x = np.float32(rng.standard_normal((BATCH, layer.inputs)))

  def loss(params, x):
    return jnp.sum(jnp.sin(layer.apply(params, x[None])))

  grads = jax.jit(jax.vmap(jax.grad(loss), (None, 0)))(layer.params, x)
  leaves, treedef = jax.tree.flatten(layer.params)

  @jax.jit
  def update(grads, params):
    # Of leaves: layers of one shape are one program, whatever their tree.
    grads, params = (jax.tree.unflatten(treedef, t) for t in (grads, params))
    # What reads the layout, and is quickly compiled.
    tx = prism_optax.chain(
      prism_optax.intrinsic_clip(1.0, normalize_by=BATCH),
      prism_optax.tangent_privatizer(0.5 / BATCH, prng_key=0),
      prism_optax.scale_by_learning_rate(0.1),
      prism_optax.retract(),
      layout=layer.layout,
    )
    updates, _ = tx.update(grads, tx.init(params), params)
    return jax.tree.leaves(jax.tree.map(jnp.add, params, updates))

  new = jax.device_get(update(jax.tree.leaves(grads), leaves))
  assert_all_move(leaves, new)
  if layer.frozen is not None:
    before = jax.tree.map(np.array, layer.frozen())
    layer.trained(jax.tree.unflatten(treedef, new))
    jax.tree.map(np.testing.assert_array_equal, before, layer.frozen())


# The package without which the library's models cannot be imported.
EXAMPLES = {'qwix': 'qwix', 'keras': 'keras', 'gemma': 'kauldron'}


@pytest.mark.slow
@pytest.mark.parametrize('name', EXAMPLES)
def test_the_script_runs(name):
  if not importlib.util.find_spec(EXAMPLES[name]):
    pytest.skip(f'needs {name} with {EXAMPLES[name]}')
  assert 'right (n, r)' in conftest.python(f'examples/lora_{name}.py')
