"""Laws of private trainings: one record moves little, batches hold records."""

import functools

import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given

from prism_optax import training
from tests import cases as shared
from tests.properties import cases

RECORDS, C = 6, 2.0
PARAMS = {'a': jnp.zeros(2), 'b': jnp.zeros((2, 1))}
GROUPS = training.GroupClipping(
  lambda x: {'a': 'a', 'b': 'b'}, {'a': 1, 'b': 2}
)
RULES = {
  'flat': None, 'automatic': training.AutomaticClipping(0.1), 'groups': GROUPS,
  'quantile': training.QuantileClipping(),
}  # fmt: skip
# A record is its gradient: ordinary, huge, NaN or infinite.
gradients = hnp.arrays(
  np.float32,
  (RECORDS, 4),
  elements=st.floats(allow_nan=True, allow_infinity=True, width=32),
)


def loss(params, x):
  return jnp.vdot(params['a'], x[:2]) + jnp.vdot(params['b'], x[2:])


@functools.cache
def step_of(rule):
  """From all records to the step that they make, without noise."""
  private = shared.make(
    optax.sgd(1.0), loss=loss, params=PARAMS, clipping=RULES[rule], steps=1,
    l2_clip_norm=C, noise_multiplier=0.0, expected_batch_size=RECORDS,
    dataset_size=RECORDS, prng_key=None,
  )  # fmt: skip

  def step(records):
    state = private.init(PARAMS)
    (batch,) = private.batches(state, records)
    params = private.step(state, batch).params
    return np.concatenate(jax.tree.leaves(params), None)

  return step


@pytest.mark.slow
@cases.settings
@given(st.sampled_from(list(RULES)), gradients, st.permutations(range(RECORDS)))
def test_a_record_moves_a_step_by_at_most_its_share(rule, records, order):
  step = step_of(rule)
  moved = step(records)
  assert np.isfinite(moved).all()
  np.testing.assert_array_equal(step(records[order]), moved)
  without = records.copy()
  without[0] = np.nan  # Counts as zero: as if it were not there.
  share = (1.0 if rule == 'quantile' else C) / RECORDS
  # Rounding of floats to which the exact sums are brought at the end.
  assert np.linalg.norm(np.float64(moved) - step(without)) <= share * (1 + 1e-6)
