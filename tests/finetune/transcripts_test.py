"""All that the commands write, against transcripts of earlier runs.

Words and whole numbers are compared as they are, other numbers to two digits. A
change on purpose is written down with UPDATE=1 in the environment, and read in
the diff.
"""

import io
import os
import pathlib
import re
import sys

import numpy as np
import pytest
import safetensors
import tqdm
from absl import logging
from matplotlib import figure, style

from prism_optax import training
from prism_optax.finetune import command_line, digits
from prism_optax.finetune import training as finetune_training
from prism_optax.finetune.models import chat
from tests import cases
from tests.core import seams
from tests.finetune import conftest, finished_runs, language_models

HERE = pathlib.Path(__file__).with_name('transcripts')
NUMBER = re.compile(r'-?\d+(?:\.\d+(?:e[+-]?\d+)?|e[+-]?\d+)')
# Digests, pictures, versions of packages, and what coins of an audit decide.
UNTOLD = re.compile(
  r'[0-9a-f]{64}|(?<=base64,....)[^"]+|<style>.*?</style>'
  r'|(?<=, final parameters)[^\n]+|(?<=, every step)[^\n]+'
  r'|(?:jax|optax|dp-accounting)(?:": "|</td><td>| \| )[\d.]\S+',
  re.S,
)
# Two steps, so that nothing rounds far.
SHORT = (
  '--steps 2 --eval-every 1 --batch-size 16 --microbatch-size 8 --rank 2'
  ' --seed 5 --output out'
)
FILES = '--data train.jsonl --eval public.jsonl'
COMMANDS = {
  'classify': (
    f'check-data {FILES}',
    f'train {FILES} {SHORT} --model encoder --max-length 7 --target-epsilon 2'
    ' --delta 1e-3 --optimizer dp-adamw --nonprivate-diagnostics'
    ' --dataset-size 80',
    'predict out --data public.jsonl --output labels.jsonl',
    'report out --rows 1 --output report.html',
    'export out --output merged --format merged --check',
    'audit out --canaries 10 --noise 0.5',
  ),
  'instruct': (
    f'check-data --task instruct {FILES} --model model --max-length 12',
    f'train --task instruct {FILES} {SHORT} --model model --max-length 14'
    ' --optimizer adamw --learning-rate 0.1 --batch-size 66',
    'predict out --data public.jsonl --max-new-tokens 3 --temperature 1'
    ' --seed 4 --batch-size 2 --output answers.jsonl',
    'predict out --data public.jsonl --max-new-tokens 3 --before'
    ' --batch-size 1 --prompt-column response',
    'chat out --max-new-tokens 3 --system two --temperature 1 --before',
    'report out --rows 2 --output report.html',
    'export out --output adapter --base',
    'train --output out --resume --data train.jsonl --model model',
  ),
  'private-instruct': (
    f'train --task instruct {FILES} {SHORT} --model model --max-length 14'
    ' --optimizer dp-muon --noise-multiplier 0.7 --delta 1e-3 --eval-rows 3'
    ' --weights-dtype int8 --lora-targets mlp --lora-layers 1 --skip-padding'
    ' --loss-divisor 9',
    'report out --output report.html',
    'export out --output merged --format merged --max-shard-size 4KB',
  ),
  'digits': (
    f'train {SHORT} --optimizer dp-adamw --lora-targets mlp',
    f'train {SHORT.replace(" out", " plain")} --optimizer adamw',
    'report out plain --output report.html',
  ),
  'plan': (
    'plan --dataset-size 500 --target-epsilon 2 --delta 1e-4 --hours 0.1'
    ' --gradients-per-second 5.3328 --examples-per-user 2 --picture plan.png',
  ),
}


# Rows of which nothing is learned, and what is too long to be read whole.
BAD = ['[]', '{"text":"film","label":"maybe"}', '{"text":3}', '{"text":"a"}']
LONG = {'prompt': 'two', 'response': 'is two ' * 5}
EDGES = [{'prompt': 'two ' * n, 'response': 'is'} for n in (6, 7, 8)]
ROLES = {'system': 'two', 'user': 'three', 'assistant': 'is'}
TALK = {'messages': [{'role': x, 'content': y} for x, y in ROLES.items()]}


def _told(artist, names) -> str:
  found = (getattr(artist, f'get_{name}')() for name in names.split())
  return ' '.join(str(getattr(x, 'tolist', lambda x=x: x)()) for x in found)


def _drawn(axes) -> str:
  """Titles, lines and texts of a picture."""
  line = 'label linestyle color marker linewidth markersize xydata'
  lines = [_told(x, line) for x in axes.get_lines()]
  points = 'offsets sizes edgecolor facecolor'
  lines += [_told(x, points) for x in axes.collections]
  sides = [
    f'{x.label.get_text()} {_told(x, "scale view_interval minorticklocs")}'
    f' {[label.get_text() for label in x.get_majorticklabels()]}'
    f' grid: {_told(x.get_gridlines()[0], "visible alpha")}'
    for x in (axes.xaxis, axes.yaxis)
  ]
  texts = [f'{x.xy} {x.xyann} {_told(x, "text ha size")}' for x in axes.texts]
  if legend := axes.get_legend():
    texts += [_told(x, 'text size') for x in legend.get_texts()]
  drawn = [name for name, x in axes.spines.items() if x.get_visible()]
  return '\n'.join([axes.get_title(), *drawn, *sides, *lines, *texts])


def _read(path: pathlib.Path) -> str:
  if path.suffix != '.safetensors':
    return path.read_text()
  norm = np.linalg.norm
  with safetensors.safe_open(path, 'numpy') as file:
    norms = {x: float(norm(file.get_tensor(x))) for x in sorted(file.keys())}
    return f'{norms} {file.metadata()}'


@pytest.fixture
def folder(tmp_path, tiny_model, tiny_files, request, monkeypatch):
  """Where the commands run, with models and data."""
  path = tmp_path / 'data'
  path.mkdir()
  (path / 'encoder').symlink_to(tiny_model)
  language_models.write(path / 'model')
  texts = [file.read_text().splitlines() for file in tiny_files]
  rows = [TALK, *finished_runs.ROWS]
  talks = [*rows * 20, LONG, *EDGES], rows
  private, public = talks if 'instruct' in request.node.name else texts
  lines = conftest.write_lines(path / 'train.jsonl', [*private, *BAD])
  lines.write_bytes(lines.read_bytes() + b'{"text": "film \xff", "label": 1}\n')
  conftest.write_lines(path / 'public.jsonl', public)
  monkeypatch.chdir(path)
  return path


@cases.fast_first('name', ('plan', 'instruct'), COMMANDS)
def test_commands_write_what_they_wrote(name, folder, capsys, monkeypatch):
  monkeypatch.setattr(digits, 'STEPS', digits.STEPS - 1498)  # The last two.
  texts = command_line.COMMANDS
  monkeypatch.setitem(texts, 'predict', texts['predict'].replace('128', '3'))
  # What is printed is seen at once.
  monkeypatch.setattr(sys.stdout, 'flush', lambda: sys.stdout.write('|'))
  text, save, given = [], figure.Figure.savefig, {*folder.rglob('*')}

  def savefig(self, *args, **options):
    engine = type(self.get_layout_engine()).__name__
    text.append(f'{self.get_size_inches()} {engine} {options}')
    text.extend(map(_drawn, self.axes))
    save(self, *args, **options)

  made = tqdm.tqdm.__init__

  def make_bar(self, *args, **options):
    text.append(f'bar: {args[1:]} {options}')
    made(self, *args, **options | {'disable': True})

  monkeypatch.setattr(figure.Figure, 'savefig', savefig)
  monkeypatch.setattr(tqdm.tqdm, '__init__', make_bar)

  def tell(module, name, said):
    do = getattr(module, name)

    def told(*args, **options):
      result = do(*args, **options)
      text.append(said(result, *args, **options))
      return result

    monkeypatch.setattr(module, name, told)

  def planned(made, _, options, *__):
    found = (
      made.noise_multiplier,
      made.parts.execution,
      made.parts.settings.tags,
    )
    return f'planned: {options.plan} {found}'

  tell(finetune_training, 'make', planned)
  tell(chat.Chat, 'prompt', lambda _, __, messages: f'asked: {messages}')
  tell(tqdm.tqdm, 'set_postfix', lambda _, __, shown: f'bar: {shown}')
  tell(training, 'save_state', lambda _, __, state: f'saved: step {state.step}')
  tell(digits.optax, 'adamw', lambda *_, **options: f'adamw: {options}')
  for command in COMMANDS[name]:
    monkeypatch.setattr(sys, 'stdin', io.StringIO('two\nplus\n\ntwo\n'))
    # The style of benchmarks is another one.
    with style.context('default'), seams.noise_of_the_key():
      finished_runs.run_command(*command.split())
    text.append(f'$ {command}\n{"".join(capsys.readouterr())}')
  for path in sorted({*folder.rglob('*.*')} - given):
    if path.suffix in ('.json', '.jsonl', '.html', '.md', '.safetensors'):
      text.append(f'= {path}\n{_read(path)}')
  assert logging.get_verbosity() == logging.ERROR
  found = UNTOLD.sub('...', '\n'.join(text).replace(str(folder), '.'))
  stored = HERE / f'{name}.txt'
  if 'UPDATE' in os.environ:
    stored.write_text(found)
  wanted = stored.read_text()
  assert NUMBER.sub('#', found) == NUMBER.sub('#', wanted)
  assert not re.search(r'"\d": 0\.\d{7}', found)  # Of labels, rounded.
  numbers = ([float(x) for x in NUMBER.findall(y)] for y in (found, wanted))
  np.testing.assert_allclose(*numbers, rtol=0.02, atol=0.005)
