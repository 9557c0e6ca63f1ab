"""A state has one program, and each program is proved before it runs."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests import cases
from tests.cases import DATA, FROZEN, PARAMS


def losses(copies, frozen, x, y):
  """Of a batch; a second frozen weight makes it mix the records."""
  pair = copies['layer']
  z = jnp.einsum('bi,bir,bro->bo', x, pair['lora_a'], pair['lora_b'])
  z = z + x @ frozen['weight'] + copies['head']
  of_each = jnp.sum((z - y) ** 2, -1)
  return of_each * jnp.sum(x) if 'mixed' in frozen else of_each


def begun():
  made = cases.make(optax.sgd(0.1), loss=losses, batched_loss=True)
  state = made.init(PARAMS)
  frozen = {'weight': jnp.asarray(FROZEN)}
  batches = iter(made.batches(state, DATA))
  state = made.step(state, next(batches), frozen)
  assert all(made.proofs)
  return made, state, batches, frozen


def test_frozen_weights_of_another_structure_are_another_program():
  made, state, batches, frozen = begun()
  with pytest.raises(ValueError, match='reduce_sum at program_test'):
    made.step(state, next(batches), frozen | {'mixed': jnp.ones(())})


def test_frozen_weights_that_change_nothing_are_another_run():
  made, state, batches, frozen = begun()
  with pytest.raises(ValueError, match='another one: program'):
    made.step(state, next(batches), frozen | {'unused': jnp.ones(())})


def test_records_of_another_shape_are_other_data():
  made, state, _, _ = begun()
  wide = np.concatenate([DATA[0], DATA[0]], 1), DATA[1]
  with pytest.raises(ValueError, match='another one: data'):
    made.batches(state, wide)
