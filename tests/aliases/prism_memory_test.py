"""What a step holds in memory: read from the compiled program."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import prism_optax
from prism_optax import contrib

MODULES, OUTPUTS, INPUTS, RANK, BATCH = 3, 512, 640, 4, 5


def _params():
  rng = np.random.default_rng(0)
  return {
    f'm{i}': {
      'lora_a': np.float32(rng.standard_normal((INPUTS, RANK))),
      'lora_b': np.float32(rng.standard_normal((RANK, OUTPUTS))),
    }
    for i in range(MODULES)
  }


def _step(tx):
  def step(params, state, grads):
    updates, state = tx.update(grads, state, params)
    return jax.tree.map(jnp.add, params, updates), state

  return jax.jit(step, donate_argnums=(0, 1))


@functools.cache
def _compiled(per_example_gradients, make=prism_optax.prism, **options):
  params = _params()
  tx = make(
    0.1,
    l2_clip_norm=1.0,
    noise_multiplier=1.0,
    expected_batch_size=BATCH,
    per_example_gradients=per_example_gradients,
    **options,
  )
  lead = (BATCH,) if per_example_gradients else ()
  grads = jax.tree.map(lambda x: np.zeros((*lead, *x.shape), x.dtype), params)
  return _step(tx).lower(params, tx.init(params), grads).compile()


def _largest_array(program):
  shapes = re.findall(r'[fsu]\d+\[([\d,]+)\]', program.as_text())
  return max(math.prod(map(int, shape.split(','))) for shape in shapes)


@pytest.mark.parametrize(
  ('make', 'options'),
  [
    (prism_optax.prism, {}),
    pytest.param(prism_optax.published_prism, {}, marks=pytest.mark.slow),
    pytest.param(contrib.prism_muon, {}, marks=pytest.mark.slow),
    pytest.param(
      prism_optax.prism, {'weight_decay': 0.0}, marks=pytest.mark.slow
    ),
  ],
  ids=lambda x: getattr(x, '__name__', str(x)),
)
def test_no_array_is_as_large_as_a_weight(make, options):
  largest = _largest_array(_compiled(False, make, **options))
  # All modules of one shape stacked, coordinates beside their bases.
  assert largest <= 2 * MODULES * max(OUTPUTS, INPUTS) * RANK
  assert largest < OUTPUTS * INPUTS / 10


def test_the_clip_holds_the_gradients_of_the_examples_and_nothing_larger():
  largest = _largest_array(_compiled(True))
  assert largest <= BATCH * MODULES * max(OUTPUTS, INPUTS) * RANK


def test_the_check_sees_a_dense_gradient():
  program = (
    jax.jit(lambda a, b: jnp.tanh(a @ b) @ b.T)
    .lower(jnp.zeros((INPUTS, RANK)), jnp.zeros((RANK, OUTPUTS)))
    .compile()
  )
  assert _largest_array(program) >= OUTPUTS * INPUTS


def test_the_state_is_as_large_as_adams():
  """The first moment and one set of bases; then r x r matrices, and a key."""
  params = _params()
  tx = prism_optax.prism(
    0.1, l2_clip_norm=1.0, noise_multiplier=1.0, expected_batch_size=BATCH
  )
  entries = [x.size for x in jax.tree.leaves(tx.init(params))]
  adam = 2 * sum(x.size for x in jax.tree.leaves(params))
  small = MODULES * 4 * RANK**2  # V and N, on either side.
  assert sum(entries) <= adam + small + 10


@pytest.mark.skipif(
  jax.default_backend() != 'cpu', reason='The bound is for the CPU compiler.'
)
def test_temporary_memory_is_a_few_times_the_factors():
  analysis = _compiled(False).memory_analysis()
  factors = 4 * sum(x.size for x in jax.tree.leaves(_params()))
  assert analysis.temp_size_in_bytes <= 12 * factors
