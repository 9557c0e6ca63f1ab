"""What a step holds in memory: read from the compiled program."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import prism_optax
from prism_optax import contrib
from tests import cases

MAKES = prism_optax.prism, prism_optax.published_prism, contrib.prism_muon
MODULES, OUTPUTS, INPUTS, RANK, BATCH = 3, 512, 640, 4, 5
PARAMS = cases.adapters([(OUTPUTS, INPUTS, RANK)] * MODULES, extra=0)
OPTIONS = {
  'l2_clip_norm': 1.0, 'noise_multiplier': 1.0, 'expected_batch_size': BATCH
}  # fmt: skip


def test_the_state_is_as_large_as_adams():
  """The first moment and one set of bases; then r x r matrices, and a key."""
  state = prism_optax.prism(0.1, **OPTIONS).init(PARAMS)
  entries = sum(x.size for x in jax.tree.leaves(state))
  adam = 2 * sum(x.size for x in jax.tree.leaves(PARAMS))
  assert entries <= adam + MODULES * 4 * RANK**2 + 10  # V and N, either side.


@pytest.mark.slow
@pytest.mark.skipif(
  jax.default_backend() != 'cpu', reason='The bound is for the CPU compiler.'
)
@pytest.mark.parametrize(
  ('make', 'per_example_gradients'),
  [*((x, False) for x in MAKES), (prism_optax.prism, True)],
)
def test_a_step_takes_a_few_times_the_factors(make, per_example_gradients):
  """No array is as large as a weight; gradients of examples are held once."""
  tx = make(0.1, **OPTIONS, per_example_gradients=per_example_gradients)

  @functools.partial(jax.jit, donate_argnums=(0, 1))
  def step(params, state, grads):
    updates, state = tx.update(grads, state, params)
    return jax.tree.map(jnp.add, params, updates), state

  lead = (BATCH,) if per_example_gradients else ()
  grads = jax.tree.map(lambda x: np.zeros((*lead, *x.shape), x.dtype), PARAMS)
  program = step.lower(PARAMS, tx.init(PARAMS), grads).compile()
  factors = 4 * sum(x.size for x in jax.tree.leaves(PARAMS))
  temporary = program.memory_analysis().temp_size_in_bytes
  assert temporary <= 9 * factors < 4 * OUTPUTS * INPUTS / 2
