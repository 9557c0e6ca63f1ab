"""The benchmark of the attacks on low bits, in small."""

import numpy as np
import pytest

from benchmarks.privacy import low_bits as benchmark


@pytest.mark.slow
def test_a_coarse_lattice_is_seen_in_the_steps():
  row = benchmark.measure(next(iter(benchmark.routes.ROUTES)), 1000, 31, 100)
  assert row['coarse, steps']['classes'][0] > 0.9
  assert abs(row['now, steps']['classes'][0]) < 5 * np.sqrt(0.5 / 100)
