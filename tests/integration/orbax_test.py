"""Parameters and optimizer state through an orbax checkpoint."""

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

from tests.integration import cases


@pytest.mark.slow
def test_a_restored_run_goes_on_bit_for_bit(tmp_path):
  """Moments, the frames they are written in, and the noise key come back."""
  tx = cases.prism(optax.linear_schedule(0.1, 0.01, 10), weight_decay=0.1)
  update = jax.jit(tx.update)

  def train(params, state, steps):
    for step in steps:
      grads = cases.trainable(
        cases.per_example_gradients(
          {**cases.params(), **params}, cases.batch(step)
        )
      )
      updates, state = update(grads, state, params)
      params = optax.apply_updates(params, updates)
    return params, state

  start = cases.trainable(cases.params())
  params, state = train(start, tx.init(start), range(2))
  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(tmp_path / 'run', (params, state))
    checkpointer.wait_until_finished()
    shapes = jax.eval_shape(lambda: (start, tx.init(start)))
    restored = checkpointer.restore(
      tmp_path / 'run', jax.tree.map(_with_placement, shapes)
    )
  want, want_state = train(params, state, range(2, 4))
  got, got_state = train(*restored, range(2, 4))
  jax.tree.map(np.testing.assert_array_equal, got, want)
  assert jax.tree.structure(got_state) == jax.tree.structure(want_state)
  for x, y in zip(
    jax.tree.leaves(got_state), jax.tree.leaves(want_state), strict=True
  ):
    assert bool((x == y).all())
  assert np.abs(got['head'] - params['head']).max() > 1e-3


def _with_placement(x):
  device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device)
