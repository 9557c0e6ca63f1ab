"""A step that is not finite leaves the parameters and counts all the same."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import prism_optax
from tests import cases
from tests.cases import DATA, FROZEN, PARAMS


def rate(count):
  """Overflows in the second of three steps."""
  return jnp.where(count == 1, jnp.inf, 0.1)


def best_so_far():
  """A state that holds infinity, as that of a search may."""

  def update(updates, state, params=None):
    return updates, state

  return optax.GradientTransformation(lambda params: jnp.array(jnp.inf), update)


@pytest.mark.parametrize(
  'optimizer',
  [
    optax.chain(best_so_far(), optax.sgd(rate, momentum=0.9)),
    functools.partial(prism_optax.prism, rate),
  ],
  ids=['momentum', 'prism'],
)
def test_floats_stay_and_keys_and_counters_move_on(optimizer):
  private = cases.make(optimizer, prng_key=None)
  state = private.init(PARAMS)
  seen = [jax.tree.map(_saved, state)]
  for batch in private.batches(state, DATA):
    state = private.step(state, batch, FROZEN)
    seen.append(jax.tree.map(_saved, state))
  assert [int(x.held) for x in seen] == [0, 0, 1, 1]
  assert [int(x.step) for x in seen] == [0, 1, 2, 3]
  before, held = ((x.params, x.optimizer) for x in seen[1:3])
  moved = 0
  for x, y in zip(*map(jax.tree.leaves, (before, held)), strict=True):
    if np.issubdtype(x.dtype, np.floating):
      np.testing.assert_array_equal(x, y)
    else:
      moved += not np.array_equal(x, y)
  assert moved >= 2  # The key of the noise and the count of the schedule.
  for one, other in ((0, 1), (2, 3)):  # The others were taken.
    assert not np.array_equal(
      seen[one].params['head'], seen[other].params['head']
    )
  assert all(private.proofs)
  assert len(private.proofs) == 2
  assert '3 of 3 steps' in private.statement(state)


def _saved(x):
  is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
  return np.asarray(jax.random.key_data(x) if is_key else x).copy()
