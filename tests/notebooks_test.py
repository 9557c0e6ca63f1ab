"""The notebooks run from top to bottom and are stored without outputs."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / 'notebooks').glob('*.ipynb'))


def code_of(path):
  """The code cells, without the lines that only a notebook understands."""
  cells = json.loads(path.read_text('utf-8'))['cells']
  lines = [
    line
    for cell in cells
    if cell['cell_type'] == 'code'
    for line in ''.join(cell['source']).splitlines()
    if not line.startswith(('%', '!'))
  ]
  return '\n'.join(lines)


def test_there_are_notebooks():
  assert NOTEBOOKS


@pytest.mark.parametrize('path', NOTEBOOKS, ids=lambda p: p.stem)
def test_notebook_runs(path, tmp_path):
  script = tmp_path / f'{path.stem}.py'
  script.write_text(code_of(path))
  done = subprocess.run(
    [sys.executable, str(script)],
    cwd=tmp_path,
    env={**os.environ, 'PYTHONPATH': str(ROOT), 'MPLBACKEND': 'agg'},
    capture_output=True,
    text=True,
    check=False,
    timeout=280,
  )
  assert done.returncode == 0, done.stderr
  first, last = done.stdout.split('loss on public rows: ')[-1].split(' -> ')
  assert float(last) < 0.2 * float(first)


@pytest.mark.parametrize('path', NOTEBOOKS, ids=lambda p: p.stem)
def test_notebook_is_stored_without_outputs(path):
  for cell in json.loads(path.read_text('utf-8'))['cells']:
    assert not cell.get('outputs')
    assert cell.get('execution_count') is None
