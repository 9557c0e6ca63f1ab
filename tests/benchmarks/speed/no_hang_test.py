"""The real step cannot deadlock.

``benchmarks/speed/no_hang.py`` runs it in more environments.
"""

import pytest

from benchmarks.speed import no_hang

# Of each kind of frame; the program above goes through every environment.
STEPS = 700


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize('frames', ['cheap', 'align'])
def test_many_steps_finish(frames):
  """`align` destroys orthogonal columns: each frame is a QR and an SVD."""
  done = no_hang.run(frames, STEPS)
  assert done.returncode == 0, done.stderr[-2000:]
  assert done.stdout.splitlines()[-1] == 'done'
