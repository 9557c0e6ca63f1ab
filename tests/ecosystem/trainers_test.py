"""`make_private` where others keep a trainer: the numbers stay the same."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import prism_optax
from prism_optax import training

nnx = pytest.importorskip('flax.nnx', reason='needs flax')
linen = pytest.importorskip('flax.linen', reason='needs flax')
train_state = pytest.importorskip('flax.training.train_state')

SIZE, STEPS = 40, 3
RNG = np.random.default_rng(0)
DATA = (
  RNG.normal(size=(SIZE, 6)).astype(np.float32),
  RNG.normal(size=(SIZE, 5)).astype(np.float32),
)
CONSTANTS = {
  'l2_clip_norm': 1.0,
  'noise_multiplier': 0.5,
  'expected_batch_size': 8,
}


def private(loss, params, optimizer=None):
  return training.make_private(
    loss,
    params,
    # What is cheap to compile; what moves adapters is tested elsewhere.
    optimizer=optax.sgd(0.1, 0.9) if optimizer is None else optimizer,
    dataset_size=SIZE,
    steps=STEPS,
    delta=1e-4,
    prng_key=1,
    **CONSTANTS,
  )


def whole_run(made, params, frozen):
  """The parameters of a run without any trainer."""
  state = made.init(params)
  for batch in made.batches(state, DATA):
    state = made.step(state, batch, frozen)
  return state


def without_gradients(init):
  """An optimizer of optax that only holds a state."""

  def update(updates, state, params=None):
    raise ValueError('Gradients are made in PrivateTraining.step.')

  return optax.GradientTransformation(init, update)


def pure(tree):
  return [np.asarray(x) for x in jax.tree.leaves(tree)]


def assert_same(found, wanted):
  for x, y in zip(pure(found), pure(wanted), strict=True):
    np.testing.assert_array_equal(x, y)


def assert_all_move(old, new):
  for x, y in zip(pure(old), pure(new), strict=True):
    assert np.all(np.isfinite(y))
    assert np.any(x != y)


def nnx_model():
  return nnx.LoRALinear(6, 5, lora_rank=2, rngs=nnx.Rngs(0))


def nnx_loss(graph):
  def loss(params, frozen, x, y):
    return jnp.mean((nnx.merge(graph, params, frozen)(x) - y) ** 2)

  return loss


def nnx_parts():
  """A training of its own (its key is for one run), and what it is about."""
  graph, params, frozen = nnx.split(nnx_model(), nnx.LoRAParam, ...)
  return private(nnx_loss(graph), params), params, frozen


@pytest.fixture(scope='module')
def nnx_run():
  """What is trained, the rest, and the state after a run of the bare loop."""
  made, params, frozen = nnx_parts()
  return params, frozen, whole_run(made, params, frozen)


def test_nnx_moves_the_adapters_and_no_frozen_weight(nnx_run):
  params, frozen, end = nnx_run
  assert_all_move(params, end.params)
  model = nnx_model()
  nnx.update(model, end.params)
  assert_same(nnx.state(model, nnx.LoRAParam), end.params)
  assert_same(nnx.state(model, nnx.Not(nnx.LoRAParam)), frozen)


def test_an_nnx_optimizer_holds_the_run(nnx_run):
  _, frozen, end = nnx_run
  made, _, _ = nnx_parts()
  model = nnx_model()
  optimizer = nnx.Optimizer(
    model, without_gradients(made.init), wrt=nnx.LoRAParam
  )
  first = nnx.as_pure(optimizer.opt_state)
  for batch in made.batches(first, DATA):
    state = made.step(nnx.as_pure(optimizer.opt_state), batch, frozen)
    nnx.update(optimizer.opt_state, nnx.state(state))
    nnx.update(model, state.params)
  held = nnx.as_pure(optimizer.opt_state)
  assert int(held.step) == STEPS
  assert_same(held.params, end.params)
  assert_same(nnx.state(model, nnx.LoRAParam), end.params)
  with pytest.raises(ValueError, match='All steps=3 are done'):
    made.step(held, batch, frozen)
  grads = jax.tree.map(jnp.zeros_like, nnx.state(model, nnx.LoRAParam))
  with pytest.raises(ValueError, match='PrivateTraining.step'):
    optimizer.update(model, grads)


class _Linen(linen.Module):
  @linen.compact
  def __call__(self, x):
    normal = linen.initializers.normal(1.0)
    a = self.param('lora_a', normal, (6, 2))
    b = self.param('lora_b', linen.initializers.zeros, (2, 5))
    return linen.Dense(5)(x) + x @ a @ b


def linen_parts():
  module = _Linen()
  variables = module.init(jax.random.key(0), jnp.ones((1, 6)))['params']
  params = {k: v for k, v in variables.items() if k.startswith('lora')}
  frozen = {k: v for k, v in variables.items() if k not in params}

  def loss(params, frozen, x, y):
    out = module.apply({'params': {**frozen, **params}}, x)
    return jnp.mean((out - y) ** 2)

  return module, params, frozen, loss


@pytest.mark.slow
def test_a_train_state_holds_the_run():
  module, params, frozen, loss = linen_parts()
  made = private(loss, params)
  end = whole_run(made, params, frozen)
  assert_all_move(params, end.params)
  made = private(loss, params)
  state = train_state.TrainState.create(
    apply_fn=module.apply, params=params, tx=without_gradients(made.init)
  )
  for batch in made.batches(state.opt_state, DATA):
    run = made.step(state.opt_state, batch, frozen)
    state = state.replace(step=run.step, params=run.params, opt_state=run)
  assert_same(state.params, end.params)
  assert state.step == STEPS
  with pytest.raises(ValueError, match='PrivateTraining.step'):
    state.apply_gradients(grads=state.params)


def chain(*, per_example_gradients):
  """What `prism` is, but for what takes long to compile."""
  b, c, sigma = (
    CONSTANTS[x]
    for x in ('expected_batch_size', 'l2_clip_norm', 'noise_multiplier')
  )
  return prism_optax.chain(
    *[prism_optax.intrinsic_clip(c, normalize_by=b)] * per_example_gradients,
    prism_optax.tangent_privatizer(sigma * c / b, prng_key=0),
    prism_optax.scale_by_learning_rate(0.1),
    prism_optax.retract(),
  )


def padded_batch():
  """Eight rows, the last three of them padding with numbers in it."""
  return DATA[0][:8], DATA[1][:8], np.arange(8) >= 5


def by_hand(loss, params, frozen):
  """One step of the chain without a trainer; jitted as a whole."""
  x, y, is_padding = padded_batch()
  tx = chain(per_example_gradients=True)

  @jax.jit
  def step(params):
    grads = jax.vmap(jax.grad(loss), (None, None, 0, 0))(params, frozen, x, y)
    updates, _ = tx.update(
      grads, tx.init(params), params, is_padding_example=is_padding
    )
    return optax.apply_updates(params, updates)

  return step(params)


@pytest.mark.slow
def test_the_chain_in_an_nnx_optimizer_knows_the_padding():
  model = nnx_model()
  graph, params, frozen = nnx.split(model, nnx.LoRAParam, ...)
  loss = nnx_loss(graph)
  wanted = by_hand(loss, params, frozen)
  optimizer = nnx.Optimizer(
    model, chain(per_example_gradients=True), wrt=nnx.LoRAParam
  )
  x, y, is_padding = padded_batch()

  @nnx.jit
  def step(model, optimizer, x, y, is_padding):
    _, params, frozen = nnx.split(model, nnx.LoRAParam, ...)
    grads = jax.vmap(jax.grad(loss), (None, None, 0, 0))(params, frozen, x, y)
    optimizer.update(model, grads, is_padding_example=is_padding)

  step(model, optimizer, x, y, is_padding)
  # Two programs: sums in another order.
  for found, right in zip(
    pure(nnx.state(model, nnx.LoRAParam)), pure(wanted), strict=True
  ):
    np.testing.assert_allclose(found, right, atol=1e-6)
  assert_same(nnx.state(model, nnx.Not(nnx.LoRAParam)), frozen)


@pytest.mark.slow
def test_clipped_gradients_go_into_a_train_state():
  jax_privacy = pytest.importorskip('jax_privacy')
  module, params, frozen, loss = linen_parts()
  state = train_state.TrainState.create(
    apply_fn=module.apply,
    params=params,
    tx=chain(per_example_gradients=False),
  )
  x, y, is_padding = padded_batch()

  @jax.jit
  def step(state):
    gradient = jax_privacy.clipped_grad(
      loss,
      l2_clip_norm=CONSTANTS['l2_clip_norm'],
      normalize_by=CONSTANTS['expected_batch_size'],
      batch_argnums=(2, 3),
      keep_batch_dim=False,
      pre_clipping_transform=prism_optax.tangent_coordinates(state.params),
    )
    grads = gradient(state.params, frozen, x, y, is_padding_example=is_padding)
    return state.apply_gradients(grads=grads)

  found, wanted = step(state).params, by_hand(loss, params, frozen)
  # jax-privacy sums floats, we sum integers.
  for left, right in zip(pure(found), pure(wanted), strict=True):
    np.testing.assert_allclose(left, right, atol=1e-5)
