"""An attack on the mechanism: it must not win more than epsilon allows.

The worst pair of neighbours, two vectors that point in opposite directions and
are longer than the clip, many times over. A threshold of the attack's statistic
is chosen on one half and counted on the other; from the limits of the counts
jax_privacy's auditor has a lower bound of epsilon.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax_privacy import auditing

from prism_optax import accounting, inference

EPSILON, DELTA, C = 1.0, 1e-5, 0.7
# How often the bound may be wrong.
CONFIDENCE = 1e-6


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
  return auditing.CanaryScoreAuditor(*outputs).epsilon_clopper_pearson(
    CONFIDENCE, DELTA, threshold_strategy=auditing.Split(seed=0)
  )


@pytest.mark.slow
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
  # The host draws anew each time, and one threshold in many is a bad one.
  assert max(attacked(mechanism, stddev / 2) for _ in range(2)) > EPSILON


@pytest.mark.slow
def test_attack_sees_a_sensitivity_that_is_taken_for_the_clip():
  """Noise for C where two vectors differ by 2 C: the claim does not hold."""
  stddev = inference.gaussian_stddev(EPSILON, DELTA, C)
  assert attacked(on_device, stddev) > EPSILON
