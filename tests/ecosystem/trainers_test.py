"""`make_private` where others keep a trainer: the numbers stay the same."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from prism_optax import training
from tests.ecosystem import adapters_test as adapters

nnx = pytest.importorskip('flax.nnx', reason='needs flax')
train_state = pytest.importorskip('flax.training.train_state')

SIZE, STEPS = 40, 3
RNG = np.random.default_rng(0)
DATA = tuple(np.float32(RNG.normal(size=(SIZE, n))) for n in (6, 5))
CONSTANTS = {
  'l2_clip_norm': 1.0, 'noise_multiplier': 0.5, 'expected_batch_size': 8,
}  # fmt: skip


def whole_run(made, params, frozen, data=DATA):
  """The state after a run without any trainer."""
  state = made.init(params)
  for batch in made.batches(state, data):
    state = made.step(state, batch, frozen)
  return state


def without_gradients(init):
  """An optimizer of optax that only holds a state."""

  def update(updates, state, params=None):
    raise ValueError('Gradients are made in PrivateTraining.step.')

  return optax.GradientTransformation(init, update)


def assert_same(found, wanted, atol=0.0):
  for x, y in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
    np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=0, atol=atol)


def nnx_model():
  return nnx.LoRALinear(6, 5, lora_rank=2, rngs=nnx.Rngs(0))


@functools.cache
def parts(library):
  """What is trained, the rest, and the loss."""
  if library == 'linen':
    params, frozen = adapters.linen_variables()

    def apply(params, frozen, x):
      return adapters.Linen().apply({'params': {**frozen, **params}}, x)
  else:
    graph, params, frozen = nnx.split(nnx_model(), nnx.LoRAParam, ...)

    def apply(params, frozen, x):
      return nnx.merge(graph, params, frozen)(x)

  def loss(params, frozen, x, y):
    return jnp.mean((apply(params, frozen, x) - y) ** 2)

  return params, frozen, loss


def private(library):
  """A training of its own: its key is for one run."""
  params, _, loss = parts(library)
  return training.make_private(
    loss,
    params,
    # What is cheap to compile; what moves adapters is tested elsewhere.
    optimizer=optax.sgd(0.1, 0.9),
    dataset_size=SIZE,
    steps=STEPS,
    delta=1e-4,
    prng_key=1,
    **CONSTANTS,
  )


@functools.cache
def end_of(library):
  return whole_run(private(library), *parts(library)[:2])


def test_an_nnx_optimizer_holds_the_run():
  params, frozen, _ = parts('nnx')
  end = end_of('nnx')
  adapters.assert_all_move(params, end.params)
  made, model = private('nnx'), nnx_model()
  optimizer = nnx.Optimizer(
    model, without_gradients(made.init), wrt=nnx.LoRAParam
  )
  for batch in made.batches(nnx.as_pure(optimizer.opt_state), DATA):
    state = made.step(nnx.as_pure(optimizer.opt_state), batch, frozen)
    nnx.update(optimizer.opt_state, nnx.state(state))
    nnx.update(model, state.params)
  held = nnx.as_pure(optimizer.opt_state)
  assert int(held.step) == STEPS
  assert_same(held.params, end.params)
  assert_same(nnx.state(model, nnx.LoRAParam), end.params)
  assert_same(nnx.state(model, nnx.Not(nnx.LoRAParam)), frozen)
  with pytest.raises(ValueError, match='All steps=3 are done'):
    made.step(held, batch, frozen)
  grads = jax.tree.map(jnp.zeros_like, nnx.state(model, nnx.LoRAParam))
  with pytest.raises(ValueError, match='PrivateTraining.step'):
    optimizer.update(model, grads)


@pytest.mark.slow
def test_a_train_state_holds_the_run():
  params, frozen, _ = parts('linen')
  end, made = end_of('linen'), private('linen')
  adapters.assert_all_move(params, end.params)
  state = train_state.TrainState.create(
    apply_fn=None, params=params, tx=without_gradients(made.init)
  )
  for batch in made.batches(state.opt_state, DATA):
    run = made.step(state.opt_state, batch, frozen)
    state = state.replace(step=run.step, params=run.params, opt_state=run)
  assert_same(state.params, end.params)
  assert state.step == STEPS
  with pytest.raises(ValueError, match='PrivateTraining.step'):
    state.apply_gradients(grads=state.params)


@pytest.mark.parametrize('closed_over', [False, True])
def test_active_dropout_is_refused_by_name(closed_over):
  """Its keys are state of the model: one set for all records, used up."""
  dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
  graph, random = nnx.split(dropout)
  params = {'lora_a': jnp.ones((6, 2)), 'lora_b': jnp.ones((2, 5))}

  def loss(params, frozen, x, y):
    layer = dropout if closed_over else nnx.merge(graph, frozen)
    return jnp.sum((layer(x @ params['lora_a'] @ params['lora_b']) - y) ** 2)

  made = training.make_private(
    loss, params, optimizer=optax.sgd(0.1), dataset_size=SIZE, steps=STEPS,
    delta=1e-3, **CONSTANTS,
  )  # fmt: skip
  with pytest.raises(
    ValueError, match=r'nnx\.Dropout does, .* model\.eval\(\)'
  ):
    whole_run(made, params, random)
