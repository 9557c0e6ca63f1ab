"""What a release leaves of the signal, after the clip."""

import math

import numpy as np
import pytest

from prism_optax import inference
from prism_optax.inference import _mechanism

CLIPPED = 1 - 1e-5  # Long vectors are clipped to this part of C.


def test_the_bound_is_the_ratio_of_a_clipped_state():
  """Norm 177.5 in 1536 dimensions at the classic noise: 1/190, not 0.94."""
  state = np.zeros(1536)
  state[:100] = 17.75
  assert np.linalg.norm(state) == pytest.approx(177.5)
  noise = 4.8448 * math.sqrt(1536)
  found = np.linalg.norm(_mechanism.clip(state, 1.0)) / noise
  assert found == pytest.approx(1 / 189.9, rel=1e-3)
  assert found == pytest.approx(
    CLIPPED * inference.signal_to_noise_bound(1.0, 4.8448, 1536)
  )
  # What comes out when the clip is left out of the account.
  assert 177.5 / noise == pytest.approx(0.94, abs=6e-3)


def test_the_ends_of_the_bound():
  with pytest.raises(ValueError, match='size=0'):
    inference.signal_to_noise_bound(1.0, 1.0, 0)
  assert inference.signal_to_noise_bound(1.0, 0.0, 3) == math.inf
