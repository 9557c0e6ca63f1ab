"""The card of an exported model: what was done, and what it guarantees."""

import json
from typing import Any

from . import finished

WEIGHTS = {
  'int8': 'dense layers in int8 with a scale for each output, others bfloat16; '
  'what is merged or written as base is not rounded so',
}
LOADING = {
  ('instruct', 'peft'): """\
import peft, transformers

model = transformers.AutoModelForCausalLM.from_pretrained(BASE)
model = peft.PeftModel.from_pretrained(model, FOLDER)
tokenizer = transformers.AutoTokenizer.from_pretrained(FOLDER)""",
  ('instruct', 'merged'): """\
import transformers

model = transformers.AutoModelForCausalLM.from_pretrained(FOLDER)
tokenizer = transformers.AutoTokenizer.from_pretrained(FOLDER)""",
  ('classify', 'peft'): """\
import json, peft, torch, transformers

facts = json.load(open(FOLDER + '/head.json'))

class Classifier(transformers.BertPreTrainedModel):
  def __init__(self, config):
    super().__init__(config)
    self.bert = transformers.BertModel(config, add_pooling_layer=False)
    self.classifier = torch.nn.Linear(config.hidden_size, config.num_labels)
    self.post_init()

  def forward(self, input_ids, attention_mask):  # Of max_length at most.
    states = self.bert(input_ids, attention_mask).last_hidden_state
    mask = attention_mask[..., None]
    mean = (states * mask).sum(1) / mask.sum(1)
    mean = torch.nn.functional.normalize(mean, dim=-1)
    return facts['temperature'] * self.classifier(mean)

model = Classifier.from_pretrained(BASE, num_labels=len(facts['labels']))
# The adapters and, as modules_to_save, the head.
model = peft.PeftModel.from_pretrained(model, FOLDER)""",
}
LOADING['classify', 'merged'] = (
  LOADING['classify', 'peft']
  .replace('json, peft, ', 'json, safetensors.torch, ')
  .split('model = Classifier')[0]
  + """\
model = Classifier(
  transformers.BertConfig.from_pretrained(
    FOLDER, num_labels=len(facts['labels'])
  )
)
model.bert = transformers.BertModel.from_pretrained(
  FOLDER, add_pooling_layer=False
)
head = safetensors.torch.load_file(FOLDER + '/head.safetensors')
model.classifier.load_state_dict(head)"""
)


def card(run: finished.Finished, kind: str) -> str:
  """Markdown with the header that the hub reads.

  Args:
    run: What was exported.
    kind: The format it was exported in.
  """
  used, summary = run.options, run.summary
  base = used.base['model']
  tags = ['lora'] + ['differential-privacy'] * summary['private']
  header = [
    '---',
    # A name that needs no quotes is a JSON string as well.
    f'base_model: {json.dumps(base)}',
    f'library_name: {"peft" if kind == "peft" else "transformers"}',
    f'tags: {json.dumps(tags)}',
    '---',
  ]
  lines = [
    *header,
    '',
    f'# {summary["task"]}: {base}, adapted with {summary["optimizer"]}',
    '',
    *_privacy(run),
    '## How it was trained',
    '',
    *_table(_training(run)),
    '## On the public evaluation rows',
    '',
    *_table(_evaluation(summary)),
  ]
  loading = LOADING.get((used.task, kind))
  if loading is not None:
    lines += ['## Loading it', '', '```python', loading, '```', '']
  if used.task == 'instruct':
    lines += [
      'The frozen weights must be those of the hash above. If the base on the '
      'hub has other roundings (SmolLM2 was read from a file of four bits a '
      'weight), answers differ a little: `export --base` writes those that '
      'were used.',
      '',
    ]
  return '\n'.join(lines)


def _privacy(run: finished.Finished) -> list[str]:
  summary = run.summary
  lines = ['## Privacy', '']
  if not summary['private']:
    return [
      *lines,
      '**None**: trained without clipping and noise. Rows can be extracted.',
      '',
    ]
  plan, settings = summary['plan'], summary['settings']
  return [
    *lines,
    f'{summary["statement"]}.',
    '',
    *_table(
      {
        'unit of privacy': 'one row, added or removed',
        'sampling': f'Poisson, probability {plan["expected_batch_size"]}/'
        f'{plan["dataset_size"]}, batches cut to {plan["padded_size"]}',
        'clip': f'L2 norm {settings["l2_clip_norm"]:g} of one row, over all '
        'that is trained',
        'noise multiplier': f'{plan["noise_multiplier"]:.6g}',
        'steps': plan['steps'],
      }
    ),
    'Not covered: the number of rows, which is declared; several rows of one '
    'person together; the choice of options, if it was made by looking at '
    'private rows'
    + (
      '; the files nonprivate_* of the run, which are not here.'
      if run.options.nonprivate_diagnostics
      else '.'
    ),
    '',
  ]


def _training(run: finished.Finished) -> dict[str, Any]:
  used, summary = run.options, run.summary
  settings = summary['settings']
  rows = {
    'base': used.base['model'],
    'sha256 of the base': used.base['sha256'],
    'adapters': f'rank {used.rank}, {" and ".join(used.lora_targets)}'
    + (f', top {used.lora_layers} layers' if used.lora_layers else ''),
    'optimizer': summary['optimizer'],
    'learning rate': f'{settings["learning_rate"]:g}, cosine to a tenth',
    'length limit': f'{used.max_length} tokens',
  }
  if used.task == 'instruct':
    rows['frozen weights'] = WEIGHTS.get(used.weights_dtype, used.weights_dtype)
    rows['loss'] = (
      'sum over the tokens of the response, in nats, divided by '
      f'{used.loss_divisor}'
    )
  return rows | {
    f'version of {name}': version
    for name, version in summary['versions'].items()
  }


def _evaluation(summary: dict[str, Any]) -> dict[str, Any]:
  start, final = summary['start'], summary['final']
  return {
    name.removeprefix('eval_'): f'{start[name]:.4f} before, {final[name]:.4f} '
    'after'
    for name in start
    if name.startswith('eval_')
  }


def _table(rows: dict[str, Any]) -> list[str]:
  return [
    '| | |',
    '| --- | --- |',
    *(f'| {name} | {value} |' for name, value in rows.items()),
    '',
  ]
