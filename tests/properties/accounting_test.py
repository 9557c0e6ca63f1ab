"""Laws of accounting: exact formulas, compositions, calibration, statements."""

import itertools
import math
import re

import dp_accounting
import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
from dp_accounting import dp_event
from hypothesis import given

from prism_optax import accounting
from tests.core import seams
from tests.properties import cases

RELATIONS = st.sampled_from(list(accounting.NeighboringRelation))
REPLACE = accounting.NeighboringRelation.REPLACE_ONE
mus = st.floats(1e-3, 30.0)
deltas = st.floats(1e-12, 0.1)
# Three times as much is no cause for a warning yet.
small_deltas = st.floats(1e-12, 3e-4)


def _delta_by_quadrature(mu, epsilon):
  """E (1 - exp(epsilon - loss))_+ with loss ~ N(mu^2 / 2, mu^2)."""
  # With z = (loss - mu^2 / 2) / mu and u = z - t: nothing cancels.
  t = epsilon / mu - mu / 2
  nodes, weights = np.polynomial.legendre.leggauss(200)
  width = 40 / t if t > 4 else 10 + max(-t, 0)
  total = 0.0
  for start in np.linspace(0, width, 9)[:-1]:
    u = start + width / 16 * (nodes + 1)
    density = np.exp(-((t + u) ** 2) / 2) / math.sqrt(2 * math.pi)
    total += width / 16 * (weights @ (density * -np.expm1(-mu * u)))
  return total


@cases.settings
@given(mus, st.floats(0.0, 50.0), st.floats(1.001, 2.0))
def test_delta_of_a_gaussian_is_an_integral(mu, epsilon, factor):
  found = seams.gaussian_delta(mu, epsilon)
  assert 0 <= found <= 1
  # Quadrature of 1,600 nodes; denormal tails aside.
  expected = _delta_by_quadrature(mu, epsilon)
  assert math.isclose(found, expected, rel_tol=1e-8, abs_tol=1e-290)
  assert seams.gaussian_delta(mu * factor, epsilon) >= found
  assert seams.gaussian_delta(mu, epsilon * factor) <= found
  # Delta at epsilon 0 is the distance in total variation.
  variation = math.erf(mu / math.sqrt(8))
  assert math.isclose(seams.gaussian_delta(mu, 0.0), variation, rel_tol=1e-11)


counts = st.integers(0, 10**14)


@cases.settings
@given(counts, counts)
def test_drawn_noise_guarantees_less_the_more_there_is(some, more):
  one = seams.release_guarantee(2.0, 1e-6, some)
  both = seams.release_guarantee(2.0, 1e-6, some + more)
  assert 2.0 <= one[0] <= both[0]
  assert 1e-6 <= one[1] <= both[1] <= 1.0
  # Entries in two parts are charged no less than together.
  parts = seams.release_guarantee(*one, more)
  assert both[0] <= parts[0] * (1 + 1e-12)
  assert both[1] <= parts[1] * (1 + 1e-12)


@cases.settings
@given(st.floats(1e-3, 1000.0), st.floats(1e-12, 0.9), st.floats(1.001, 2.0))
def test_mu_and_epsilon_are_inverse_and_round_to_the_safe_side(
  epsilon, delta, factor
):
  mu = seams.gaussian_mu(epsilon, delta)
  assert seams.gaussian_delta(mu, epsilon) <= delta
  assert seams.gaussian_delta(mu * (1 + 1e-9), epsilon) > delta
  back = accounting.gaussian_epsilon(mu, delta)
  assert math.isclose(back, epsilon, rel_tol=1e-8)
  assert seams.gaussian_mu(epsilon * factor, delta) > mu
  assert seams.gaussian_mu(epsilon, min(0.95, delta * factor)) > mu


def _strategy(seed, steps, bands):
  """Lower triangular, positive diagonal, signs of all kinds."""
  c = np.random.default_rng(seed).normal(size=(steps, steps))
  c = np.tril(np.triu(c, 1 - bands))
  np.fill_diagonal(c, 0.1 + np.abs(np.diag(c)))
  c[:, 0] /= 9  # Its products with the next column exceed its square.
  return c


def _reached(c, separation, most):
  """The largest ||C u|| over allowed patterns and signs u."""
  best = 0.0
  for size in range(1, most + 1):
    for pattern in itertools.combinations(range(len(c)), size):
      if all(j - i >= separation for i, j in itertools.pairwise(pattern)):
        signs = np.array(list(itertools.product((-1, 1), repeat=size)))
        moved = np.linalg.norm(c[:, list(pattern)] @ signs.T, axis=0)
        best = max(best, moved.max())
  return best


@cases.settings
@given(
  cases.seeds, st.integers(2, 6), st.integers(1, 6), st.integers(1, 3),
  st.sampled_from([None, 1, 2, 3]), st.floats(1e-3, 1e3),
)  # fmt: skip
def test_sensitivity_bounds_every_pattern(
  seed, steps, bands, separation, count, size
):
  c = _strategy(seed, steps, bands)

  def found(c, count=count, separation=separation):
    return seams.matrix_sensitivity(
      c, max_participations=count, min_separation=separation
    )

  reached = _reached(c, separation, min(count or steps, steps))
  assert found(c) >= reached * (1 - 1e-12)
  if bands <= separation or count == 1:  # Orthogonal columns, or one.
    assert found(c) <= reached * (1 + 1e-12)
  assert math.isclose(found(size * c), size * found(c), rel_tol=1e-9)
  assert found(c, separation=separation + 1) <= found(c) * (1 + 1e-12)
  if count:
    assert found(c, count=count + 1) >= found(c) * (1 - 1e-12)
  # Independent noise: as many releases as there are participations.
  most = min(-(-steps // separation), count or steps)
  assert math.isclose(found(np.eye(steps)), math.sqrt(most), rel_tol=1e-12)


@cases.settings
@given(
  cases.seeds, st.integers(1, 5), st.floats(0.1, 20.0), deltas, RELATIONS,
  st.floats(1e-3, 1e3),
)  # fmt: skip
def test_matrix_mechanisms_meet_their_target_and_no_more(
  seed, steps, target, delta, relation, size
):
  c = _strategy(seed, steps, steps)
  pattern = {'max_participations': 2, 'min_separation': 1}

  def sigma_of(c, relation=relation):
    return accounting.calibrate_matrix_mechanism(
      target, delta, c, neighboring_relation=relation, **pattern
    )

  def spent(sigma):
    event = accounting.matrix_mechanism_event(sigma, c, **pattern)
    assert type(event.noise_multiplier) is float
    moved = 2.0 if relation is REPLACE else 1.0
    return accounting.gaussian_epsilon(moved / event.noise_multiplier, delta)

  # What is rounded above the diagonal counts as zero.
  assert sigma_of(c + 9e-7 * np.abs(c).max() * np.eye(steps, k=1))
  sigma = sigma_of(c)
  # Two divisions; the bisection for epsilon ends above by rounding.
  assert spent(sigma) <= target * (1 + 1e-9)
  assert spent(sigma * (1 - 1e-6)) > target
  assert math.isclose(sigma_of(size * c), size * sigma, rel_tol=1e-9)
  plain = sigma_of(c, accounting.NeighboringRelation.ADD_OR_REMOVE_ONE)
  assert math.isclose(
    sigma, plain * (2 if relation is REPLACE else 1), rel_tol=1e-12
  )


def test_calibration_beside_another_release():
  other = dp_event.GaussianDpEvent(6.0)
  sigma = accounting.calibrate_noise_multiplier(
    2.0, 1e-5, 0.01, 100, accountant='rdp', prior_events=[other, other]
  )

  def spent(sigma):
    training = accounting.dpsgd_event(sigma, 0.01, 100)
    event = dp_event.ComposedDpEvent([training, other, other])
    return accounting.epsilon(event, 1e-5, accountant='rdp')

  assert spent(sigma) <= 2.0 < spent(sigma * (1 - 1e-5))
  for prior, message in (
    (dp_event.GaussianDpEvent(1.0), 'cannot be reached'), (1.0, 'DpEvent'),
  ):  # fmt: skip
    with pytest.raises(ValueError, match=message):
      accounting.calibrate_noise_multiplier(
        1.0, 1e-5, 0.01, 10, accountant='rdp', prior_events=[prior]
      )


@hypothesis.settings(cases.few, max_examples=2)
@given(
  st.floats(0.3, 8.0), st.floats(1e-8, 1e-3), st.sampled_from([0.01, 0.2, 1.0]),
  st.integers(1, 40),
)  # fmt: skip
def test_calibration_by_renyi_is_safe_and_least(target, delta, q, steps):
  sigma = accounting.calibrate_noise_multiplier(
    target, delta, q, steps, accountant='rdp'
  )

  def spent(sigma):
    event = accounting.dpsgd_event(sigma, q, steps)
    return accounting.epsilon(event, delta, accountant='rdp')

  # What is promised: 1e-5 less noise is too little.
  assert spent(sigma) <= target < spent(sigma * (1 - 1.1e-5))


@cases.few
@given(
  st.floats(0.5, 20.0), st.sampled_from([0.1, 1.0]), st.integers(0, 20),
  small_deltas, RELATIONS,
)  # fmt: skip
def test_statements_round_up_and_say_what_they_assume(
  sigma, q, steps, delta, relation
):
  hypothesis.assume(q == 1 or relation is not REPLACE)  # RDP has none of it.
  event = accounting.dpsgd_event(sigma, q, steps)
  options = {'accountant': 'rdp', 'neighboring_relation': relation}
  spent = accounting.epsilon(event, delta, **options)
  statement = accounting.privacy_statement(event, delta, **options)
  said = re.match(r'epsilon <= (\S+) at delta = (\S+),', statement)
  shown, at = map(float, said.groups())
  assert spent - 1e-9 <= shown <= spent + 1e-3 + 1e-9
  assert delta <= at <= delta * (1 + 1e-5)
  assert relation.name.lower().replace('_', '-') in statement
  assert ('Poisson sampling' in statement) == (q < 1 and steps > 0)


@cases.settings
@given(
  st.floats(0.1, 5.0),
  small_deltas,
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


# A number that no event can have, in each kind of event and place; and events
# that are there only for the first who reads them.
_FINE = dp_event.GaussianDpEvent(5.0)
impossible = st.sampled_from([
  *(dp_event.SelfComposedDpEvent(_FINE, n)
    for n in (-1, -(10**6), 2.5, math.nan, None, True)),
  *map(dp_event.GaussianDpEvent, (-1e-9, -5.0, -math.inf, math.nan)),
  *(dp_event.PoissonSampledDpEvent(q, _FINE) for q in (-0.1, 1.1, math.nan)),
  *(dp_event.TruncatedSubsampledGaussianDpEvent(n, 0.1, 5, 5.0)
    for n in (-1, 0.5)),
  *(dp_event.SingleEpochTreeAggregationDpEvent(5.0, n)
    for n in ([-3], [2, math.nan], -3)),
  dp_event.MixtureOfGaussiansDpEvent(1.0, [math.nan], [1.0]),
  dp_event.MixtureOfGaussiansDpEvent(1.0, [1.0], [-1.0]),
  dp_event.ZCDpEvent(-0.5),
  dp_event.ComposedDpEvent(iter([_FINE])),
])  # fmt: skip
surrounded = st.recursive(
  impossible,
  lambda inner: st.one_of(
    inner.map(lambda x: dp_event.SelfComposedDpEvent(x, 3)),
    inner.map(lambda x: dp_event.PoissonSampledDpEvent(0.5, x)),
    inner.map(lambda x: dp_event.ComposedDpEvent([_FINE, x])),
    inner.map(lambda x: dp_event.ComposedDpEvent((x, dp_event.NoOpDpEvent()))),
  ),
  max_leaves=4,
)


@cases.settings
@given(surrounded)
def test_no_event_with_an_impossible_number_is_booked(event):
  """Wherever it stands: it would lower what the others cost."""
  budget = accounting.PrivacyBudget(5.0, 1e-5, composition='renyi')
  booked = budget.export()
  for call in (
    lambda: budget.spend(event, 'a'),
    lambda: budget.how_many_more(event, 'a'),
    lambda: accounting.epsilon(event, 1e-5),
    lambda: accounting.privacy_statement(event, 1e-5),
    lambda: accounting.calibrate_noise_multiplier(
      1.0, 1e-5, 0.1, 10, prior_events=[event]
    ),
  ):
    with pytest.raises(ValueError, match=r'got \w+DpEvent\.\w+='):
      call()
  assert budget.export() == booked
