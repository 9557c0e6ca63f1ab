"""Numbers that are no numbers: from the data, or from too large a step."""

import functools
import json

import jax
import numpy as np
import optax
import pytest
import safetensors.numpy

import prism_optax
from prism_optax.finetune import main as finetune
from tests import cases
from tests.core import seams
from tests.finetune import finetune_test

OPTIMIZERS = {
  'prism': functools.partial(prism_optax.prism, 0.1),
  'dp-adamw': optax.adamw(0.1),
}


@functools.cache
def begun(name):
  private = cases.make(OPTIMIZERS[name], prng_key=None)
  return private, private.init(cases.PARAMS)


@pytest.mark.slow
@pytest.mark.parametrize('bad', [np.nan, np.inf, 3e38])
@pytest.mark.parametrize('name', OPTIMIZERS)
def test_a_batch_of_nan_losses_is_an_empty_batch(name, bad):
  """No record counts, and the noise is what it would have been."""
  private, start = begun(name)
  rows = private.padded_batch_size

  def step(value, is_padding):
    state = jax.tree.map(jax.numpy.copy, (start.params, start.optimizer))
    examples = tuple(
      np.full((rows, *x.shape[1:]), value, np.float32) for x in cases.DATA
    )
    padding = np.full(rows, is_padding)
    # Without the digest that makes the noise of other data another one.
    return seams.run_step(private, *state, cases.FROZEN, examples, padding)

  (one, _, held), (other, _, _) = step(bad, False), step(0.0, True)
  assert int(held) == 0
  assert all(np.isfinite(x).all() for x in jax.tree.leaves(one))
  cases.assert_same_bits(one, other)


@pytest.mark.slow
def test_a_run_that_diverges_ends_and_says_so(
  tiny_files, tiny_model, tmp_path, capsys
):
  output = tmp_path / 'out'
  argv = finetune_test._arguments(
    tiny_files, tiny_model, output,
    '--optimizer', 'dp-adamw', '--learning-rate', '3e38',
  )  # fmt: skip
  assert finetune.main(argv) == 0
  assert 'dp-adamw diverged' in capsys.readouterr().out
  summary = json.loads((output / 'summary.json').read_text())
  assert summary['held_steps'] > 0
  arrays = safetensors.numpy.load_file(output / 'adapter.safetensors')
  assert all(np.isfinite(x).all() for x in arrays.values())
  assert 'epsilon <= ' in summary['statement']  # What was released is spent.
