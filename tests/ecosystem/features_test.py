"""The table of libraries: every cell has a test that exists."""

import ast
import importlib.util
import os
import pathlib
import subprocess
import sys

import pytest

from tests.ecosystem import features

TESTS = pathlib.Path(__file__).parents[1]
# The package that is missing where the library's models cannot be imported.
EXAMPLES = {'qwix': 'qwix', 'keras': 'keras', 'gemma': 'kauldron'}


@pytest.mark.parametrize('library', features.LIBRARIES)
def test_every_cell_is_backed_by_a_test(library):
  tests = features.LIBRARIES[library]
  assert len(tests) == len(features.FEATURES)
  for test in filter(None, tests):
    file, _, name = test.partition('::')
    tree = ast.parse((TESTS / file).read_text())
    functions = [x.name for x in tree.body if isinstance(x, ast.FunctionDef)]
    assert name in functions, test


def test_the_page_has_the_table():
  page = TESTS.parent / 'docs' / 'how_to' / 'lora_trees.md'
  assert features.table() in page.read_text()


@pytest.mark.slow
@pytest.mark.parametrize('name', EXAMPLES)
def test_the_script_runs(name):
  if not importlib.util.find_spec(EXAMPLES[name]):
    pytest.skip(f'needs {name} with {EXAMPLES[name]}')
  path = TESTS.parent / 'examples' / f'lora_{name}.py'
  assert len(path.read_text().splitlines()) <= 40
  done = subprocess.run(
    [sys.executable, str(path)],
    env={**os.environ, 'PYTHONPATH': str(TESTS.parent)},
    capture_output=True,
    text=True,
    check=False,
    timeout=250,
  )
  assert done.returncode == 0, done.stderr[-2000:]
  assert 'right (n, r)' in done.stdout
