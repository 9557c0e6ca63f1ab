"""Noise of a release: the published figures.

Laws of these functions are in `tests/properties/inference_test.py`.
"""

import pytest

from prism_optax import accounting, inference

DELTA = 1e-5
stddev_of = inference.gaussian_stddev


def test_classic_stddev_is_the_published_one_and_analytic_is_smaller():
  classic = stddev_of(1.0, DELTA, 1.0, method='classic')
  assert classic == pytest.approx(4.8448, abs=5e-5)
  assert stddev_of(1.0, DELTA, 1.0) == pytest.approx(3.7306, abs=5e-5)
  assert stddev_of(1.0, DELTA, 2.0, method='classic') == 2 * classic
  assert stddev_of(1.0, DELTA, 0.0) == 0
  # Proved below 1, true for some way above, false at 10.
  for epsilon in (0.01, 1.0, 8.0):
    mu = 1 / stddev_of(epsilon, DELTA, 1.0, method='classic')
    assert accounting.gaussian_epsilon(mu, DELTA) <= epsilon
