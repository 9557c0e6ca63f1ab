"""The real step cannot deadlock; more environments: benchmarks/no_hang.py."""

import pytest

from benchmarks import no_hang

STEPS = 5000


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize('frames', ['cheap', 'align'])
def test_thousands_of_steps_finish(frames):
  """`align` destroys orthogonal columns: each frame is a QR and an SVD."""
  steps = STEPS if frames == 'cheap' else STEPS // 2
  done = no_hang.run(frames, steps)
  assert done.returncode == 0, done.stderr[-2000:]
  assert done.stdout.splitlines()[-1] == 'done'
