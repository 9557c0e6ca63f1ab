"""Sensitivity of correlated noise: against brute force and jax-privacy."""

import functools
import itertools

import dp_accounting
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg
from dp_accounting import NeighboringRelation
from jax_privacy.matrix_factorization import sensitivity, toeplitz

from prism_optax import accounting
from prism_optax.accounting import _matrix_mechanism

# One for all tests: jax-privacy compiles for every size, many small programs.
STEPS = 12
_coefs = functools.cache(
  lambda: np.float64(toeplitz.optimal_max_error_strategy_coefs(STEPS))
)


def _strategy(bands=None, signs=False):
  """A Toeplitz strategy of the optimal coefficients, or random and signed."""
  coefs = _coefs() * (np.arange(STEPS) < (bands or STEPS))
  c = scipy.linalg.toeplitz(coefs, np.zeros(STEPS))
  if signs:
    rng = np.random.default_rng(0)
    c = c * rng.uniform(-1, 1, c.shape)
    np.fill_diagonal(c, 1.0)
  return c


def _patterns(steps, separation, count):
  for size in range(1, count + 1):
    for pattern in itertools.combinations(range(steps), size):
      if all(j - i >= separation for i, j in itertools.pairwise(pattern)):
        yield list(pattern)


def _brute_force(c, separation, count):
  """max over patterns and signs of ||C u||: attained by aligned records."""
  best = 0.0
  for pattern in _patterns(len(c), separation, count):
    for signs in itertools.product((-1, 1), repeat=len(pattern)):
      best = max(best, np.linalg.norm(c[:, pattern] @ np.array(signs)))
  return best


@pytest.mark.parametrize('signs', [False, True])
@pytest.mark.parametrize(
  ('separation', 'count'), [(1, 1), (1, 3), (2, 2), (3, 3), (4, 2), (12, 4)]
)
def test_bounds_every_pattern_and_agrees_with_jax_privacy(
  separation, count, signs
):
  c = _strategy(signs=signs)
  found = _matrix_mechanism.matrix_mechanism_sensitivity(
    c, max_participations=count, min_separation=separation
  )
  reached = _brute_force(c, separation, count)
  assert found >= reached * (1 - 1e-12)
  assert found <= 1.5 * reached  # A bound, and no wild one.
  if separation == STEPS or count == 1:
    theirs = sensitivity.single_participation_sensitivity(jnp.asarray(c))
    assert found == pytest.approx(reached, rel=1e-12)
  else:
    theirs = sensitivity.get_min_sep_sensitivity_upper_bound(
      jnp.asarray(c), separation, count
    )
  assert found == pytest.approx(float(theirs), rel=1e-5)  # float32


@pytest.mark.parametrize(('bands', 'count'), [(2, 3), (3, 2), (3, None)])
def test_banded_strategies_are_exact(bands, count):
  c = _strategy(bands)
  found = _matrix_mechanism.matrix_mechanism_sensitivity(
    c, max_participations=count, min_separation=bands
  )
  most = -(-STEPS // bands)
  assert found == pytest.approx(_brute_force(c, bands, count or most))
  theirs = sensitivity.get_sensitivity_banded(jnp.asarray(c), bands, count)
  assert found == pytest.approx(theirs, rel=1e-5)


def test_fixed_epochs_are_within_the_separation_that_they_imply():
  """k passes in the same order: separation T / k, at most k of them."""
  c = _strategy()
  for epochs in (2, 3, 4):
    found = _matrix_mechanism.matrix_mechanism_sensitivity(
      c, max_participations=epochs, min_separation=STEPS // epochs
    )
    theirs = sensitivity.fixed_epoch_sensitivity(jnp.asarray(c), epochs)
    assert theirs * (1 - 1e-5) <= found <= 1.2 * theirs


def test_independent_noise_composes_as_gaussian_releases():
  """C = I and k participations: k Gaussian releases of the same multiplier."""
  event = accounting.matrix_mechanism_event(
    7.0, np.eye(20), max_participations=5
  )
  releases = dp_accounting.SelfComposedDpEvent(
    dp_accounting.GaussianDpEvent(7.0), 5
  )
  assert event.noise_multiplier == pytest.approx(7 / np.sqrt(5))
  assert accounting.epsilon(event, 1e-5) == pytest.approx(
    accounting.epsilon(releases, 1e-5), rel=1e-3
  )


@pytest.mark.parametrize('relation', [
  NeighboringRelation.ADD_OR_REMOVE_ONE, NeighboringRelation.REPLACE_ONE
])  # fmt: skip
def test_calibration_meets_the_target_and_not_by_more_than_needed(relation):
  c = _strategy()
  pattern = {'max_participations': 2, 'min_separation': 6}
  sigma = accounting.calibrate_matrix_mechanism(
    2.0, 1e-6, c, neighboring_relation=relation, **pattern
  )
  twice = relation is NeighboringRelation.REPLACE_ONE

  def spent(multiplier):
    event = accounting.matrix_mechanism_event(multiplier, c, **pattern)
    return accounting.gaussian_epsilon(
      (1 + twice) / event.noise_multiplier, 1e-6
    )

  assert spent(sigma) <= 2.0 < spent(sigma * (1 - 1e-9))
  event = accounting.matrix_mechanism_event(sigma, c, **pattern)
  by_accountant = accounting.epsilon(event, 1e-6, neighboring_relation=relation)
  assert by_accountant == pytest.approx(2.0, rel=1e-3)


def test_bad_arguments_are_named():
  measure = _matrix_mechanism.matrix_mechanism_sensitivity
  with pytest.raises(ValueError, match=r'square, got shape \(2, 3\)'):
    measure(np.ones((2, 3)), max_participations=1)
  with pytest.raises(ValueError, match='lower triangular'):
    measure(np.ones((2, 2)), max_participations=1)
  with pytest.raises(ValueError, match='finite'):
    measure([[np.nan]], max_participations=1)
  with pytest.raises(ValueError, match='positive diagonal'):
    measure(np.zeros((2, 2)), max_participations=1)
  with pytest.raises(ValueError, match='max_participations=0'):
    measure(np.eye(2), max_participations=0)
  with pytest.raises(ValueError, match='min_separation=0'):
    measure(np.eye(2), max_participations=1, min_separation=0)
  with pytest.raises(ValueError, match='noise_multiplier=-1'):
    accounting.matrix_mechanism_event(-1, np.eye(2), max_participations=1)
  with pytest.raises(ValueError, match='neighboring_relation'):
    accounting.calibrate_matrix_mechanism(
      1.0, 1e-5, np.eye(2), max_participations=1, neighboring_relation='add'
    )
