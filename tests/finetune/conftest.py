"""What the tests of the command share: a tiny encoder and tiny files."""

import argparse
import json
import os
import pathlib

import numpy as np
import pytest
import safetensors.numpy
import tokenizers
from flax import nnx

from prism_optax.finetune.models import pretrained
from tests.finetune import language_models

ROOT = pathlib.Path(__file__).resolve().parents[2]
SUBJECTS = ('film', 'plot', 'actor')
VERDICTS = (('bad', 'dull', 'poor'), ('good', 'fine', 'great'))
WORDS = (*SUBJECTS, *VERDICTS[1], *VERDICTS[0])
LAYERS, HIDDEN, INNER, POSITIONS = 1, 8, 12, 16


def shared_data(name: str) -> pathlib.Path:
  """The folder of a real data set, without which a test is skipped.

  It is looked for in what ``PRISM_OPTAX_DATA`` names, in ``shared/data`` beside
  this checkout and above it.
  """
  named = os.environ.get('PRISM_OPTAX_DATA', 'not named')
  for folder in (named, *(f'{x}/shared/data' for x in ROOT.parents)):
    if (path := pathlib.Path(folder, name)).is_dir():
      return path
  pytest.skip(f'No {name}: set PRISM_OPTAX_DATA to the folder that has it.')


def write_lines(path: pathlib.Path, rows: list) -> pathlib.Path:
  lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
  path.write_text('\n'.join(lines) + '\n', 'utf-8')
  return path


def columns(path, text='text', label='label') -> argparse.Namespace:
  """The options that say what of a file is read."""
  return argparse.Namespace(
    **{'data': str(path), 'eval': str(path)},
    **{'text_column': text, 'label_column': label},
    **{f'{x}_column': x for x in ('prompt', 'response', 'messages')},
  )


def sentences(count: int, seed: int) -> list[dict]:
  """Rows whose label is told by one of their words."""
  rng = np.random.default_rng(seed)
  rows = []
  for label in rng.integers(2, size=count):
    subject, verdict = rng.choice(SUBJECTS), rng.choice(VERDICTS[label])
    rows.append({'text': f'{subject} {verdict}', 'label': int(label)})
  return rows


@pytest.fixture(scope='session')
def tiny_model(tmp_path_factory) -> pathlib.Path:
  """A folder like the real one, with random weights of other sizes."""
  folder = tmp_path_factory.mktemp('model')
  vocabulary = ['[PAD]', '[UNK]', '[CLS]', '[SEP]', *WORDS]
  config = {
    'vocab_size': len(vocabulary), 'hidden_size': HIDDEN,
    'num_hidden_layers': LAYERS, 'num_attention_heads': 2,
    'intermediate_size': INNER, 'max_position_embeddings': POSITIONS,
    'layer_norm_eps': 0.1,
  }  # fmt: skip
  (folder / 'config.json').write_text(json.dumps(config))
  tokenizer = language_models.word_level(*vocabulary, unknown='[UNK]')
  tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
    single='[CLS] $A [SEP]', special_tokens=[('[CLS]', 2), ('[SEP]', 3)]
  )
  tokenizer.save(str(folder / 'tokenizer.json'))
  safetensors.numpy.save_file(
    random_weights(len(vocabulary)), folder / 'model.safetensors'
  )
  return folder


def random_weights(words: int) -> dict[str, np.ndarray]:
  """Weights under the names of BERT, kernels as (out, in)."""
  rng = np.random.default_rng(0)

  def normal(*shape):
    return rng.normal(size=shape, scale=0.5).astype(np.float32)

  weights = {
    'embeddings.word_embeddings.weight': normal(words, HIDDEN),
    'embeddings.position_embeddings.weight': normal(POSITIONS, HIDDEN),
    'embeddings.token_type_embeddings.weight': normal(2, HIDDEN),
  }
  square = (HIDDEN, HIDDEN)
  shapes = {
    'attention.self.query': square, 'attention.self.key': square,
    'attention.self.value': square, 'attention.output.dense': square,
    'attention.output.LayerNorm': (HIDDEN,), 'output.LayerNorm': (HIDDEN,),
    'intermediate.dense': (INNER, HIDDEN), 'output.dense': (HIDDEN, INNER),
  }  # fmt: skip
  named = {
    f'encoder.layer.{i}.{name}': shape
    for i in range(LAYERS)
    for name, shape in shapes.items()
  }
  for name, shape in (named | {'embeddings.LayerNorm': (HIDDEN,)}).items():
    weights[f'{name}.weight'] = normal(*shape)
    weights[f'{name}.bias'] = normal(shape[0])
  return weights


@nnx.jit
def run(model: nnx.Module, *args):
  """What a model computes, compiled once for all tests."""
  return model(*args)


def randomise(params: nnx.State, scale: float = 1.0) -> nnx.State:
  """Puts normal numbers into adapters, which begin as nothing."""
  rng = np.random.default_rng(0)
  for _, leaf in nnx.to_flat_state(params):
    assert leaf.dtype == np.float32
    value = rng.normal(size=leaf.shape, scale=scale).astype(np.float32)
    value.flat[0] = 0  # A part of an adapter may stay where it was.
    leaf.set_value(value)
  return params


@pytest.fixture(scope='session')
def tiny_files(tmp_path_factory) -> tuple[pathlib.Path, pathlib.Path]:
  """A private and a public file of two classes."""
  folder = tmp_path_factory.mktemp('reviews')
  return (
    write_lines(folder / 'train.jsonl', sentences(60, seed=1)),
    write_lines(folder / 'validation.jsonl', sentences(21, seed=2)),
  )


@pytest.fixture(scope='session')
def source(tmp_path_factory):
  """A tiny language model, of those whose heads have norms."""
  config = language_models.CONFIG | {'model_type': 'qwen3'}
  folder = language_models.write(tmp_path_factory.mktemp('qwen'), config)
  return pretrained.find(str(folder))


@pytest.fixture(scope='session')
def language_run(tmp_path_factory):
  """``(folder of a run of a language model, its model)``."""
  from tests.finetune import finished_runs

  folder = tmp_path_factory.mktemp('language')
  model = language_models.write(folder / 'model')
  return folder / 'run', finished_runs.write_language_run(folder / 'run', model)


@pytest.fixture(scope='session')
def review_run(tmp_path_factory, tiny_files, tiny_model):
  """``(folder of a run that classified, its model)``."""
  from tests.finetune import finished_runs

  folder = tmp_path_factory.mktemp('reviews_run') / 'run'
  return folder, finished_runs.write_review_run(folder, tiny_files, tiny_model)
