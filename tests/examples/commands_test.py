"""What can be done with a finished run, and the mistakes around one."""

import dataclasses
import io
import json
import pathlib
import re
import shutil
import signal
import sys

import finetune
import jax
import numpy as np
import pytest
import safetensors.numpy
from finetuning import (
  adapters,
  command_line,
  finished,
  options,
  privacy,
  run,
  summaries,
  tasks,
)
from finetuning.models import (
  classifier,
  llama_files,
  minilm,
  pretrained,
  weights,
)
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
    'private': True,
    'epsilon': 1.23456,
    'statement': 'epsilon = 1.2346 <b>',
    'plan': dataclasses.asdict(PLAN),
    'settings': summaries.public(finetune.settings_of(used, 'prism')),
    'versions': summaries.versions(),
  }
  (folder / 'summary.json').write_text(json.dumps(summary))


@pytest.fixture(scope='module')
def tiny(tmp_path_factory):
  """``(folder of a run, its model)``."""
  folder = tmp_path_factory.mktemp('runs')
  model = language_models.write(folder / 'model')
  return folder / 'run', write_run(folder / 'run', model)


@pytest.fixture(scope='module')
def reviews(tmp_path_factory, tiny_files, tiny_model):
  """``(folder of a run that classifies, logits of five texts)``."""
  folder = tmp_path_factory.mktemp('reviews') / 'run'
  folder.mkdir()
  train, evaluation = map(str, tiny_files)
  given = command_line.parse(
    [
      *('--data', train, '--eval', evaluation, '--model', str(tiny_model)),
      *('--noise-multiplier', '1', '--delta', '1e-3', '--rank', '2'),
      *('--max-length', '7', '--output', str(folder / 'none')),
    ]
  ).given()
  used = options.resolve(given)
  used.labels = ['bad', 'good']
  digest = weights.sha256(tiny_model / 'model.safetensors')
  used.base = {'model': 'tiny', 'sha256': digest}
  model = tasks.text_classifier(tiny_model, 2, finished.lora_of(used), 0)
  rng = np.random.default_rng(0)
  _, params, _ = classifier.split(model)
  for _, leaf in nnx.to_flat_state(params):
    leaf.set_value(rng.normal(size=leaf.shape).astype(np.float32))
  nnx.update(model, params)
  adapters.save(folder / 'adapter.safetensors', params, {})
  (folder / 'options.json').write_text(json.dumps(vars(used)))
  row = {'step': 4, 'eval_loss': 0.5, 'eval_accuracy': 0.75}
  _write_summary(folder, used, [row])
  return folder, model


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


def test_predict_gives_labels_with_probabilities(reviews, tmp_path, capsys):
  folder, model = reviews
  texts = ['film bad', 'plot good', 'actor']
  data = tmp_path / 'a.csv'
  data.write_text('text\n' + '\n'.join(texts) + '\n')
  _main('predict', folder, '--data', data, '--batch-size', '2')
  rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
  used = finished.find(str(folder)).options
  ids = minilm.tokenize(pathlib.Path(used.model), texts, used.max_length)
  want = jax.nn.softmax(nnx.jit(lambda model, ids: model(ids))(model, ids))
  found = [[row['probabilities'][name] for name in used.labels] for row in rows]
  np.testing.assert_allclose(found, want, atol=1e-5)
  assert [row['label'] for row in rows] == [
    used.labels[i] for i in np.argmax(want, axis=1)
  ]
  wrong = conftest.write_lines(tmp_path / 'b.jsonl', [{'text': 3}])
  assert finetune.main(['predict', str(folder), '--data', str(wrong)]) == 2
  assert 'row 1: expected a string' in capsys.readouterr().err


def test_merged_encoder_and_head_are_the_adapted_classifier(reviews, tmp_path):
  folder, model = reviews
  out = tmp_path / 'x'
  _main('export', folder, '--output', out, '--format', 'merged')
  head = safetensors.numpy.load_file(out / 'head.safetensors')
  facts = json.loads((out / 'head.json').read_text())
  ids = minilm.tokenize(out, ['film bad', 'plot'], facts['max_length'])
  encode = nnx.jit(lambda encoder, ids: encoder(ids))
  vectors = np.asarray(encode(minilm.load(out), ids))
  vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
  logits = facts['temperature'] * (vectors @ head['weight'].T + head['bias'])
  want = nnx.jit(lambda model, ids: model(ids))(model, ids)
  np.testing.assert_allclose(logits, want, atol=1e-4)
  card = (out / 'README.md').read_text()
  assert 'accuracy | 0.7500 before' in card


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
def test_exported_classifier_loads_as_its_card_says(reviews, tmp_path):
  torch = pytest.importorskip('torch')
  for name in ('transformers', 'peft'):
    pytest.importorskip(name)
  folder, model = reviews
  out = tmp_path / 'x'
  _main('export', folder, '--output', out, '--base')
  card = (out / 'README.md').read_text()
  code = card.split('```python\n')[1].split('```')[0]
  ids = minilm.tokenize(out, ['film bad', 'plot'], 7)
  # The little model leaves out what transformers has defaults for.
  path = out / 'base' / 'config.json'
  entries = json.loads(path.read_text())
  path.write_text(json.dumps(entries | {'model_type': 'bert'}))
  names = {'FOLDER': str(out), 'BASE': str(out / 'base')}
  exec(code, names)
  names['encoder'].eval()
  tokens = torch.tensor(ids)
  with torch.no_grad():
    found = names['logits'](
      input_ids=tokens, attention_mask=(tokens != 0).long()
    )
  want = nnx.jit(lambda model, ids: model(ids))(model, ids)
  np.testing.assert_allclose(found.numpy(), want, atol=1e-4)


@pytest.mark.slow
def test_a_language_model_learns_and_an_interrupted_run_ends_alike(
  tmp_path, monkeypatch, capsys
):
  model = language_models.write(tmp_path / 'model')
  data = conftest.write_lines(tmp_path / 'train.jsonl', ROWS * 20)
  argv = [
    *('train', '--task', 'instruct', '--model', str(model)),
    *('--data', str(data), '--eval', str(data), '--max-length', '14'),
    *('--noise-multiplier', '0.2', '--delta', '1e-3', '--seed', '3'),
    *('--batch-size', '16', '--microbatch-size', '8', '--steps', '6'),
    *('--learning-rate', '0.1', '--rank', '2', '--eval-every', '3'),
    *('--optimizer', 'dp-adamw', '--checkpoint-every', '2'),
  ]
  whole, cut = tmp_path / 'whole', tmp_path / 'cut'
  _main(*argv, '--output', whole)
  summary = json.loads((whole / 'summary.json').read_text())
  # From 57.8 to 24.2 with this seed.
  before, after = (summary[x]['eval_perplexity'] for x in ('start', 'final'))
  assert after < before / 2
  assert summary['settings']['learning_rate'] == 0.1
  draw = run.sampling.draw

  def interrupting(seed, step, **kwargs):
    if step == 3:
      signal.raise_signal(signal.SIGINT)
    return draw(seed, step, **kwargs)

  with monkeypatch.context() as patched:
    patched.setattr(run.sampling, 'draw', interrupting)
    assert finetune.main([*argv, '--output', str(cut)]) == 130
  assert 'Spent if you stop here' in capsys.readouterr().err
  _main('train', '--output', cut, '--resume')
  for name in ('adapter.safetensors', 'metrics.jsonl', 'summary.json'):
    assert (cut / name).read_bytes() == (whole / name).read_bytes()


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


def test_report_compares_the_methods_of_the_demo(tiny, tmp_path):
  folder, _ = tiny
  shutil.copy(folder / 'options.json', tmp_path)
  for name in ('prism', 'adamw'):
    (tmp_path / name).mkdir()
    for file in ('summary.json', 'metrics.jsonl'):
      shutil.copy(folder / file, tmp_path / name)
  found = finished.find_all(str(tmp_path))
  assert [run.folder.name for run in found] == ['adamw', 'prism']
  assert finished.find_all(str(folder))[0].folder == folder


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
  message = summaries.spent(PLAN, 2, 4)
  two, four = (privacy.round_up(PLAN.epsilon(steps)) for steps in (2, 4))
  assert f'Spent if you stop here: epsilon = {two:.4f} ' in message
  assert re.search(f'Reserved .* 4 steps, epsilon = {four:.4f}', message)
  assert 'Reserved' not in summaries.spent(PLAN, 4, 4)


def test_help_shows_what_an_option_is_by_default(capsys):
  with pytest.raises(SystemExit):
    finetune.main(['train', '--help'])
  shown = ' '.join(capsys.readouterr().out.replace('│', ' ').split())
  assert '(default: digits 150, classify 300, instruct 200)' in shown
  assert '(default: digits 8.0)' in shown
  assert 'a row (default: 1.0)' in shown or 'row (default: 1.0)' in shown
