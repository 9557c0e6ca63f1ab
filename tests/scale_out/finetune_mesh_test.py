"""The fine-tuning command line on several devices."""

import pathlib
import sysconfig

import numpy as np
import pytest
import safetensors.numpy

from prism_optax.finetune import main as finetune
from tests import conftest
from tests.finetune import finetune_test


@pytest.mark.slow
def test_a_mesh_gives_what_one_device_gives(tiny_files, tiny_model, tmp_path):
  def argv(name, *more):
    return finetune_test._arguments(
      tiny_files, tiny_model, tmp_path / name, '--optimizer', 'dp-adamw',
      # Noise is another one where numbers are rounded in another way.
      *more, noise=('--noise-multiplier', '0'),
    )  # fmt: skip

  program = pathlib.Path(sysconfig.get_path('scripts'), 'prism-optax')
  conftest.python(program, *argv('mesh', '--mesh', 'data=8'), count=8)
  assert finetune.main(argv('one')) == 0
  one, mesh = (
    safetensors.numpy.load_file(tmp_path / name / 'adapter.safetensors')
    for name in ('one', 'mesh')
  )
  for name, value in one.items():
    # Six adaptive steps magnify rounding; another batch would move it by 1.
    scale = np.abs(value).max()
    assert np.abs(mesh[name] - value).max() < 1e-3 * scale, name
