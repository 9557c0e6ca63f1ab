"""Numbers that are no numbers: from the data, or from too large a step."""

import json

import finetune
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from finetuning import methods, sampling

from tests.examples import finetune_test, training_test

model = training_test.model
noisy = training_test.noisy


@pytest.fixture
def steps(model, noisy):
  """steps(name, rate): ``step(state, batch, is_padding)`` and a state."""

  def of(name, rate=0.1):
    compiled, state = noisy(name)

    def step(state, *batch):
      # The state is donated: a copy, so that it may be used again.
      state = jax.tree.map(jnp.copy, state)
      return compiled(state, (np.float32(rate), model[2]), *batch)

    return step, state

  return of


def _batch():
  return sampling.gather(training_test._batch(), np.arange(9))


def _keys(state):
  return [
    jax.random.key_data(leaf).tolist()
    for leaf in jax.tree.leaves(state.optimizer)
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
  ]


@pytest.mark.parametrize('bad', [np.nan, np.inf, 3e38])
@pytest.mark.parametrize(
  'name', ['prism', pytest.param('dp-adamw', marks=pytest.mark.slow)]
)
def test_a_batch_of_nan_losses_is_an_empty_batch(steps, name, bad):
  """No record counts, and the noise is what it would have been."""
  step, state = steps(name)
  batch, _ = _batch()
  spoiled = batch._replace(inputs=np.full_like(batch.inputs, bad))
  nobody = batch._replace(inputs=np.zeros_like(batch.inputs))
  one, _ = step(state, spoiled, np.zeros(9, bool))
  other, _ = step(state, nobody, np.ones(9, bool))
  assert int(one.held) == 0
  for x, y in zip(
    jax.tree.leaves(one.params), jax.tree.leaves(other.params), strict=True
  ):
    assert np.isfinite(x).all()
    np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize(
  'name',
  [
    pytest.param(x, marks=() if x in ('prism', 'dp-muon') else pytest.mark.slow)
    for x in methods.METHODS
  ],
)
def test_a_step_that_overflows_is_held_and_its_noise_is_not_used_again(
  steps, name
):
  # Preconditioned directions have entries of order one, Muon's below.
  rate = 1e30 if name == 'prism' else 3e38
  step, state = steps(name, rate)
  keys = [_keys(state)]
  for number in range(1, 4):
    state, _ = step(state, *_batch())
    assert int(state.step) == number
    leaves = jax.tree.leaves((state.params, state.optimizer))
    for leaf in leaves:
      if jnp.issubdtype(leaf.dtype, jnp.floating):
        assert np.isfinite(leaf).all()
    keys.append(_keys(state))
  if name != 'adamw':
    assert len({str(k) for k in keys}) == 4
  if name == 'dp-muon':
    assert int(state.held) > 0


def test_prism_holds_a_step_that_overflows_in_the_retraction(steps):
  step, state = steps('prism', 3e38)
  for _ in range(3):
    state, _ = step(state, *_batch())
  assert int(state.held) > 0


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
