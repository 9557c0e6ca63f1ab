"""The host's discrete Gaussian: exact integers of the right law."""

import math

import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from prism_optax import inference
from prism_optax.inference import _host


def pvalue(counts, weights):
  """Of the whole table; cells that expect less than ten are put together."""
  expected = weights / weights.sum() * counts.sum()
  large = expected >= 10
  observed = np.append(counts[large], counts[~large].sum())
  wanted = np.append(expected[large], counts.sum() - expected[large].sum())
  keep = wanted > 5
  statistic = np.sum((observed - wanted)[keep] ** 2 / wanted[keep])
  return stats.chi2.sf(statistic, keep.sum() - 1)


@pytest.mark.parametrize('bits', [0, 1, 3])
def test_small_scales_follow_the_exact_probabilities(monkeypatch, bits):
  """With a scale of 1, 2 or 8 every integer has its own cell."""
  monkeypatch.setattr(_host, '_SCALE_BITS', bits)
  monkeypatch.setattr(_host, '_SCALE', 1 << bits)
  draws = _host._discrete_gaussian(200_000)
  integers = np.arange(-12 << bits, (12 << bits) + 1)
  counts = np.array([np.sum(draws == z) for z in integers])
  assert counts.sum() == len(draws)
  exponent = -(integers.astype(float) ** 2) / 2 / 4.0**bits
  assert pvalue(counts, np.exp(exponent)) > 1e-6
  # The same test sees a scale that is off by two percent.
  assert pvalue(counts, np.exp(exponent / 1.04)) < 1e-6


def test_the_real_scale_is_a_gaussian_in_units_of_it():
  draws = _host._discrete_gaussian(100_001)
  assert (draws.shape, draws.dtype) == ((100_001,), np.int64)
  assert stats.kstest(draws / _host._SCALE, 'norm').pvalue > 1e-6
  # The low bits are as random as the high ones.
  low = np.bincount(draws & 15, minlength=16)
  assert pvalue(low, np.ones(16)) > 1e-6


@pytest.mark.parametrize(
  ('numerator', 'bits'), [(0, 3), (3, 3), (8, 3), (2, 1)]
)
def test_bernoulli_exp_has_its_probability(numerator, bits):
  trials = 100_000
  hits = _host._bernoulli_exp(np.full(trials, numerator, np.int64), bits).sum()
  p = math.exp(-numerator / 2**bits)
  assert abs(hits - trials * p) <= 6 * math.sqrt(trials * p * (1 - p))


def test_random_integers_are_uniform(monkeypatch):
  for bound in (3, 7, 1000):
    counts = np.bincount(_host._random_below(100_000, bound), minlength=bound)
    assert len(counts) == bound
    assert pvalue(counts, np.ones(bound)) > 1e-6
  # 2^32 is no multiple of 1000: its last 296 numbers would favour 0 to 295.
  drawn = iter([[4_294_966_999, 4_294_967_000, 4_294_967_295], [7, 1008]])
  monkeypatch.setattr(_host, '_random_bits', lambda *_: np.array(next(drawn)))
  np.testing.assert_array_equal(_host._random_below(3, 1000), [999, 7, 8])


def test_rounding_to_the_grid_never_lengthens(monkeypatch):
  """A coarse grid, no noise: towards zero, coordinate by coordinate."""
  monkeypatch.setattr(_host, '_discrete_gaussian', lambda n: np.zeros(n, int))
  hidden = np.random.default_rng(1).normal(size=(50, 3))
  on_grid, exact = (
    inference.privatize_on_host(hidden, l2_clip_norm=1.5, stddev=stddev)
    # The grid is a quarter; a number of JAX makes no array of float32.
    for stddev in (jnp.float32(2.0**14), 0.0)
  )
  np.testing.assert_array_equal(on_grid, np.trunc(exact * 4) / 4, strict=True)
  assert np.any(on_grid)
