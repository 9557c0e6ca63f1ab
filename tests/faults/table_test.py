"""The table of faults names tests that exist, and all of those made for it."""

import ast
import pathlib
import re

ROOT = pathlib.Path(__file__).parents[2]
TABLE = (ROOT / 'docs' / 'faults.md').read_text('utf-8')
# Files whose every test is a fault, so that a new one gets a row.
COVERED = ('tests/faults', 'tests/scale_out', 'tests/audit')
# What supports a row rather than being one.
SUPPORTING = {
  'test_what_was_saved_comes_back',
  'test_steps_of_the_whole_chain',
  'test_a_mesh_gives_what_one_device_gives',
  'test_on_eight_devices',
  'test_every_row_names_a_test_that_exists',
  'test_every_fault_that_is_tested_has_a_row',
}


def _rows():
  return [
    [cell.strip() for cell in line.strip('| ').split(' | ')]
    for line in TABLE.splitlines()
    if line.startswith('| ') and not line.startswith(('| fault', '| ---'))
  ]


def _tests_of(path):
  tree = ast.parse(path.read_text('utf-8'))
  return {
    node.name
    for node in tree.body
    if isinstance(node, ast.FunctionDef) and node.name.startswith('test_')
  }


def test_every_row_names_a_test_that_exists():
  rows = _rows()
  assert len(rows) > 30
  for row in rows:
    assert len(row) == 3, row
    assert all(row), row
    path, _, name = row[2].strip('`').partition('::')
    assert name in _tests_of(ROOT / path), row


def test_every_fault_that_is_tested_has_a_row():
  named = set(re.findall(r'::(test_\w+)', TABLE))
  for folder in COVERED:
    for path in (ROOT / folder).glob('*_test.py'):
      missing = _tests_of(path) - named - SUPPORTING
      assert not missing, (path.name, missing)
