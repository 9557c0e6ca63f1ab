"""The benchmark of the attacks on low bits, in small."""

import numpy as np
import pytest

from benchmarks.privacy import low_bits as benchmark


def test_a_route_is_attacked_and_drawn(tmp_path):
  settings = [
    {**x, 'runs': 100}
    for x in benchmark.settings()
    if (x['route'], x['entries']) == ('hidden states', 1536)
  ]
  assert [x['others'] for x in settings] == [0, 31]
  rows = [{**x, **benchmark.measure(**x)} for x in settings]
  for row in rows:
    assert row['floats'][0] > 0.9
    # Five standard errors of the difference of 100 answers each.
    assert abs(row['now'][0]) < 5 * np.sqrt(0.5 / 100)
    assert row['now, steps']['whole steps'] == 1
    assert row['floats, steps']['whole steps'] < 0.5
  benchmark.plot(rows, tmp_path / 'low_bits.png')
  assert (tmp_path / 'low_bits.png').stat().st_size > 10_000
  assert benchmark.show(rows).count('hidden states') == 2


@pytest.mark.slow
def test_a_coarse_lattice_is_seen_in_the_steps():
  row = benchmark.measure(next(iter(benchmark.routes.ROUTES)), 1000, 31, 100)
  assert row['coarse, steps']['classes'][0] > 0.9
  assert abs(row['now, steps']['classes'][0]) < 5 * np.sqrt(0.5 / 100)


def test_the_threshold_lies_in_the_middle_of_a_gap():
  scores = np.array([[5, 6, 1, 7], [-5, -9, -1, -9]])
  assert benchmark.judged(scores, 2) == (1.0, 0.0)
