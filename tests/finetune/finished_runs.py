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


def write_language_run(folder: pathlib.Path, model: pathlib.Path) -> nnx.Module:
  """The files of a run that ended, with adapters that change something."""
  folder.mkdir()
  source = pretrained.find(str(model))
  config = minilm.LoraConfig(2, ('attention', 'mlp'), top_layers=2)
  found = llama_files.load(source, config)
  params = conftest.randomise(nnx.state(found, nnx.LoRAParam), 0.3)
  adapters.save(folder / 'adapter.safetensors', params, {})
  given = command_line.parse(
    [
      *('train', '--task', 'instruct', '--data', 'T', '--eval', 'E'),
      *('--noise-multiplier', '1', '--delta', '1e-3', '--rank', '2'),
      *('--lora-layers', '2', '--model', str(model), '--max-length', '20'),
      *('--output', str(folder / 'none')),
    ]
  )
  used = vars(options.resolve(given)) | {'base': source.base}
  (folder / 'options.json').write_text(json.dumps(used))
  losses = [(step, 3.0 - step / 4) for step in (0, 2, 4)]
  rows = [
    {'step': step, 'eval_loss': loss, 'eval_perplexity': math.exp(loss),
     'eval_accuracy': 0.2}
    for step, loss in losses
  ]  # fmt: skip
  _write_summary(folder, options.Options(**used), rows)
  nnx.update(found, params)
  return found


def _write_summary(folder, used, rows) -> None:
  conftest.write_lines(folder / 'metrics.jsonl', rows)
  summary = {
    'task': 'sums <b>',
    'optimizer': 'prism',
    'start': rows[0],
    'final': rows[-1],
    'eval_rows': 100,
    'chance': None if used.task == 'instruct' else 0.5,
    'held_steps': 0,
    'private': True,
    'epsilon': 1.23452,
    'statement': 'epsilon <= 1.235 <b>, noise as drawn',
    'epsilons': [row['step'] / 4 for row in rows],
    'plan': PLAN,
    'settings': summaries.public(used, 'prism'),
    'versions': summaries.versions(),
  }
  (folder / 'summary.json').write_text(json.dumps(summary))


def write_review_run(
  folder: pathlib.Path, files: tuple, encoder: pathlib.Path
) -> nnx.Module:
  """The files of a run that classified; returns its model."""
  folder.mkdir()
  train, evaluation = map(str, files)
  given = command_line.parse(
    [
      *('train', '--data', train, '--eval', evaluation),
      *('--model', str(encoder)),
      *('--noise-multiplier', '1', '--delta', '1e-3', '--rank', '2'),
      *('--max-length', '7', '--output', str(folder / 'none')),
    ]
  )
  used = options.resolve(given)
  used.labels = ['bad', 'good']
  digest = weights.sha256(encoder / 'model.safetensors')
  used.base = {'model': 'tiny', 'sha256': digest}
  model = tasks.network(used, pretrained.find(str(encoder)))
  params = conftest.randomise(classifier.split(model)[1])
  nnx.update(model, params)
  adapters.save(folder / 'adapter.safetensors', params, {})
  (folder / 'options.json').write_text(json.dumps(vars(used)))
  row = {'step': 4, 'eval_loss': 0.5, 'eval_accuracy': 0.75}
  _write_summary(folder, used, [row])
  return model


def run_command(*argv) -> None:
  """Runs a command that has to succeed."""
  assert finetune.main([str(x) for x in argv]) == 0
