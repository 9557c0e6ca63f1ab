"""The benchmark of the attacks on low bits, in small."""

import json

import numpy as np
import pytest

from benchmarks.privacy import low_bits as benchmark


def test_a_route_is_attacked_stored_and_not_attacked_again(tmp_path, capsys):
  arguments = ['--quick', '--routes', 'hidden states', '--output', tmp_path]
  benchmark.main(list(map(str, arguments)))
  path = tmp_path / 'low_bits.json'
  stored = json.loads(path.read_text())
  assert [row['entries'] for row in stored['rows'].values()] == [1536, 1536]
  for row in stored['rows'].values():
    assert row['floats'][0] > 0.9
    # Five standard errors of the difference of 100 answers each.
    assert abs(row['now'][0]) < 5 * np.sqrt(0.5 / 100)
    assert row['now, steps']['whole steps'] == 1
    assert row['floats, steps']['whole steps'] < 0.5
  assert (tmp_path / 'low_bits.png').stat().st_size > 10_000
  capsys.readouterr()
  benchmark.main(list(map(str, arguments)))
  out, err = capsys.readouterr()
  assert not err  # Nothing was measured.
  assert out.count('hidden states') == 2


@pytest.mark.slow
def test_a_coarse_lattice_is_seen_in_the_steps():
  row = benchmark.measure(next(iter(benchmark.routes.ROUTES)), 1000, True, 100)
  assert row['coarse, steps']['classes'][0] > 0.9
  assert abs(row['now, steps']['classes'][0]) < 5 * np.sqrt(0.5 / 100)


def test_the_threshold_lies_in_the_middle_of_a_gap():
  scores = np.array([[5, 6, 1, 7], [-5, -9, -1, -9]])
  assert benchmark.judged(scores, 2) == (1.0, 0.0)
