"""Keras 3 on JAX: enable_lora of Dense, EinsumDense and Embedding."""

import os

import jax.numpy as jnp
import numpy as np
import pytest

from prism_optax import lora
from tests.ecosystem import checks

os.environ.setdefault('KERAS_BACKEND', 'jax')
keras = pytest.importorskip('keras', reason='needs keras')

LAYERS = {
  'Dense': (lambda: keras.layers.Dense(5), (6,)),
  'EinsumDense': (
    lambda: keras.layers.EinsumDense(
      'bcd,cde->be', output_shape=(5,), bias_axes='e'
    ),
    (2, 3),
  ),
}


def _model(name):
  make, shape = LAYERS[name]
  model = keras.Sequential([keras.Input(shape), make()])
  layer = model.layers[-1]
  # alpha / rank is not in the variables: one here.
  layer.enable_lora(2)
  return model, shape


def _layer(name):
  """Only the factors are trained: the bias is an ordinary parameter."""
  model, shape = _model(name)
  variables = model.trainable_variables
  names = [v.path for v in variables]
  values = [v.value for v in variables]
  chosen = [i for i, n in enumerate(names) if 'lora_kernel' in n]
  rest = [v.value for v in model.non_trainable_variables]

  def apply(params, x):
    everything = list(values)
    for i, value in zip(chosen, params, strict=True):
      everything[i] = value
    out, _ = model.stateless_call(everything, rest, x.reshape(-1, *shape))
    return out

  params = checks.randomised([values[i] for i in chosen])
  layout = lora.pairs_by_name([names[i] for i in chosen], params)
  return checks.Layer(params, apply, int(np.prod(shape)), layout)


@pytest.mark.parametrize('name', LAYERS)
def test_intrinsic_is_the_change_of_the_weight(name):
  checks.intrinsic_is_the_change_of_the_weight(_layer(name))


@pytest.mark.slow
@pytest.mark.parametrize('name', LAYERS)
def test_all_adapters_move(name):
  checks.all_adapters_move(_layer(name))


@pytest.mark.slow
def test_no_frozen_weight_moves():
  model, _ = _model('Dense')
  frozen = [np.array(v.value) for v in model.non_trainable_variables]
  assert any(x.shape == (6, 5) for x in frozen)
  layer = _layer('Dense')
  new = checks.all_adapters_move(layer)
  factors = [v for v in model.trainable_variables if 'lora_kernel' in v.path]
  for variable, value in zip(factors, new, strict=True):
    variable.assign(value)
  for before, after in zip(frozen, model.non_trainable_variables, strict=True):
    np.testing.assert_array_equal(before, after.value)


def test_names_are_those_that_keras_gives():
  model, _ = _model('Dense')
  paths = [v.path for v in model.trainable_variables]
  names = [path.rpartition('/')[2] for path in paths]
  assert names == ['bias', 'lora_kernel_a', 'lora_kernel_b']
  params = [jnp.ones(v.shape) for v in model.trainable_variables]
  layout = lora.pairs_by_name(paths, params)
  (pair,) = lora.deltas(params, layout=layout).values()
  assert (pair.left.shape, pair.right.shape) == ((5, 2), (6, 2))
