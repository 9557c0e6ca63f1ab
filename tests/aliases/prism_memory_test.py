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
from tests import cases

MODULES, OUTPUTS, INPUTS, RANK, BATCH = 3, 512, 640, 4, 5
PARAMS = cases.adapters([(OUTPUTS, INPUTS, RANK)] * MODULES, extra=0)
OPTIONS = {
  'l2_clip_norm': 1.0, 'noise_multiplier': 1.0, 'expected_batch_size': BATCH
}  # fmt: skip


@functools.cache
def _compiled(per_example_gradients, make=prism_optax.prism, **options):
  tx = make(
    0.1, **OPTIONS, per_example_gradients=per_example_gradients, **options
  )

  @functools.partial(jax.jit, donate_argnums=(0, 1))
  def step(params, state, grads):
    updates, state = tx.update(grads, state, params)
    return jax.tree.map(jnp.add, params, updates), state

  lead = (BATCH,) if per_example_gradients else ()
  grads = jax.tree.map(lambda x: np.zeros((*lead, *x.shape), x.dtype), PARAMS)
  return step.lower(PARAMS, tx.init(PARAMS), grads).compile()


def _largest_array(program):
  shapes = re.findall(r'[fsu]\d+\[([\d,]+)\]', program.as_text())
  return max(math.prod(map(int, shape.split(','))) for shape in shapes)


@cases.fast_first(
  ('make', 'options'),
  [(prism_optax.prism, {})],
  [(prism_optax.prism, {}), (prism_optax.published_prism, {}),
   (contrib.prism_muon, {}), (prism_optax.prism, {'weight_decay': 0.0})],
)  # fmt: skip
def test_no_array_is_as_large_as_a_weight(make, options):
  largest = _largest_array(_compiled(False, make, **options))
  # All modules of one shape stacked, coordinates beside their bases.
  assert largest <= 2 * MODULES * max(OUTPUTS, INPUTS) * RANK
  assert largest < OUTPUTS * INPUTS / 10


@pytest.mark.slow
def test_the_clip_holds_the_gradients_of_the_examples_and_nothing_larger():
  largest = _largest_array(_compiled(True))
  assert largest <= BATCH * MODULES * max(OUTPUTS, INPUTS) * RANK


def test_the_state_is_as_large_as_adams():
  """The first moment and one set of bases; then r x r matrices, and a key."""
  state = prism_optax.prism(0.1, **OPTIONS).init(PARAMS)
  entries = sum(x.size for x in jax.tree.leaves(state))
  adam = 2 * sum(x.size for x in jax.tree.leaves(PARAMS))
  assert entries <= adam + MODULES * 4 * RANK**2 + 10  # V and N, either side.


@pytest.mark.skipif(
  jax.default_backend() != 'cpu', reason='The bound is for the CPU compiler.'
)
def test_temporary_memory_is_a_few_times_the_factors():
  analysis = _compiled(False).memory_analysis()
  factors = 4 * sum(x.size for x in jax.tree.leaves(PARAMS))
  assert analysis.temp_size_in_bytes <= 12 * factors
