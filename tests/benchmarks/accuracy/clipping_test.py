"""The comparison of clips divides the loss where others raise the norm."""

import itertools

import jax
import numpy as np
import pytest

from benchmarks.accuracy import clipping as benchmark
from prism_optax import training


@pytest.mark.slow
@pytest.mark.parametrize('method', ['prism', 'dp-adamw'])
def test_a_loss_over_the_norm_is_a_clip_of_that_norm(method):
  setting = {
    'epsilon': 8.0, 'method': method, 'rule': 'flat', 'records of a user': 1,
  }  # fmt: skip
  params, frozen, rows, _ = benchmark.problem()
  scaled = benchmark.private_training(setting, 0.1, 3.0, 5)
  plain = training.make_private(
    lambda *args: benchmark.network.loss(*args),
    params,
    optimizer=benchmark.optimizer(method, 0.1),
    l2_clip_norm=3.0,
    noise_multiplier=scaled.noise_multiplier,
    expected_batch_size=benchmark.BATCH,
    dataset_size=len(rows.x),
    steps=benchmark.STEPS,
    delta=benchmark.DELTA,
    prng_key=5,
  )
  ends = []
  for private in (scaled, plain):
    state = private.init(params)
    carry = state.params, state.optimizer
    for batch in itertools.islice(private.batches(state, tuple(rows)), 3):
      # Without the digest that makes the noise of each program another one.
      *carry, _ = private._step(
        *carry, frozen, batch.examples, batch.is_padding_example, None
      )
    ends.append(carry[0])
  # Rounding of other units, and Adam's epsilon of 1e-8.
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-4), *ends
  )
