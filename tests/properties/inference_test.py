"""Laws of what a release of hidden states costs, and of what is left of it."""

import math

import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given

from prism_optax import accounting, inference
from tests.oracles import oracles
from tests.properties import cases

RELATIONS = st.sampled_from(list(accounting.NeighboringRelation))
REPLACE = accounting.NeighboringRelation.REPLACE_ONE
SHAPES = st.sampled_from([(5, 4, 2), (3, 3, 3), (6, 2, 1)])
norms = st.floats(1e-3, 1e3)
states = hnp.arrays(
  np.float64, (3, 4), elements=st.floats(allow_nan=True, allow_infinity=True)
)
masks = hnp.arrays(bool, (3,))


@cases.settings
@given(
  st.floats(0.5, 50.0), norms, RELATIONS, st.integers(1, 300),
  st.floats(1e-9, 1e-3),
)  # fmt: skip
def test_releases_cost_what_their_vectors_cost_together(
  multiplier, norm, relation, count, delta
):
  stddev = multiplier * norm
  event = inference.release_event(stddev, norm, relation, count)
  moved = inference.hidden_state_sensitivity(norm, relation)
  assert moved == norm * (2 if relation is REPLACE else 1)
  exact = accounting.gaussian_epsilon(math.sqrt(count) * moved / stddev, delta)
  budget = accounting.PrivacyBudget(1e6, delta)
  assert math.isclose(
    budget.spend(event, 'a'), exact, rel_tol=1e-9, abs_tol=1e-12
  )
  # Replacing a query costs as much as four releases of a query or none.
  add = accounting.NeighboringRelation.ADD_OR_REMOVE_ONE
  if relation is REPLACE:
    other = inference.release_event(stddev, norm, add, 4 * count)
    found = accounting.PrivacyBudget(1e6, delta).spend(other, 'a')
    assert math.isclose(found, exact, rel_tol=1e-9, abs_tol=1e-12)
  # Exact sampling is charged in concentrated privacy, mu^2 / 2 a release.
  event = inference.release_event(
    stddev, norm, relation, count, noise='discrete'
  )
  one = event
  if count > 1:
    one, times = event.event, event.count
    assert times == count
  assert math.isclose(one.rho, (moved / stddev) ** 2 / 2, rel_tol=1e-12)


_delta = jax.jit(inference.lora_delta)
_release = jax.jit(inference.privatize_hidden_states)


@cases.few
@given(
  cases.seeds, SHAPES, st.sampled_from([jnp.float32, jnp.bfloat16]),
  st.sampled_from([0.5, 1.0, 16.0]),
)  # fmt: skip
def test_the_delta_is_linear_and_that_of_the_product(seed, shape, dtype, scale):
  rng, (m, n, rank) = np.random.default_rng(seed), shape
  factors = [rng.normal(size=(k, rank)) for k in (m, n)]
  other = oracles.change_gauge(factors, oracles.random_gauge(rng, rank, 10.0))
  hidden = jnp.asarray(rng.normal(size=(2, 3, n)), dtype)
  pair = [jnp.asarray(x, dtype) for x in factors]
  found = _delta(hidden, *pair, scale=scale)
  assert found.shape == (2, 3, m)
  left, right = (np.float64(x) for x in pair)
  exact = scale * np.float64(hidden) @ right @ left.T
  size = np.abs(exact).max() * float(jnp.finfo(dtype).eps) * 8 * sum(shape)
  np.testing.assert_allclose(np.float64(found), exact, atol=size)
  # Powers of two pass through every rounding.
  doubled = _delta(2 * hidden, *pair, scale=scale / 2)
  np.testing.assert_array_equal(np.float64(found), np.float64(doubled))
  if dtype == jnp.float32:
    pair = [jnp.asarray(x, dtype) for x in other]
    gauge = _delta(hidden, *pair, scale=scale)
    np.testing.assert_allclose(gauge, exact, atol=10 * size)


@cases.settings
@given(states, states, st.integers(0, 2**32 - 1))
def test_the_noise_knows_nothing_of_the_states(hidden, other, seed):
  """The same for any two of them, whatever they hold; no state without it."""
  key = jax.random.key(seed)
  noises = []
  for state in (hidden, other, np.zeros_like(hidden)):
    state = np.float32(np.clip(state, -1e38, 1e38))
    released, clipped = (
      _release(state, key, l2_clip_norm=1.0, stddev=x) for x in (3.0, 0.0)
    )
    assert np.isfinite(released).all()
    noises.append(released - clipped)
  # Sums of numbers below thirty, rounded to float32.
  for noise in noises[:2]:
    np.testing.assert_allclose(noise, noises[2], atol=1e-5)
  assert (np.asarray(noises[2]) != 0).all()


@cases.settings
@given(
  hnp.arrays(
    np.float32,
    (3, 4),
    elements=st.floats(width=32, allow_nan=True, allow_infinity=True),
  ),
  norms,
  masks,
)
def test_hidden_states_are_clipped_whatever_they_are(hidden, norm, mask):
  norm = float(np.float32(norm))
  options = {'l2_clip_norm': norm, 'stddev': 0.0, 'mask': mask}
  for state in (
    _release(hidden, jax.random.key(0), **options),
    inference.privatize_on_host(hidden, **options),
  ):
    assert state.shape == hidden.shape
    assert np.isfinite(state).all()
    lengths = np.linalg.norm(np.float64(state), axis=-1)
    assert (lengths <= norm).all()
    assert not np.asarray(state)[~mask].any()
