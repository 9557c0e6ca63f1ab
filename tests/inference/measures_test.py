"""Signal and noise after the clip, against simulation and the source."""

import math

import numpy as np
import pytest

from prism_optax import inference

M, N, R = 5, 11, 3
CLIPPED = 1 - 1e-5  # Long vectors are clipped to this part of C.


def factors(seed=0):
  rng = np.random.default_rng(seed)
  return rng.normal(size=(M, R)), rng.normal(size=(N, R))


def test_the_bound_is_the_ratio_of_a_clipped_state():
  """Norm 177.5 in 1536 dimensions at the classic noise: 1/190, not 0.94."""
  state = np.zeros(1536)
  state[:100] = 17.75
  assert np.linalg.norm(state) == pytest.approx(177.5)
  # A module that passes everything: the ratio of the state itself.
  eye = np.eye(1536)
  found = inference.nonprivate_delta_signal_to_noise(
    state, eye, eye, l2_clip_norm=1.0, stddev=4.8448
  )
  assert found == pytest.approx(1 / 189.9, rel=1e-3)
  assert found == pytest.approx(
    CLIPPED * inference.signal_to_noise_bound(1.0, 4.8448, 1536)
  )
  # What comes out when the clip is left out of the account.
  assert 177.5 / (4.8448 * math.sqrt(1536)) == pytest.approx(0.94, abs=6e-3)


def test_rank_attenuation_of_a_projection_is_the_root_of_the_ratio():
  rng = np.random.default_rng(1)
  left, _ = np.linalg.qr(rng.normal(size=(M, R)))
  right, _ = np.linalg.qr(rng.normal(size=(N, R)))
  found = inference.rank_attenuation(left, right)
  assert found == pytest.approx(math.sqrt(R / N))
  # Any gauge, any scale; and never more for other factors of this rank.
  gauge = rng.normal(size=(R, R))
  other = inference.rank_attenuation(
    7 * left @ gauge, right @ np.linalg.inv(gauge).T
  )
  assert other == pytest.approx(found)
  assert inference.rank_attenuation(*factors()) < math.sqrt(R / N)
  assert inference.rank_attenuation(np.zeros((M, R)), right) == 0


def test_rank_attenuation_is_what_noise_loses_against_the_best_signal():
  left, right = factors(2)
  dense = left @ right.T
  noise = np.random.default_rng(3).normal(size=(20_000, N))
  energy = np.sum(np.square(noise @ dense.T), -1)
  gain = math.sqrt(energy.mean() / N)
  standard_error = energy.std() / math.sqrt(len(energy)) / energy.mean() / 2
  assert inference.rank_attenuation(left, right) == pytest.approx(
    gain / np.linalg.norm(dense, 2), rel=5 * standard_error
  )


def test_delta_ratio_is_signal_over_noise_of_the_delta():
  left, right = factors(4)
  dense = left @ right.T
  hidden = np.random.default_rng(5).normal(size=(4, 2, N)) * 6
  found = inference.nonprivate_delta_signal_to_noise(
    hidden, left, right, l2_clip_norm=0.7, stddev=0.4
  )
  norms = np.linalg.norm(hidden, axis=-1, keepdims=True)
  clipped = hidden * np.minimum(1, CLIPPED * 0.7 / norms)
  expected = np.linalg.norm(clipped @ dense.T, axis=-1) / (
    0.4 * np.linalg.norm(dense)
  )
  np.testing.assert_allclose(found, expected, rtol=1e-8)
  zero = inference.nonprivate_delta_signal_to_noise(
    hidden, 0 * left, right, l2_clip_norm=0.7, stddev=0.4
  )
  np.testing.assert_array_equal(zero, 0)


def test_a_state_that_misses_the_module_gains_nothing_from_its_rank():
  """A random direction is attenuated as the noise is: the ratio stays."""
  rng = np.random.default_rng(6)
  n, r = 400, 4
  right, _ = np.linalg.qr(rng.normal(size=(n, r)))
  left = np.eye(9, r)
  hidden = rng.normal(size=(3000, n))
  options = {'l2_clip_norm': 1.0, 'stddev': 0.1}
  # All states are long: before the module their ratio is the bound.
  bound = inference.signal_to_noise_bound(1.0, 0.1, n)
  after = inference.nonprivate_delta_signal_to_noise(
    hidden, left, right, **options
  )
  # Root mean squares: 3000 draws of chi-square with 4 degrees of freedom.
  ratio = math.sqrt(np.mean(after**2)) / (CLIPPED * bound)
  assert ratio == pytest.approx(1, abs=5 * math.sqrt(2 / 4 / 3000) / 2)
  # One that lies in it gains the root of n / r.
  best = inference.nonprivate_delta_signal_to_noise(
    right[:, 0] * 9, left, right, **options
  )
  assert best == pytest.approx(CLIPPED * bound * math.sqrt(n / r))


def test_bad_arguments_are_named():
  left, right = factors()
  hidden = np.ones((2, N))
  with pytest.raises(ValueError, match='stddev=0'):
    inference.nonprivate_delta_signal_to_noise(
      hidden, left, right, l2_clip_norm=1.0, stddev=0
    )
  with pytest.raises(ValueError, match='l2_clip_norm=-1'):
    inference.nonprivate_delta_signal_to_noise(
      hidden, left, right, l2_clip_norm=-1, stddev=1.0
    )
  with pytest.raises(ValueError, match=r'right \(n, r\)'):
    inference.nonprivate_delta_signal_to_noise(
      hidden[:, 1:], left, right, l2_clip_norm=1, stddev=1.0
    )
  with pytest.raises(ValueError, match=r'left \(m, r\)'):
    inference.rank_attenuation(left[:, 1:], right)
  with pytest.raises(ValueError, match='size=0'):
    inference.signal_to_noise_bound(1.0, 1.0, 0)
  assert inference.signal_to_noise_bound(1.0, 0.0, 3) == math.inf
