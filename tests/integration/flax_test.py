"""flax: nnx.Optimizer on LoRA parameters, and linen's TrainState."""

import jax
import jax.numpy as jnp
import jax_privacy
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training import train_state

import prism_optax
from tests.integration import cases


class _Model(nnx.Module):
  def __init__(self, rngs):
    self.layer = nnx.LoRALinear(
      cases.IN, cases.OUT, lora_rank=cases.RANK, rngs=rngs
    )

  def __call__(self, x):
    return jnp.tanh(self.layer(x))


def _leaves(state):
  return jax.tree.map(np.array, nnx.to_pure_dict(state))


@pytest.mark.slow
def test_nnx_optimizer_on_the_lora_parameters():
  """Per-example gradients of the LoRA variables alone; all else stays."""
  model = _Model(nnx.Rngs(0))
  optimizer = nnx.Optimizer(model, cases.prism(), wrt=nnx.LoRAParam)
  before = _leaves(nnx.state(model))

  @nnx.jit
  def step(model, optimizer, x, is_padding_example):
    graph, adapters, rest = nnx.split(model, nnx.LoRAParam, ...)

    def loss(adapters, x):
      return jnp.sum(nnx.merge(graph, adapters, rest)(x) ** 2)

    grads = jax.vmap(jax.grad(loss), (None, 0))(adapters, x)
    optimizer.update(model, grads, is_padding_example=is_padding_example)

  for i in range(3):
    step(model, optimizer, cases.batch(i), jnp.arange(6) >= 4)
  after = _leaves(nnx.state(model))
  np.testing.assert_array_equal(
    after['layer']['kernel'], before['layer']['kernel']
  )
  for name in ('lora_a', 'lora_b'):  # lora_b starts at zero.
    moved = after['layer']['lora'][name] - before['layer']['lora'][name]
    assert np.abs(moved).max() > 1e-3, name
  assert int(optimizer.step[...]) == 3


@pytest.mark.slow
def test_train_state_with_clipped_gradients():
  """`apply_gradients` takes no extra arguments: padding is the clip's."""
  params = cases.trainable(cases.params())
  state = train_state.TrainState.create(
    apply_fn=None,
    params=params,
    tx=optax.chain(cases.privatizer(), cases.after_the_noise()),
  )

  def loss(trained, x):
    return cases.loss({**cases.params(), **trained}, x)

  @jax.jit
  def step(state, x, is_padding):
    grads = jax_privacy.clipped_grad(
      loss,
      l2_clip_norm=cases.CLIP,
      normalize_by=cases.BATCH,
      batch_argnums=1,
      keep_batch_dim=False,
      pre_clipping_transform=prism_optax.tangent_coordinates(state.params),
    )(state.params, x, is_padding_example=is_padding)
    return state.apply_gradients(grads=grads)

  is_padding = jnp.arange(6) >= 4
  after = step(state, cases.batch(), is_padding)
  assert int(after.step) == 1
  tx = optax.chain(cases.clip(), cases.privatizer(), cases.after_the_noise())
  grads = cases.trainable(
    cases.per_example_gradients(cases.params(), cases.batch())
  )
  updates, _ = jax.jit(tx.update)(
    grads, tx.init(params), params, is_padding_example=is_padding
  )
  want = optax.apply_updates(params, updates)
  np.testing.assert_allclose(cases.z(after.params), cases.z(want), atol=1e-6)
  np.testing.assert_allclose(after.params['head'], want['head'], atol=1e-6)
