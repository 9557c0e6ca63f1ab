"""The host's mechanism: the same clip, exact integers, the right law."""

import math

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy import stats

from prism_optax import inference
from prism_optax.inference import _host

C = 1.5
floats = st.floats(allow_nan=True, allow_infinity=True)


def chi_square_pvalue(counts, probabilities):
  """Of the whole table; cells that expect less than ten are put together."""
  expected = probabilities * counts.sum()
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
  law = np.exp(-(integers.astype(float) ** 2) / 2 / 4.0**bits)
  counts = np.array([np.sum(draws == z) for z in integers])
  assert counts.sum() == len(draws)
  assert chi_square_pvalue(counts, law / law.sum()) > 1e-6
  # The same test sees a scale that is off by two percent.
  wrong = np.exp(-(integers.astype(float) ** 2) / 2 / 4.0**bits / 1.04)
  assert chi_square_pvalue(counts, wrong / wrong.sum()) < 1e-6


def test_the_real_scale_is_a_gaussian_in_units_of_it():
  draws = _host._discrete_gaussian(100_001)
  assert draws.shape == (100_001,)
  assert draws.dtype == np.int64
  scaled = draws / _host._SCALE
  assert stats.kstest(scaled, 'norm').pvalue > 1e-6
  energy = np.sum(np.square(scaled))
  assert abs(energy - len(scaled)) < 6 * math.sqrt(2 * len(scaled))
  correlation = np.mean(scaled[1:] * scaled[:-1])
  assert abs(correlation) < 6 / math.sqrt(len(scaled))
  # The low bits are as random as the high ones.
  low = np.bincount(draws & 15, minlength=16)
  assert chi_square_pvalue(low, np.full(16, 1 / 16)) > 1e-6


@pytest.mark.parametrize(
  ('numerator', 'bits'), [(0, 3), (3, 3), (8, 3), (2, 1)]
)
def test_bernoulli_exp_has_its_probability(numerator, bits):
  trials = 100_000
  hits = _host._bernoulli_exp(np.full(trials, numerator, np.int64), bits).sum()
  p = math.exp(-numerator / 2**bits)
  assert abs(hits - trials * p) <= 6 * math.sqrt(trials * p * (1 - p))


def test_random_integers_are_uniform():
  for bound in (3, 7, 1000):
    counts = np.bincount(_host._random_below(100_000, bound), minlength=bound)
    assert len(counts) == bound
    assert chi_square_pvalue(counts, np.full(bound, 1 / bound)) > 1e-6


def test_the_remainder_of_the_range_is_drawn_again(monkeypatch):
  """2^32 is no multiple of 1000: its last 296 numbers would favour 0 to 295."""
  drawn = iter([[4_294_966_999, 4_294_967_000, 4_294_967_295], [7, 1008]])
  monkeypatch.setattr(_host, '_random_bits', lambda *_: np.array(next(drawn)))
  found = _host._random_below(3, 1000)
  np.testing.assert_array_equal(found, [999, 7, 8])


@pytest.mark.parametrize('block_ndim', [1, 2])
def test_noise_is_white_and_of_the_right_size(block_ndim):
  hidden = np.full((20, 30, 40), 3.0)
  stddev = 2.5
  options = {'l2_clip_norm': C, 'block_ndim': block_ndim}
  noised = inference.privatize_on_host(hidden, stddev=stddev, **options)
  clipped = inference.privatize_on_host(hidden, stddev=0.0, **options)
  error = noised - clipped
  assert abs(np.sum(np.square(error / stddev)) - error.size) < 6 * math.sqrt(
    2 * error.size
  )
  assert stats.kstest(error.ravel() / stddev, 'norm').pvalue > 1e-6
  again = inference.privatize_on_host(hidden, stddev=stddev, **options)
  # Nobody can choose the seed. Integers may meet, one in a hundred thousand.
  assert np.mean(again == noised) < 1e-3


def test_discrete_noise_leaves_nothing_off_the_grid():
  """What is released is an integer: no low bits of the state are in it."""
  rng = np.random.default_rng(0)
  stddev = 0.3
  grid = stddev / _host._SCALE
  noised = inference.privatize_on_host(
    rng.normal(size=(6, 5)), l2_clip_norm=C, stddev=stddev
  )
  integers = np.round(noised / grid)
  np.testing.assert_array_equal(noised, integers * grid)


def test_rounding_to_the_grid_never_lengthens(monkeypatch):
  """A coarse grid, no noise: towards zero, coordinate by coordinate."""
  monkeypatch.setattr(
    _host, '_discrete_gaussian', lambda n: np.zeros(n, np.int64)
  )
  stddev = 2.0**14  # The grid is a quarter.
  hidden = np.random.default_rng(1).normal(size=(50, 3))
  on_grid = inference.privatize_on_host(hidden, l2_clip_norm=C, stddev=stddev)
  exact = inference.privatize_on_host(hidden, l2_clip_norm=C, stddev=0.0)
  np.testing.assert_array_equal(on_grid, np.trunc(exact * 4) / 4)
  assert np.all(np.linalg.norm(on_grid, axis=-1) <= C)
  assert np.any(on_grid)


@hypothesis.settings(max_examples=100, deadline=None)
@hypothesis.given(hnp.arrays(np.float64, (3, 4), elements=floats))
def test_clip_bounds_whatever_comes(hidden):
  for block_ndim in (1, 2):
    found = inference.privatize_on_host(
      hidden, l2_clip_norm=C, stddev=0.0, block_ndim=block_ndim
    )
    assert np.all(np.isfinite(found))
    norms = np.linalg.norm(found, axis=-1 if block_ndim == 1 else None)
    assert np.all(norms <= C)
    finite = np.all(
      np.isfinite(hidden), axis=-1 if block_ndim == 1 else None, keepdims=True
    )
    kept = np.where(finite, hidden, 0)
    small = np.linalg.norm(np.clip(kept, -1e150, 1e150), axis=-1) < C / 2
    if block_ndim == 1:  # What fits stays as it is.
      np.testing.assert_allclose(
        found[small], kept[small], rtol=1e-12, atol=1e-300
      )


def test_masked_vectors_do_not_count():
  hidden = np.full((3, 4), 2.0)
  hidden[1] = np.nan
  mask = np.array([True, False, True])
  before = hidden.copy()
  found = inference.privatize_on_host(
    hidden, l2_clip_norm=C, stddev=1.0, mask=mask, block_ndim=2
  )
  np.testing.assert_array_equal(found[1], 0)
  assert np.all(found[[0, 2]] != 0)
  np.testing.assert_array_equal(hidden, before)  # The caller's array.


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    ({'l2_clip_norm': 0.0}, 'l2_clip_norm=0.0'),
    ({'stddev': -1.0}, 'stddev=-1.0'),
    ({'stddev': 1e-12}, 'stddev=1e-12'),
    ({'block_ndim': 0}, 'block_ndim=0'),
    ({'block_ndim': 3}, '3 axes'),
    ({'mask': np.ones(4, bool)}, r'mask .*\(3,\)'),
  ],
)
def test_bad_arguments_are_named(change, message):
  arguments = {'l2_clip_norm': 1.0, 'stddev': 1.0, **change}
  with pytest.raises(ValueError, match=message):
    inference.privatize_on_host(np.ones((3, 4)), **arguments)
