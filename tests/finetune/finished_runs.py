"""Finished runs without training: what one writes, with random adapters."""

import json
import math
import pathlib

from flax import nnx

from prism_optax.finetune import (
  adapters,
  command_line,
  options,
  summaries,
  tasks,
)
from prism_optax.finetune import main as finetune
from prism_optax.finetune.models import (
  classifier,
  llama_files,
  minilm,
  pretrained,
  weights,
)
from tests.finetune import conftest

PLAN = {
  'dataset_size': 60, 'expected_batch_size': 16, 'padded_size': 60,
  'steps': 4, 'noise_multiplier': 1.0, 'delta': 1e-3,
}  # fmt: skip
ROWS = [
  {'prompt': 'two plus three', 'response': 'five'},
  {'prompt': 'two', 'response': 'is two'},
]


def _options(folder: pathlib.Path, *argv) -> options.Options:
  folder.mkdir()
  return options.resolve(
    command_line.parse(
      [
        *('train', '--noise-multiplier', '1', '--delta', '1e-3', '--rank', '2'),
        *('--output', str(folder / 'none'), *map(str, argv)),
      ]
    )
  )


def _write(folder, used, model, params, rows) -> nnx.Module:
  """All files of a run that ended with these parameters of a model."""
  nnx.update(model, params)
  adapters.save(folder / 'adapter.safetensors', params, {})
  (folder / 'options.json').write_text(json.dumps(vars(used)))
  conftest.write_lines(folder / 'metrics.jsonl', rows)
  summary = {
    'task': 'sums <b>', 'optimizer': 'prism', 'start': rows[0],
    'final': rows[-1], 'eval_rows': 100, 'held_steps': 0, 'private': True,
    'chance': None if used.task == 'instruct' else 0.5, 'epsilon': 1.2341,
    'statement': 'epsilon <= 1.235 <b>, noise as drawn', 'plan': PLAN,
    'epsilons': [row['step'] / 4 for row in rows],
    'settings': summaries.public(used, 'prism'),
    'versions': summaries.versions(),
  }  # fmt: skip
  (folder / 'summary.json').write_text(json.dumps(summary))
  return model


def write_language_run(folder: pathlib.Path, model: pathlib.Path) -> nnx.Module:
  """The files of a run that ended, with adapters that change something."""
  source = pretrained.find(str(model))
  used = _options(
    folder, '--task', 'instruct', '--data', 'T', '--eval', 'E',
    '--lora-layers', '2', '--model', model, '--max-length', '20',
  )  # fmt: skip
  used.base = source.base
  config = minilm.LoraConfig(2, ('attention', 'mlp'), top_layers=2)
  found = llama_files.load(source, config)
  params = conftest.randomise(nnx.state(found, nnx.LoRAParam), 0.3)
  rows = [
    {'step': step, 'eval_loss': loss, 'eval_perplexity': math.exp(loss),
     'eval_accuracy': 0.2}
    for step, loss in ((0, 3.0), (2, 2.5), (4, 1.05))
  ]  # fmt: skip
  return _write(folder, used, found, params, rows)


def write_review_run(
  folder: pathlib.Path, files: tuple, encoder: pathlib.Path
) -> nnx.Module:
  """The files of a run that classified; returns its model."""
  train, evaluation = files
  used = _options(
    folder, '--data', train, '--eval', evaluation, '--model', encoder,
    '--max-length', '7',
  )  # fmt: skip
  used.labels = ['bad', 'good']
  digest = weights.sha256(encoder / 'model.safetensors')
  used.base = {'model': 'tiny', 'sha256': digest}
  model = tasks.network(used, pretrained.find(str(encoder)))
  params = conftest.randomise(classifier.split(model)[1])
  row = {'step': 4, 'eval_loss': 0.5, 'eval_accuracy': 0.75}
  return _write(folder, used, model, params, [row])


def run_command(*argv) -> None:
  """Runs a command that has to succeed."""
  assert finetune.main([str(x) for x in argv]) == 0
