"""Exports: the same model in the files of other programs."""

import hashlib
import json
import re
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

from prism_optax.finetune import adapters, exporting, finished, methods
from prism_optax.finetune import main as finetune
from prism_optax.finetune.models import classifier, minilm, pretrained
from tests.finetune import conftest
from tests.finetune.finished_runs import run_command


@pytest.mark.slow
def test_merged_encoder_and_head_are_the_adapted_classifier(
  review_run, tmp_path
):
  folder, model = review_run
  out = tmp_path / 'x'
  run_command('export', folder, '--output', out, '--format', 'merged')
  head = safetensors.numpy.load_file(out / 'head.safetensors')
  facts = json.loads((out / 'head.json').read_text())
  ids = minilm.tokenize(out, ['film bad', 'plot'], facts['max_length'])
  encoder = minilm.load(pretrained.find(str(out)))
  vectors = np.asarray(conftest.run(encoder, ids))
  vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
  logits = facts['temperature'] * (vectors @ head['weight'].T + head['bias'])
  want = conftest.run(model, ids)
  np.testing.assert_allclose(logits, want, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize('kind', ['peft', 'merged'])
@pytest.mark.parametrize('name', ['language_run', 'review_run'])
def test_an_export_is_read_back(name, kind, request, tmp_path, capsys):
  folder, _ = request.getfixturevalue(name)
  more, output = ('--format', kind, '--check'), tmp_path / 'new' / 'x'
  run_command('export', folder, '--output', output, *more)
  # A rounding; and more than one hundredth.
  words = r'most (0|.\..e-0[5-9]); .* by .\..e[+-]0[012]\n'
  assert re.search(words, capsys.readouterr().out)
  modes = {path.stat().st_mode for path in output.iterdir()}
  assert len(modes) == 1  # safetensors keeps its files to their owner.


class _Scaled(nnx.Module):
  def __init__(self, scale):
    self.scale = nnx.LoRAParam(jnp.float32(scale))

  def __call__(self, ids):  # From -11 to 10.
    return self.scale * (3 * ids - 14)


def test_what_is_half_as_far_as_no_adapters_is_another_model():
  near = exporting.check(_Scaled(1.0), _Scaled(0.51), 'x')
  assert near.endswith('at most 5.4e+00; the adapters change them by 1.1e+01')
  with pytest.raises(ValueError, match='not the model of the run. read back: '):
    exporting.check(_Scaled(1.0), _Scaled(0.5), 'x')


def test_adapters_that_never_moved_are_not_exported(
  language_run, tmp_path, capsys
):
  folder, _ = language_run
  shutil.copytree(folder, tmp_path / 'run')
  run = finished.find(str(tmp_path / 'run'))
  model, _ = finished.model(run, before=True)
  _, start, _ = classifier.split(model)
  # Held steps leave PRISM in the gauge that it begins in.
  adapters.save(run.adapter, methods.prepared('prism', start), {})
  argv = ['export', str(run.folder), '--output', str(tmp_path / 'x')]
  assert finetune.main(argv) == 2
  assert 'training never moved the adapters' in capsys.readouterr().err
  assert not (tmp_path / 'x').exists()
  finished.model(run)  # But asked what it answers.


def test_a_model_in_several_files_is_the_one_in_one_file(
  language_run, tmp_path, capsys
):
  """The embedding and the head alone are larger than the limit."""
  folder, _ = language_run
  argv = 'export', folder, '--format', 'merged', '--output'
  run_command(*argv, tmp_path / 'one')
  run_command(*argv, tmp_path / 'x', '--max-shard-size', '2KB')
  want = pretrained.find(str(tmp_path / 'one'))
  found = pretrained.find(str(tmp_path / 'x'))
  assert found.names == want.names
  for name in want.names:
    np.testing.assert_array_equal(found.read(name), want.read(name))
  index = json.loads((tmp_path / 'x' / pretrained.INDEX).read_text())
  total = sum(want.read(name).nbytes for name in want.names)
  stops = json.loads((tmp_path / 'x' / 'generation_config.json').read_text())
  assert stops == {'eos_token_id': list(want.stops)}
  assert index['metadata'] == {'total_size': total}
  files = sorted((tmp_path / 'x').glob('*.safetensors'))
  assert len(files) > total / 2000
  # A run that goes on has to have the same weights in all of them.
  digests = '\n'.join(hashlib.sha256(x.read_bytes()).hexdigest() for x in files)
  assert found.sha256 == hashlib.sha256(digests.encode()).hexdigest()
  for more, message in (
    (['--max-shard-size', '2'], 'such as 5GB or 200MB, got 2 '),
    (['--max-shard-size', '0GB'], 'got 0GB'),
    (['--max-shard-size', '1GB', '--format', 'peft'], 'merged, --base'),
  ):
    given = [*map(str, argv), str(tmp_path / 'y'), *more]
    assert finetune.main(given) == 2
    assert message in capsys.readouterr().err
  assert not (tmp_path / 'y').exists()
  files[1].unlink()
  with pytest.raises(ValueError, match=rf"lacks \['{files[1].name}'\]"):
    pretrained.find(str(tmp_path / 'x'))


def test_the_base_beside_an_adapter_is_the_runs(language_run, tmp_path, capsys):
  folder = language_run[0]
  run_command('export', folder, '--output', tmp_path, '--base')
  base = pretrained.find(str(folder.parent / 'model'))
  again = pretrained.find(str(tmp_path / 'base'))
  assert again.names == base.names
  assert again.stops == base.stops
  assert finetune.main(['export', str(folder), '--output', str(tmp_path)]) == 2
  assert 'is not empty' in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize('kind', ['peft', 'merged'])
def test_exported_classifier_loads_as_its_card_says(review_run, tmp_path, kind):
  torch, *_ = map(pytest.importorskip, ('torch', 'transformers', 'peft'))
  folder, model = review_run
  out = tmp_path / 'x'
  more = ['--base'] if kind == 'peft' else []
  run_command('export', folder, '--output', out, '--format', kind, *more)
  card = (out / 'README.md').read_text()
  code = card.split('```python\n')[1].split('```')[0]
  ids = minilm.tokenize(out, ['film bad', 'plot'], 7)
  # The little model leaves out what transformers has defaults for.
  path = (out / 'base' if kind == 'peft' else out) / 'config.json'
  entries = json.loads(path.read_text())
  path.write_text(json.dumps(entries | {'model_type': 'bert'}))
  names = {'FOLDER': str(out), 'BASE': str(out / 'base')}
  exec(code, names)
  tokens = torch.tensor(ids)
  with torch.no_grad():
    found = names['model'].eval()(
      input_ids=tokens, attention_mask=(tokens != 0).long()
    )
  want = conftest.run(model, ids)
  np.testing.assert_allclose(found.numpy(), want, atol=1e-4)
