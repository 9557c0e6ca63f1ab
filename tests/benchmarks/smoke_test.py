"""Each benchmark runs, on the smallest sizes that its `--smoke` has."""

import pathlib
import re
import runpy
import sys

import pytest

from benchmarks.accuracy import digits
from benchmarks.common import runner
from benchmarks.privacy import audit, low_bits
from prism_optax.finetune import digits as program
from tests.finetune.conftest import shared_data

FOLDER = pathlib.Path(runner.__file__).parents[1]
ELSEWHERE = {
  'accuracy/language_model': 'a run trains in language_model_test.py',
  'accuracy/regret': 'encodes texts for minutes: regret_test.py',
  'accuracy/utility': 'a run is charged for its releases in utility_test.py',
  'pages/figures': 'writes pages: tests/docs/figures_test.py',
  'speed/at_scale': 'compiles for 64 chips: minutes',
  'speed/language_model_memory': 'measures processes: its own test',
  'speed/language_model_memory_table': 'compiles models of billions',
  'speed/lowered': 'needs compilers for accelerators: its own test',
  'speed/no_hang': 'its own test',
}
TEXTS = 'accuracy/private_heads', 'geometry/amplification'
# The other experiments take the same ways through the script.
ONLY = {'accuracy/digits': ['--only', 'options', 'clipping', 'muon']}
SCRIPTS = sorted(
  str(path.relative_to(FOLDER).with_suffix(''))
  for path in FOLDER.rglob('*.py')
  if '__main__' in path.read_text('utf-8')
)


def test_each_script_is_run_somewhere():
  assert set(SCRIPTS) >= {*ELSEWHERE, *TEXTS}


@pytest.fixture(scope='module')
def few_texts(tmp_path_factory):
  """Options naming a hundred texts, because all take a minute to encode."""
  name = 'banking77/train.jsonl'
  folder = tmp_path_factory.mktemp('texts')
  path = shared_data('banking77') / 'train.jsonl'
  lines = path.read_text('utf-8').splitlines()
  (folder / name).parent.mkdir()
  (folder / name).write_text('\n'.join(lines[::100]) + '\n', 'utf-8')
  return ['--data', str(folder), '--cache', str(folder / 'encoded')]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize('script', [x for x in SCRIPTS if x not in ELSEWHERE])
def test_it_prints_its_table(script, monkeypatch, capsys, request):
  arguments = [script, '--smoke', *ONLY.get(script, ())]
  if script in TEXTS:
    arguments += request.getfixturevalue('few_texts')
  monkeypatch.setattr(sys, 'argv', arguments)
  # A network of random weights: to pretrain one takes minutes.
  monkeypatch.setattr(program, 'pretrain_or_load', lambda *_: 'none')
  runpy.run_module(
    f'benchmarks.{script.replace("/", ".")}', run_name='__main__'
  )
  printed = capsys.readouterr().out
  assert re.search(r'\d', printed)
  assert 'nan' not in printed.lower().split()


def test_every_setting_has_one_row():
  """So a table is not measured again, and no row is of another setting."""
  for name, defaults, settings in (
    (
      'digits_cpu',
      digits.DEFAULTS,
      [x for each in digits.EXPERIMENTS.values() for x in each()],
    ),
    ('audit', {}, audit.settings()),
    ('low_bits', {}, low_bits.settings()),
  ):
    store = runner.Store(runner.FOLDER / f'{name}.json', defaults)
    found = [store.find(x) for x in settings]
    assert None not in found, name
    assert len({id(x) for x in found}) == len(store.rows), name
