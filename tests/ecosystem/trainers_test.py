"""`make_private` where others keep a trainer: the numbers stay the same."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests import cases
from tests.ecosystem import adapters_test as adapters

nnx = pytest.importorskip('flax.nnx', reason='needs flax')

SIZE, STEPS = 40, 3
RNG = np.random.default_rng(0)
DATA = tuple(np.float32(RNG.normal(size=(SIZE, n))) for n in (6, 5))
CONSTANTS = {'dataset_size': SIZE, 'expected_batch_size': 8}


@pytest.mark.slow
def test_an_nnx_optimizer_holds_the_run():
  model = nnx.LoRALinear(6, 5, lora_rank=2, rngs=nnx.Rngs(0))
  graph, params, frozen = nnx.split(model, nnx.LoRAParam, ...)
  frozen = jax.tree.map(np.array, frozen)

  def loss(params, frozen, x, y):
    return jnp.mean((nnx.merge(graph, params, frozen)(x) - y) ** 2)

  def private():
    """A training of its own: its key is for one run."""
    # What is cheap to compile; what moves adapters is tested elsewhere.
    return cases.make(
      optax.sgd(0.1, 0.9), loss=loss, params=params, **CONSTANTS
    )

  def update(updates, state, params=None):
    raise ValueError('Gradients are made in PrivateTraining.step.')

  end = cases.trained(
    (made := private()), made.init(jax.tree.map(jnp.copy, params)), DATA, frozen
  )
  adapters.assert_all_move(params, end.params)
  made = private()
  holder = optax.GradientTransformation(made.init, update)
  optimizer = nnx.Optimizer(model, holder, wrt=nnx.LoRAParam)
  for batch in made.batches(nnx.as_pure(optimizer.opt_state), DATA):
    state = made.step(nnx.as_pure(optimizer.opt_state), batch, frozen)
    nnx.update(optimizer.opt_state, nnx.state(state))
    nnx.update(model, state.params)
  held = nnx.as_pure(optimizer.opt_state)
  assert int(held.step) == STEPS
  for found in (held.params, nnx.state(model, nnx.LoRAParam)):
    cases.assert_same_bits(found, end.params)
  cases.assert_same_bits(nnx.state(model, nnx.Not(nnx.LoRAParam)), frozen)
  with pytest.raises(ValueError, match='All steps=3 are done'):
    made.step(held, batch, frozen)
  grads = jax.tree.map(jnp.zeros_like, nnx.state(model, nnx.LoRAParam))
  with pytest.raises(ValueError, match='PrivateTraining.step'):
    optimizer.update(model, grads)


@pytest.mark.parametrize('closed_over', [False, True])
def test_active_dropout_is_refused_by_name(closed_over):
  """Its keys are state of the model: one set for all records, used up."""
  dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
  graph, random = nnx.split(dropout)
  params = {'lora_a': jnp.ones((6, 2)), 'lora_b': jnp.ones((2, 5))}

  def loss(params, frozen, x, y):
    layer = dropout if closed_over else nnx.merge(graph, frozen)
    return jnp.sum((layer(x @ params['lora_a'] @ params['lora_b']) - y) ** 2)

  made = cases.make(optax.sgd(0.1), loss=loss, params=params, **CONSTANTS)
  with pytest.raises(
    ValueError, match=r'nnx\.Dropout does, .* model\.eval\(\)'
  ):
    cases.trained(made, made.init(params), DATA, random)
