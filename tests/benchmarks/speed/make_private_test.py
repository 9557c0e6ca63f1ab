"""What is timed side by side does the same."""

import jax
import numpy as np
import pytest

from benchmarks.speed import make_private as benchmark


@pytest.mark.slow
@pytest.mark.parametrize('batched', [False, True])
def test_by_hand_and_make_private_do_the_same(batched):
  """Two steps with the same keys, bit for bit."""
  problem = benchmark.digits(rows=8)
  private = benchmark.PrivateStep(problem, batched, 2)
  by_hand = benchmark.by_hand(problem, batched, private.batch)
  for _ in range(2):
    private()
    by_hand()
  params, _ = by_hand._carried
  jax.tree.map(np.testing.assert_array_equal, private.state.params, params)
  assert not np.array_equal(
    params['last']['lora_b'], problem.params['last']['lora_b']
  )
