"""flax: nnx.Optimizer on LoRA parameters, and linen's TrainState."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

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
