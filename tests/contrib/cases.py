"""The noise of one-shot releases."""

import numpy as np
import scipy.stats
from dp_accounting import GaussianDpEvent

from tests.core import seams


def assert_noisy(release, sigma, entries):
  """Two releases of zeros, each entry of which has noise of its own."""
  with seams.one_shot_sums() as released:
    made = [release(noise_multiplier=sigma, dataset_size=1) for _ in range(2)]
  one, other = (np.concatenate([*x.values()], None) for x in released)
  assert made[0].entries == one.size == entries
  # Without a seed, this fails once in a million runs. A scale that is off by
  # sqrt(2) gives less than 1e-9.
  assert scipy.stats.kstest(one / sigma, 'norm').pvalue > 1e-6
  assert not np.array_equal(one, other)
  assert made[0].event == GaussianDpEvent(sigma)
  assert not made[0].seeded
  return made
