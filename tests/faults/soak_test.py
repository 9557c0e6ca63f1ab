"""Ten thousand private steps: nothing grows, and the sum is exact."""

import gc
import math

import dp_accounting
import jax
import numpy as np
import psutil
import pytest
from dp_accounting import pld
from finetuning import privacy, sampling

from tests.examples import training_test
from tests.faults import divergence_test

model = training_test.model
noisy = training_test.noisy
STEPS = 10_000


@pytest.mark.slow
def test_ten_thousand_steps(model, noisy):
  compiled, state = noisy('prism')
  rate_and_frozen = np.float32(1e-3), model[2]
  examples = training_test._batch(40)
  seed = np.arange(4, dtype=np.uint32)
  plan = privacy.Plan(40, training_test.BATCH, 9, STEPS, 20.0, 1e-5)

  def batch_of(number):
    drawn = sampling.draw(
      seed, number, dataset_size=40,
      sampling_probability=plan.sampling_probability, size=9,
    )  # fmt: skip
    return sampling.gather(examples, drawn)

  process, seen, keys, cut = psutil.Process(), [], set(), 0
  for number in range(STEPS):
    batch = batch_of(number)
    cut += not batch[1].any()
    state, _ = compiled(state, rate_and_frozen, *batch)
    if number % 1000 == 999:
      jax.block_until_ready(state)
      gc.collect()
      seen.append((process.memory_info().rss, len(jax.live_arrays())))
      keys.update(map(str, divergence_test._keys(state)))
  # By thousands: a leak shows in each of them (of one batch a step 220 kB,
  # of one state 1.6 MB), what an allocator takes at times does not.
  assert np.median(np.diff([memory for memory, _ in seen])) < 100e3
  assert seen[-1][1] == seen[0][1]
  assert int(state.step) == STEPS
  assert int(state.held) == 0
  assert len(keys) == STEPS / 1000
  assert cut > 0  # Batches above the limit came, and were cut.
  assert all(np.isfinite(x).all() for x in jax.tree.leaves(state.params))

  # What is reported is the mechanism composed ten thousand times, cut and all.
  one = dp_accounting.TruncatedSubsampledGaussianDpEvent(
    40, training_test.BATCH / 40, 9, 20.0
  )
  exact = pld.PLDAccountant().compose(one, STEPS).get_epsilon(1e-5)
  assert math.isclose(plan.epsilon(int(state.step)), exact, rel_tol=1e-12)
