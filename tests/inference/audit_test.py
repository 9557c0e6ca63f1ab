"""An attack on the mechanism: it must not win more than epsilon allows.

The worst pair of neighbours, two vectors that point in opposite directions and
are longer than the clip, many times over. For each threshold of the attack's
statistic, epsilon is at least ``log((power - delta) / false positives)``; the
counts are replaced by their confidence limits.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from prism_optax import accounting, inference

EPSILON, DELTA, C = 1.0, 1e-5, 0.7
# One in a million: the bound over all thresholds is wrong less often than that.
CONFIDENCE = 1e-6


def epsilon_lower_bound(first, second):
  """The largest bound over thresholds that were fixed beforehand."""
  thresholds = np.quantile(second, 1 - np.geomspace(3e-4, 0.5, 12))
  # Chosen on one half, counted on the other.
  first, second = first[::2], second[1::2]
  trials, alpha = len(first), CONFIDENCE / (2 * len(thresholds))
  best = 0.0
  for threshold in thresholds:
    hits = np.sum(first > threshold)
    alarms = np.sum(second > threshold)
    power = stats.beta.ppf(alpha, hits, trials - hits + 1)
    false = stats.beta.ppf(1 - alpha, alarms + 1, trials - alarms)
    if power > DELTA:
      best = max(best, np.log((power - DELTA) / false))
  return best


@functools.partial(jax.jit, static_argnums=2)
def on_device(state, stddev, draws):
  hidden = jnp.broadcast_to(jnp.asarray(state, jnp.float32), (draws, 3))
  key = jax.random.key((state[0] > 0).astype(int))
  return inference.privatize_hidden_states(
    hidden, key, l2_clip_norm=C, stddev=stddev
  )


def on_host(state, stddev, draws):
  return inference.privatize_on_host(
    np.broadcast_to(state, (draws, 3)), l2_clip_norm=C, stddev=stddev
  )


def attacked(mechanism, stddev, draws=600_000):
  """Lower bound for two states that only their signs tell apart."""
  state = np.array([60.0, -80.0, 0.0])
  direction = state / np.linalg.norm(state)
  outputs = [
    np.asarray(mechanism(sign * state, stddev, draws), np.float64) @ direction
    for sign in (1, -1)
  ]
  # Likelihood ratio: the projection on what tells them apart.
  return epsilon_lower_bound(*outputs)


@pytest.mark.parametrize(
  'mechanism', [on_device, pytest.param(on_host, marks=pytest.mark.slow)]
)
def test_attack_stays_below_the_claim_and_sees_half_the_noise(mechanism):
  sensitivity = inference.hidden_state_sensitivity(
    C, accounting.NeighboringRelation.REPLACE_ONE
  )
  stddev = inference.gaussian_stddev(EPSILON, DELTA, sensitivity)
  honest = attacked(mechanism, stddev)
  assert honest <= EPSILON
  # It is an attack: with perfect noise the bound would be zero.
  assert honest > EPSILON / 4
  assert attacked(mechanism, stddev / 2) > EPSILON


def test_attack_sees_a_sensitivity_that_is_taken_for_the_clip():
  """Noise for C where two vectors differ by 2 C: the claim does not hold."""
  stddev = inference.gaussian_stddev(EPSILON, DELTA, C)
  assert attacked(on_device, stddev) > EPSILON
