"""What is timed side by side does the same."""

import jax
import numpy as np
import pytest

from benchmarks.speed import make_private as benchmark
from benchmarks.speed import steps


@pytest.mark.slow
@pytest.mark.parametrize('batched', [False, True])
def test_by_hand_and_make_private_do_the_same(batched):
  """Two steps with the same keys, bit for bit.

  Without the digest that makes the noise of each program another one.
  """
  problem = steps.digits(rows=8)
  private = benchmark.PrivateStep(problem, batched, 2)
  by_hand = benchmark.by_hand(problem, batched, private.batch)
  found, state = private.state.params, private.state.optimizer
  for _ in range(2):
    found, state = private.training._step(
      found, state, problem.frozen, private.batch.examples,
      private.batch.is_padding_example, None,
    )[:2]  # fmt: skip
    by_hand()
  params, _ = by_hand._carried
  jax.tree.map(np.testing.assert_array_equal, found, params)
  assert not np.array_equal(
    params['last']['lora_b'], problem.params['last']['lora_b']
  )
