"""The exact Gaussian formula, against other ways to compute it."""

import math

import hypothesis
import numpy as np
import pytest
from dp_accounting import gaussian_mechanism
from hypothesis import strategies as st
from scipy import special, stats

from prism_optax import accounting
from prism_optax.accounting import _gaussian

EPSILONS = (1e-3, 0.1, 0.5, 1.0, 2.0, 10.0, 100.0, 1000.0)
DELTAS = (1e-12, 1e-9, 1e-5, 1e-2, 0.3, 0.9)


@pytest.mark.parametrize('epsilon', EPSILONS)
@pytest.mark.parametrize('delta', DELTAS)
def test_mu_inverts_the_exact_delta(epsilon, delta):
  mu = _gaussian.gaussian_mu(epsilon, delta)
  # 1e-10 is the promise; the formula itself keeps about twelve digits.
  assert _gaussian.gaussian_delta(mu, epsilon) == pytest.approx(
    delta, rel=1e-10
  )
  assert accounting.gaussian_epsilon(mu, delta) == pytest.approx(
    epsilon, rel=1e-9
  )
  # Never less privacy than asked, to the last digit.
  assert _gaussian.gaussian_delta(mu, epsilon) <= delta
  # dp-accounting's own solver stops at an absolute 1e-12.
  sigma = gaussian_mechanism.get_sigma_gaussian(epsilon, delta)
  assert 1 / mu == pytest.approx(sigma, rel=1e-6)


@pytest.mark.parametrize('mu', [1e-3, 0.1, 0.7, 3.0, 25.0])
@pytest.mark.parametrize('epsilon', [0.0, 0.01, 0.8, 5.0])
def test_delta_is_the_integral_that_defines_it(mu, epsilon):
  """sup_S P(S) - e^epsilon Q(S): the positive part of p - e^epsilon q."""
  x = np.linspace(-12, 12 + mu, 400_001)
  difference = stats.norm.pdf(x - mu) - np.exp(epsilon) * stats.norm.pdf(x)
  # The trapezoidal rule on a kinked integrand: the square of the spacing.
  expected = np.trapezoid(np.maximum(difference, 0), x)
  assert _gaussian.gaussian_delta(mu, epsilon) == pytest.approx(
    expected, rel=1e-6, abs=1e-9
  )


@hypothesis.given(
  st.floats(0, 300, allow_subnormal=False), st.floats(1e-8, 50.0)
)
def test_delta_in_units_of_scaled_error_functions(epsilon, mu):
  """The same formula with SciPy's function, where nothing underflows."""
  near = (epsilon / mu - mu / 2) / math.sqrt(2)
  far = (epsilon / mu + mu / 2) / math.sqrt(2)
  hypothesis.assume(abs(near) < 20)
  expected = (
    0.5 * math.exp(-(near**2)) * (special.erfcx(near) - special.erfcx(far))
  )
  # Both lose digits where the two terms cancel: of order 1e-16 of the first.
  first = 0.5 * math.exp(-(near**2)) * special.erfcx(near)
  found = _gaussian.gaussian_delta(mu, epsilon)
  assert found == pytest.approx(expected, rel=1e-9, abs=1e-13 * first)


@pytest.mark.parametrize(
  ('sensitivity', 'releases', 'expected', 'digits'),
  [
    (1, 1, 0.75, 2),
    (1, 10, 2.69, 2),
    (1, 100, 10.4, 1),
    (2, 1, 1.61, 2),
    (2, 10, 5.98, 2),
    (2, 100, 25.4, 1),
    (1, 256, 18.9, 1),
    (2, 256, 49.2, 1),
  ],
)
def test_epsilon_of_repeated_releases_at_the_classic_stddev(
  sensitivity, releases, expected, digits
):
  mu = sensitivity / 4.8448 * math.sqrt(releases)
  assert round(accounting.gaussian_epsilon(mu, 1e-5), digits) == expected


def test_ends_of_the_scale():
  assert _gaussian.gaussian_delta(0.0, 1.0) == 0
  assert _gaussian.gaussian_delta(math.inf, 1.0) == 1
  assert _gaussian.gaussian_delta(1e5, 1.0) == 1
  assert _gaussian.gaussian_delta(1e-5, 1.0) == 0
  assert _gaussian.gaussian_delta(1.0, math.inf) == 0
  assert accounting.gaussian_epsilon(0.0, 1e-5) == 0
  assert accounting.gaussian_epsilon(1.0, 0.0) == math.inf
  assert accounting.gaussian_epsilon(1.0, 1.0) == 0
  # Total variation below delta: nothing is left for epsilon to hide.
  assert accounting.gaussian_epsilon(1e-6, 1e-5) == 0
  assert accounting.gaussian_epsilon(math.inf, 1e-5) == math.inf
  assert _gaussian.gaussian_mu(1.0, 0.0) == 0
  assert _gaussian.gaussian_mu(math.inf, 1e-5) == math.inf
  # epsilon 0: delta is the total variation distance, 2 Phi(mu / 2) - 1.
  mu = _gaussian.gaussian_mu(0.0, 0.2)
  assert 2 * stats.norm.cdf(mu / 2) - 1 == pytest.approx(0.2, rel=1e-12)


def test_bad_arguments_are_named():
  with pytest.raises(ValueError, match='mu=-1'):
    _gaussian.gaussian_delta(-1, 1.0)
  with pytest.raises(ValueError, match='epsilon=nan'):
    _gaussian.gaussian_delta(1.0, math.nan)
  with pytest.raises(ValueError, match='delta=1.5'):
    accounting.gaussian_epsilon(1.0, 1.5)
  with pytest.raises(ValueError, match='epsilon=-1'):
    _gaussian.gaussian_mu(-1, 1e-5)
  with pytest.raises(ValueError, match='delta=1'):
    _gaussian.gaussian_mu(1.0, 1)
