"""The documentation keeps its word: its Python runs, its reference is whole."""

import ast
import os
import pathlib
import re
import subprocess
import sys

import pytest

from tests import conftest
from tests.docs.readme_test import blocks

ROOT = pathlib.Path(__file__).parents[2]
DOCS = ROOT / 'docs'
TUTORIAL = DOCS / 'tutorial.md'
# A list; sessions (pages_test.py); commands (tests/finetune/commands_test.py);
# a table.
NO_PYTHON = (
  'index', 'input_metric', 'language_model', 'lora_trees', 'private_head',
)  # fmt: skip
HOW_TO = sorted(
  p for p in (DOCS / 'how_to').glob('*.md') if p.stem not in NO_PYTHON
)


def run(script, folder, **environment):
  """Runs a script as a reader would: in an empty folder, by itself."""
  path = folder / 'script.py'
  path.write_text(script)
  done = subprocess.run(
    [sys.executable, str(path)],
    cwd=folder,
    capture_output=True,
    text=True,
    check=False,
    env={**os.environ, 'PYTHONPATH': str(ROOT), **environment},
    timeout=500,
  )
  assert done.returncode == 0, done.stderr[-4000:]
  return done.stdout


def pasted(path):
  """The Python of a page in its order, with the line numbers of the page."""
  script = ''
  text = path.read_text('utf-8')
  for line, code in blocks(text, 'python'):
    script += '\n' * (line - 1 - script.count('\n')) + code
  return script


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_tutorial_ends_with_what_it_promises(tmp_path):
  printed = run(pasted(TUTORIAL), tmp_path)

  def number(name):
    return float(re.search(rf'{name}:? *(<= )?([\d.]+\d)', printed)[2])

  # The rows for evaluation are 297: a standard error of 0.03. The pretrained
  # model reads few of them, guessing a tenth.
  before, after = number('accuracy before'), number('accuracy after')
  assert before < 0.5
  assert after > before + 0.1
  # Calibrated to 8, printed rounded up to three digits.
  assert 7.9 < number('epsilon') <= 8.0
  assert 'at delta = 0.0001, add-or-remove-one neighbours' in printed
  assert 'other trainable leaves: none' in printed
  assert (tmp_path / 'digits' / 'model').is_dir()
  adapter = {p.name for p in (tmp_path / 'digits' / 'adapter').iterdir()}
  assert adapter == {'adapter_config.json', 'adapter_model.safetensors'}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_landing_page_runs_and_prints_its_statement(tmp_path):
  printed = run(pasted(DOCS / 'index.md'), tmp_path)
  assert printed.startswith('epsilon <= 1.000 at delta = 1e-05')


# Several pages in a process, so that JAX starts once; a namespace for each.
_PAGES = """
import os, pathlib, sys, traceback
failed = []
for name in {names!r}:
  os.makedirs(name)
  os.chdir(name)
  print('page', name, flush=True)
  code = compile(pathlib.Path(f'../{{name}}.py').read_text(), name, 'exec')
  try:
    exec(code, {{'__name__': '__main__'}})
  except BaseException:
    traceback.print_exc()
    failed.append(name)
  os.chdir('..')
sys.exit(f'failed: {{failed}}' if failed else 0)
"""


SHARDING = DOCS / 'how_to' / 'sharding.md'
ON_ONE_DEVICE = [p for p in HOW_TO if p != SHARDING]


# Only where it must be there are several devices: what is compiled for one
# serves the other pages and tests.
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
  ('pages', 'environment'),
  [
    (ON_ONE_DEVICE[::2], {}),
    (ON_ONE_DEVICE[1::2], {}),
    ([SHARDING], conftest.devices(4)),
  ],
  ids=['one half', 'the other', 'several devices'],
)
def test_the_snippets_of_the_how_to_pages_run(tmp_path, pages, environment):
  # A page may have sessions and commands alone, which other tests run.
  scripts = {
    path.stem: pasted(path)
    for path in pages
    if '```python' in path.read_text('utf-8')
  }
  for name, script in scripts.items():
    assert script, name
    (tmp_path / f'{name}.py').write_text(script)
  printed = run(_PAGES.format(names=list(scripts)), tmp_path, **environment)
  assert re.findall('^page (.*)$', printed, re.M) == list(scripts)


def offered(source):
  """The names that a module offers, from its source.

  What ``__all__`` says; else what an ``__init__`` hands on by ``as``; else
  what is defined without an underscore.
  """
  body = ast.parse(source).body
  for node in body:
    if (
      isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == '__all__'
    ):
      return ast.literal_eval(node.value)
  handed_on = [
    alias.asname
    for node in body
    if isinstance(node, ast.ImportFrom) and node.module != 'prism_optax'
    for alias in node.names
    if alias.asname == alias.name
  ]
  definitions = ast.FunctionDef | ast.ClassDef
  defined = [node.name for node in body if isinstance(node, definitions)]
  return handed_on or [name for name in defined if not name.startswith('_')]


def public_names():
  """'prism_optax.prism', ...: of the package and of its public modules."""
  package = ROOT / 'prism_optax'
  top = (package / '__init__.py').read_text('utf-8')
  modules = [
    alias.name
    for node in ast.parse(top).body
    if isinstance(node, ast.ImportFrom) and node.module == 'prism_optax'
    for alias in node.names
  ]
  names = [f'prism_optax.{x}' for x in offered(top) if x not in modules]
  short = {  # What the front door offers stands there, and not twice.
    (node.module, alias.name)
    for node in ast.parse(top).body
    if isinstance(node, ast.ImportFrom)
    for alias in node.names
  }
  modules += ['contrib', 'contrib.heads']  # Imported by users alone.
  for module in modules:
    path = package.joinpath(*module.split('.'), '__init__.py')
    if not path.exists():
      path = path.parent.with_suffix('.py')
    found = [x for x in offered(path.read_text('utf-8')) if x != 'heads']
    assert found, module
    inside = f'prism_optax.{module}'
    names += [f'{inside}.{x}' for x in found if (inside, x) not in short]
  return names


def test_the_reference_has_every_public_name_once():
  pages = '\n'.join(p.read_text('utf-8') for p in (DOCS / 'api').glob('*.md'))
  pattern = r'^\.\. auto(?:function|class|exception):: (\S+)$'
  documented = re.findall(pattern, pages, re.M)
  assert sorted(documented) == sorted(public_names())


def test_what_is_offered_is_found():
  source = 'from a._b import c as c\nfrom prism_optax import d as d\n'
  assert offered(source) == ['c']
  assert offered(source + "__all__ = ['e']") == ['e']
  assert offered('def f(): pass\ndef _g(): pass\nclass H: pass') == [
    'f',
    'H',
  ]
  assert {'prism_optax.prism', 'prism_optax.lora.Pair'} < set(public_names())


def test_every_page_has_its_place_in_a_table_of_contents():
  """Sphinx says so too, where it is installed."""
  entries = set()
  for page in DOCS.rglob('*.md'):
    for block in re.findall(
      r'```{toctree}\n(.*?)```', page.read_text('utf-8'), re.S
    ):
      for line in block.split('\n'):
        if line and not line.startswith(':'):
          entries |= {
            path.resolve().with_suffix('')
            for path in page.parent.glob(f'{line}.md')
          }
  pages = {p.resolve().with_suffix('') for p in DOCS.rglob('*.md')}
  assert pages - entries == {DOCS / 'index'}
