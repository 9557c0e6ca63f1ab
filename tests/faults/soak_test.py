"""Ten thousand private steps: nothing grows, and the sum is exact."""

import functools
import gc

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
import psutil
import pytest

import prism_optax
from prism_optax import training
from tests import cases
from tests.cases import DATA, FROZEN, PARAMS

STEPS = 10_000


def _keys(state):
  return [
    jax.random.key_data(leaf).tolist()
    for leaf in jax.tree.leaves(state.optimizer)
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
  ]


@pytest.mark.slow
def test_ten_thousand_steps():
  private = cases.make(
    functools.partial(prism_optax.prism, 1e-3), dataset_size=40,
    expected_batch_size=4, steps=STEPS, noise_multiplier=20.0, delta=1e-5,
    prng_key=None, execution=training.Execution(padded_batch_size=9),
  )  # fmt: skip
  state = private.init(PARAMS)
  process, seen, keys, full = psutil.Process(), [], set(), 0
  for number, batch in enumerate(private.batches(state, DATA)):
    full += not batch.is_padding_example.any()
    state = private.step(state, batch, FROZEN)
    if number % 1000 == 999:
      jax.block_until_ready(state.params)
      gc.collect()
      memory = process.memory_info()
      # Pages of files come and go as the system pleases.
      seen.append((memory.rss - memory.shared, len(jax.live_arrays())))
      keys.update(map(str, _keys(state)))
  # By thousands: a leak shows in each of them (of one batch a step 220 kB,
  # of one state 1.6 MB), what an allocator takes at times does not.
  assert np.median(np.diff([memory for memory, _ in seen])) < 100e3
  assert seen[-1][1] == seen[0][1]
  assert int(state.step) == STEPS
  assert int(state.held) == 0
  assert len(keys) == STEPS / 1000
  assert full > 0  # Batches above the limit came, and were cut.
  assert all(np.isfinite(x).all() for x in jax.tree.leaves(state.params))

  # What is reported is the mechanism composed ten thousand times, cut and all.
  one = dp_accounting.TruncatedSubsampledGaussianDpEvent(40, 0.1, 9, 20.0)
  assert private.event() == dp_accounting.SelfComposedDpEvent(one, STEPS)
