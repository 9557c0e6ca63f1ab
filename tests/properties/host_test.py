"""Laws of the accounting and of the hidden-state mechanism."""

import math

import dp_accounting
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given

from prism_optax import accounting, inference
from tests.properties import cases

multipliers = st.floats(0.3, 50.0)
deltas = st.floats(1e-12, 1e-2)
RELATIONS = list(accounting.NeighboringRelation)


@cases.settings
@given(multipliers, st.integers(1, 50), deltas, st.floats(1.01, 3.0))
def test_more_noise_fewer_steps_and_a_larger_delta_cost_less(
  sigma, steps, delta, factor
):
  def spent(sigma, steps, delta):
    # Full batches: RDP has a closed form, and no grid.
    event = accounting.dpsgd_event(sigma, 1.0, steps)
    return accounting.epsilon(event, delta, accountant='rdp')

  found = spent(sigma, steps, delta)
  assert spent(sigma * factor, steps, delta) <= found
  assert spent(sigma, steps + 1, delta) >= found
  assert spent(sigma, steps, min(1.0, delta * factor)) <= found
  # Never below the exact value of the Gaussian mechanism.
  exact = accounting.gaussian_epsilon(math.sqrt(steps) / sigma, delta)
  assert found >= exact * (1 - 1e-9)


@cases.settings
@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=8))
def test_joint_multiplier_is_below_every_part(groups):
  joint = accounting.joint_noise_multiplier(groups)
  assert joint <= min(groups) * (1 + 1e-12)
  assert joint >= min(groups) / math.sqrt(len(groups)) * (1 - 1e-12)
  assert math.isclose(
    joint, accounting.joint_noise_multiplier(groups[::-1]), rel_tol=1e-12
  )


@cases.settings
@given(
  st.floats(0.1, 5.0),
  deltas,
  st.lists(st.tuples(st.sampled_from('ab'), st.floats(0.5, 40.0)), max_size=12),
)
def test_no_sequence_of_releases_passes_a_cap(cap, delta, releases):
  budget = accounting.PrivacyBudget(cap, delta)
  squares = {'a': 0.0, 'b': 0.0}
  for session, sigma in releases:
    before = budget.spent(session)
    try:
      spent = budget.spend(dp_accounting.GaussianDpEvent(sigma), session)
    except accounting.BudgetExceeded:
      assert budget.spent(session) == before
      continue
    squares[session] += sigma**-2
    assert before <= spent <= cap
    # All of a session's Gaussian releases are one of their joint multiplier.
    exact = accounting.gaussian_epsilon(squares[session] ** 0.5, delta)
    assert spent == pytest.approx(exact, rel=1e-6, abs=1e-9)


@cases.settings
@given(st.floats(0.05, 8.0), deltas, st.floats(1e-3, 1e3))
def test_exact_calibration_meets_its_target_and_scales(epsilon, delta, size):
  stddev = inference.gaussian_stddev(epsilon, delta, size)
  reached = accounting.gaussian_epsilon(size / stddev, delta)
  assert reached <= epsilon * (1 + 1e-6)
  assert reached >= epsilon * (1 - 1e-3)
  unit = inference.gaussian_stddev(epsilon, delta, 1.0)
  assert math.isclose(stddev, unit * size, rel_tol=1e-6)


_HIDDEN = (3, 4)  # One shape: compiled once.


@jax.jit
def _clipped(hidden, norm, mask):
  return inference.privatize_hidden_states(
    hidden, jax.random.key(0), l2_clip_norm=norm, stddev=0.0, mask=mask
  )


@cases.settings
@given(
  hnp.arrays(
    np.float32,
    _HIDDEN,
    elements=st.floats(width=32, allow_nan=True, allow_infinity=True),
  ),
  st.floats(1e-3, 1e3),
  hnp.arrays(bool, _HIDDEN[:1]),
)
def test_hidden_states_are_clipped_whatever_they_are(hidden, norm, mask):
  for state in (
    _clipped(hidden, jnp.float32(norm), mask),
    inference.privatize_on_host(
      hidden, l2_clip_norm=float(np.float32(norm)), stddev=0.0, mask=mask
    ),
  ):
    assert state.shape == hidden.shape
    assert np.isfinite(state).all()
    lengths = np.linalg.norm(np.float64(state), axis=-1)
    assert (lengths <= np.float32(norm)).all()
    assert not np.asarray(state)[~mask].any()


@cases.settings
@given(st.sampled_from(RELATIONS), st.floats(1e-3, 1e3))
def test_sensitivity_follows_from_the_relation(relation, norm):
  found = inference.hidden_state_sensitivity(norm, relation)
  assert found in (norm, 2 * norm)
  assert (found == 2 * norm) == (
    relation is accounting.NeighboringRelation.REPLACE_ONE
  )
