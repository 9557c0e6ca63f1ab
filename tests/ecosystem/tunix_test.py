"""Tunix: a trainer that holds a private run, stops and goes on."""

import jax
import numpy as np
import pytest

from tests import cases

nnx = pytest.importorskip('flax.nnx', reason='needs flax')
pytest.importorskip('tunix', reason='needs google-tunix')

from examples import lora_tunix  # noqa: E402


@pytest.fixture(scope='module')
def whole():
  return lora_tunix.main(prng_key=0)


@pytest.mark.slow
def test_it_trains_the_adapters_and_logs_nothing_private(whole):
  old = nnx.LoRALinear(8, 4, lora_rank=2, rngs=nnx.Rngs(0))
  for kind, same in ((nnx.LoRAParam, False), (nnx.Not(nnx.LoRAParam), True)):
    states = (nnx.state(model, kind) for model in (old, whole.model))
    for x, y in zip(*map(jax.tree.leaves, states), strict=True):
      assert np.array_equal(x, y) == same
  assert int(whole.state.step) == whole.train_steps == 4
  log = whole.metrics_logger
  for name in ('loss', 'perplexity', 'grad_norm'):
    history = log.get_metric_history('', name, 'train')
    assert len(history) == 4
    assert np.all(np.isnan(history))
  assert np.isfinite(log.get_metric('', 'loss', 'eval'))


@pytest.mark.slow
def test_a_restored_trainer_goes_on_as_if_nothing_had_happened(whole, tmp_path):
  folder = str(tmp_path / 'run')
  first = lora_tunix.main(2, prng_key=0, checkpoint_root_directory=folder)
  assert int(first.state.step) == 2
  second = lora_tunix.main(4, prng_key=0, checkpoint_root_directory=folder)
  assert int(second.state.step) == 4
  cases.assert_same_bits(nnx.state(second.model), nnx.state(whole.model))


@pytest.mark.slow
def test_accumulation_is_refused():
  with pytest.raises(ValueError, match='microbatch_size'):
    lora_tunix.main(gradient_accumulation_steps=2)
