"""What can be done with a finished run, and the mistakes around one."""

import dataclasses
import io
import json
import pathlib
import re
import sys

import finetune
import numpy as np
import pytest
import safetensors.numpy
from finetuning import adapters, command_line, finished, options, privacy, run
from finetuning.models import llama_files, minilm, pretrained
from flax import nnx

from tests.examples import conftest, language_models

# No batch is ever cut, which is quicker to account for.
PLAN = privacy.Plan(60, 16, 60, 4, 1.0, 1e-3)
ROWS = [
  {'prompt': 'two plus three', 'response': 'five'},
  {'prompt': 'two', 'response': 'is two'},
]
IDS = np.array([[1, 5, 9, 33, 7, 2]])


def _model(folder, **lora):
  config = minilm.LoraConfig(2, ('attention', 'mlp'), **lora)
  return llama_files.load(pretrained.find(str(folder)), config)


def _logits(model):
  return np.asarray(nnx.jit(lambda model, ids: model(ids))(model, IDS))


def write_run(folder: pathlib.Path, model: pathlib.Path) -> nnx.Module:
  """The files of a run that ended, with adapters that change something."""
  folder.mkdir()
  found = _model(model, top_layers=2)
  rng = np.random.default_rng(0)
  params = nnx.state(found, nnx.LoRAParam)
  for _, leaf in nnx.to_flat_state(params):
    leaf.set_value(rng.normal(size=leaf.shape, scale=0.3).astype(np.float32))
  adapters.save(folder / 'adapter.safetensors', params, {})
  given = command_line.parse(
    [
      *('train', '--task', 'instruct', '--data', 'T', '--eval', 'E'),
      *('--noise-multiplier', '1', '--delta', '1e-3', '--rank', '2'),
      *('--lora-layers', '2', '--model', str(model), '--max-length', '20'),
      *('--output', str(folder / 'none')),
    ]
  ).given()
  source = pretrained.find(str(model))
  used = vars(options.resolve(given)) | {'base': source.base}
  (folder / 'options.json').write_text(json.dumps(used))
  rows = [
    {
      'step': step,
      'eval_loss': 3.0 - step / 4,
      'eval_perplexity': float(np.exp(3.0 - step / 4)),
      'eval_accuracy': 0.2,
    }
    for step in (0, 2, 4)
  ]
  conftest.write_lines(folder / 'metrics.jsonl', rows)
  summary = {
    'task': 'sums <b>',
    'optimizer': 'prism',
    'start': rows[0],
    'final': rows[-1],
    'private': True,
    'epsilon': 1.23456,
    'statement': 'epsilon = 1.2346 <b>',
    'plan': dataclasses.asdict(PLAN),
    'settings': run._public(
      finetune.settings_of(options.Options(**used), 'prism')
    ),
    'versions': run._versions(),
  }
  (folder / 'summary.json').write_text(json.dumps(summary))
  nnx.update(found, params)
  return found


@pytest.fixture(scope='module')
def tiny(tmp_path_factory):
  """``(folder of a run, its model)``."""
  folder = tmp_path_factory.mktemp('runs')
  model = language_models.write(folder / 'model')
  return folder / 'run', write_run(folder / 'run', model)


def _main(*argv) -> None:
  assert finetune.main([str(x) for x in argv]) == 0


def test_predict_answers_each_row_with_what_chat_says(
  tiny, tmp_path, capsys, monkeypatch
):
  folder, _ = tiny
  data = conftest.write_lines(
    tmp_path / 'a.jsonl', [{'prompt': row['prompt']} for row in ROWS]
  )
  more = '--max-new-tokens', 4
  _main('predict', folder, '--data', data, *more)
  printed = capsys.readouterr().out.splitlines()
  assert len(printed) == 2
  path = tmp_path / 'out.jsonl'
  _main('predict', folder, '--data', data, '--output', path, *more)
  assert path.read_text().splitlines() == printed
  capsys.readouterr()
  monkeypatch.setattr(sys, 'stdin', io.StringIO('two plus three\n\ntwo\n'))
  _main('chat', folder, *more)
  answers = [json.loads(line)['response'] for line in printed]
  assert capsys.readouterr().out.splitlines() == answers
  _main('predict', folder, '--data', data, '--before', *more)
  assert capsys.readouterr().out.splitlines() != printed


def test_merged_model_is_the_adapted_one(tiny, tmp_path):
  folder, model = tiny
  _main('export', folder, '--output', tmp_path / 'x', '--format', 'merged')
  merged = llama_files.load(pretrained.find(str(tmp_path / 'x')))
  want, found = _logits(model), _logits(merged)
  assert np.abs(want - _logits(_model(folder.parent / 'model'))).max() > 0.1
  np.testing.assert_allclose(found, want, atol=1e-4)


def test_peft_files_and_card_say_what_was_done(tiny, tmp_path, capsys):
  folder, _ = tiny
  _main('export', folder, '--output', tmp_path / 'x', '--base')
  stored = safetensors.numpy.load_file(
    tmp_path / 'x' / 'adapter_model.safetensors'
  )
  assert {name.split('.')[4] for name in stored} == {'1', '2'}  # Layers.
  config = json.loads((tmp_path / 'x' / 'adapter_config.json').read_text())
  assert config['task_type'] == 'CAUSAL_LM'
  card = (tmp_path / 'x' / 'README.md').read_text()
  base = pretrained.find(str(folder.parent / 'model'))
  for fact in (
    'epsilon | 1.2346 ',  # Rounded up.
    'delta | 0.001',
    'unit of privacy | one row, added or removed',
    'Poisson, probability 16/60, batches cut to 60',
    'clip | L2 norm 1 ',
    'learning rate | 0.005',
    base.sha256,
    'version of prism-optax',
    'perplexity | 20.0855 before, 7.3891 after',
  ):
    assert fact in card, fact
  again = pretrained.find(str(tmp_path / 'x' / 'base'))
  assert again.names == base.names
  assert again.stops == base.stops
  assert finetune.main(['export', str(folder), '--output', str(tmp_path)]) == 2
  assert 'is not empty' in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize('kind', ['peft', 'merged'])
def test_exported_model_gives_the_same_logits_in_torch(tiny, tmp_path, kind):
  torch, transformers, peft = (
    pytest.importorskip(name) for name in ('torch', 'transformers', 'peft')
  )
  folder, model = tiny
  out = tmp_path / 'x'
  more = ['--base'] if kind == 'peft' else []
  _main('export', folder, '--output', out, '--format', kind, *more)
  base = out / 'base' if kind == 'peft' else out
  theirs = transformers.AutoModelForCausalLM.from_pretrained(
    base, dtype=torch.float32
  )
  if kind == 'peft':
    theirs = peft.PeftModel.from_pretrained(theirs, out)
  with torch.no_grad():
    found = theirs.eval()(torch.tensor(IDS)).logits.numpy()
  np.testing.assert_allclose(found, _logits(model), atol=1e-4)


def test_report_is_one_page_of_public_figures(tiny, tmp_path):
  folder, _ = tiny
  page = tmp_path / 'report.html'
  _main('report', folder, '--output', page)
  text = page.read_text()
  assert 'src="data:image/png;base64,' in text
  for fact in (
    '1.2346',
    '20.0855',
    '7.3891',
    'learning_rate',
    'sums &lt;b&gt;',
  ):
    assert fact in text, fact
  assert '<b>' not in text


def test_other_weights_and_unfinished_runs_are_refused(tiny, tmp_path):
  folder, _ = tiny
  opened = finished.find(str(folder))
  changed = dict(opened.options.base, sha256='0' * 64)
  opened.options.base = changed
  with pytest.raises(ValueError, match='the run began with 0000'):
    finished.language_model(opened)
  with pytest.raises(ValueError, match='there is no run'):
    finished.find(str(tmp_path))
  (tmp_path / 'options.json').write_text('{}')
  with pytest.raises(ValueError, match='is not finished: go on with'):
    finished.find(str(tmp_path))
  with pytest.raises(ValueError, match='--task classify, got instruct'):
    finished.find(str(folder), 'classify')


def test_check_data_counts_and_says_that_it_is_not_private(tmp_path, capsys):
  rows = [{'text': 'a', 'label': x} for x in ('yes', 'yes', 'no', 'maybe')]
  path = conftest.write_lines(tmp_path / 'a.jsonl', [*rows, '[]'])
  _main('check-data', '--data', path, '--labels', 'yes', 'no')
  out = capsys.readouterr().out
  assert out.startswith('NOT PRIVATE')
  for line in (
    '5  rows\n',
    '1  rows that cannot be read',
    "1  rows with the unknown label 'maybe': zero gradient",
    '3  rows that can be used',
    "2    of them labelled 'yes'",
  ):
    assert line in out, line


def test_an_output_that_cannot_be_written_is_said_before_the_work(
  tmp_path, capsys
):
  (tmp_path / 'file').write_text('')
  argv = ['--output', str(tmp_path / 'file' / 'out')]
  assert finetune.main(argv) == 2
  error = capsys.readouterr().err
  assert 'cannot be written' in error
  assert 'saved before' not in error


def test_a_stop_says_what_is_spent_and_what_is_reserved():
  message = run._spent(PLAN, 2, 4)
  two, four = (privacy.round_up(PLAN.epsilon(steps)) for steps in (2, 4))
  assert f'Spent if you stop here: epsilon = {two:.4f} ' in message
  assert re.search(f'Reserved .* 4 steps, epsilon = {four:.4f}', message)
  assert 'Reserved' not in run._spent(PLAN, 4, 4)


def test_help_shows_what_an_option_is_by_default(capsys):
  with pytest.raises(SystemExit):
    finetune.main(['train', '--help'])
  shown = ' '.join(capsys.readouterr().out.replace('│', ' ').split())
  assert '(default: digits 150, classify 300, instruct 200)' in shown
  assert '(default: digits 8.0)' in shown
  assert 'a row (default: 1.0)' in shown or 'row (default: 1.0)' in shown
