"""The comparison is fair: baselines do what their papers say."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from benchmarks.common import baselines, methods

ROWS, COLUMNS, RANK = 7, 5, 2


@pytest.fixture
def params():
  keys = jax.random.split(jax.random.key(0), 2)
  pair = {
    'lora_a': jax.random.normal(keys[0], (ROWS, RANK)),
    'lora_b': jax.random.normal(keys[1], (RANK, COLUMNS)),
  }
  return {'layers': [{'up': pair}]}


def test_lora_plus_is_adam_with_a_faster_b(params):
  gradient = jax.tree.map(np.ones_like, params)

  @jax.jit
  def first_updates(gradient):
    txs = optax.adam(1e-2), methods.optimizer('lora+', 1e-2, stddev=0.0)
    return [tx.update(gradient, tx.init(gradient), gradient)[0] for tx in txs]

  slow, fast = jax.device_get(first_updates(gradient))
  slow, fast = (x['layers'][0]['up'] for x in (slow, fast))
  np.testing.assert_allclose(fast['lora_a'], slow['lora_a'], rtol=1e-6)
  np.testing.assert_allclose(fast['lora_b'], 6 * slow['lora_b'], rtol=1e-6)


def test_adamw_decayed_warms_up_and_decays(params):
  tx = methods.optimizer('dp-adamw, decayed', 0.5, stddev=0.0)
  state, seen, update = jax.jit(tx.init)(params), [], jax.jit(tx.update)
  nothing = jax.tree.map(np.zeros_like, params)
  for gradient in (jax.tree.map(np.ones_like, params), nothing):
    updates, state = update(gradient, state, params)
    seen.append(updates['layers'][0]['up']['lora_a'])
  weight = np.asarray(params['layers'][0]['up']['lora_a'])
  # The first step of Adam is one; 0.1 is let through, then 0.19. Adam's
  # 1 - 0.999 is off by 2e-5 of itself in float32.
  np.testing.assert_allclose(seen[0], -0.05 * (1 + weight), atol=1e-5)
  # Then the moments that are left, (0.9 * 0.1) / (1 - 0.9^2) over the root of
  # (0.999 * 0.001) / (1 - 0.999^2).
  left = 0.9 * 0.1 / (1 - 0.9**2) / (0.999e-3 / (1 - 0.999**2)) ** 0.5
  np.testing.assert_allclose(seen[1], -0.095 * (left + weight), atol=1e-5)


def test_adam_bc_takes_the_noise_out_of_the_second_moment(params):
  @jax.jit
  def first(stddev, size):
    tx = baselines.scale_by_bc(stddev)
    gradient = jax.tree.map(lambda x: jnp.full_like(x, size), params)
    updates, _ = tx.update(gradient, tx.init(params))
    return updates['layers'][0]['up']['lora_a'][0, 0]

  # After one step: m = g, v = g^2. Without noise that is Adam's unit step.
  assert float(first(0.0, 3.0)) == pytest.approx(1, rel=1e-4)
  assert float(first(4.0, 5.0)) == pytest.approx(5 / 3, rel=1e-4)
