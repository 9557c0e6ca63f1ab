"""SmolLM2 from its package, in float32, and what it says."""

from importlib import metadata

import jax
import pytest

from prism_optax.finetune.models import (
  chat,
  generation,
  llama_files,
  pretrained,
  smollm2,
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope='module')
def source():
  pytest.importorskip('gguf', reason='gguf is not installed.')
  if smollm2.PACKAGE not in {x.name for x in metadata.distributions()}:
    pytest.skip(f'{smollm2.PACKAGE} is not installed.')
  return pretrained.find('smollm2')


def test_it_knows_the_capital_of_france(source):
  talk = chat.Chat(source)
  question = {'role': 'user', 'content': 'What is the capital of France?'}
  prompts = [
    talk.encode(talk.text([question], answer_next=True)),
    talk.encode('The capital of France is'),
  ]
  generator = generation.Generator(llama_files.load(source), talk.stops)
  first, second = generator.answers(prompts, 8)
  jax.clear_caches()
  assert talk.decode(talk.encode('Paris')) == 'Paris'
  assert talk.decode(first) == 'The capital of France is Paris.'
  assert talk.decode(second).strip().startswith('Paris')
