"""The memory of a step is that of its arrays, without any of them."""

import jax
import pytest

from benchmarks.speed import language_model_memory_table as benchmark
from prism_optax.finetune.models import llama_config
from tests.finetune import language_models


@pytest.mark.slow
def test_arguments_are_weights_and_state(monkeypatch):
  monkeypatch.setattr(benchmark, 'LENGTH', 32)
  # Wide enough to outweigh what does not grow.
  sizes = language_models.CONFIG | {'hidden_size': 64, 'vocab_size': 400}
  monkeypatch.setitem(benchmark.CONFIGS, 'tiny', sizes)
  before = len(jax.live_arrays())
  one, four = (
    benchmark.measure(**{'model': 'tiny', 'rank': 3, 'micro-batch': m})
    for m in (1, 4)
  )
  assert len(jax.live_arrays()) - before < 20
  # Besides: ids and labels, a key, counters.
  rest = one['arguments GB'] - one['frozen GB'] - one['state GB']
  assert 0 < rest * 1e9 < 2 * 8 * 32 * 4 + 500
  assert four['temporary GB'] > 1.5 * one['temporary GB']
  config = llama_config.Config.from_dict(sizes, 'tiny')
  graphdef, params, frozen = benchmark.shapes(config, 3)
  del graphdef
  count = sum(x.size for x in jax.tree.leaves(params))
  assert one['trained, millions'] == count / 1e6
  assert one['frozen GB'] == pytest.approx(
    2e-9 * sum(x.size for x in jax.tree.leaves(frozen))
  )
  row = {'model': 'qwen2.5-3b', 'rank': 8, 'micro-batch': 1}
  text = benchmark.show([one | row])
  assert '| qwen2.5-3b | 8 |' in text


def test_models_have_the_number_of_parameters_that_they_are_named_by():
  for name, billions in (
    ('llama-3.2-1b', 1.236),
    ('qwen2.5-3b', 3.086),
    ('llama-3.1-8b', 8.030),
  ):
    config = llama_config.Config.from_dict(benchmark.CONFIGS[name], name)
    _, _, frozen = benchmark.shapes(config, 8)
    count = sum(x.size for x in jax.tree.leaves(frozen))
    assert count / 1e9 == pytest.approx(billions, abs=1e-3)
