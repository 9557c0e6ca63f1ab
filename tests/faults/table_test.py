"""The table of faults names all tests that are made for it.

That those it names are there, tests/docs/links_test.py looks at.
"""

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
  'test_every_fault_that_is_tested_has_a_row',
}


def test_every_fault_that_is_tested_has_a_row():
  named = set(re.findall(r'::(test_\w+)', TABLE)) | SUPPORTING
  for folder in COVERED:
    for path in (ROOT / folder).glob('*_test.py'):
      for node in ast.parse(path.read_text('utf-8')).body:
        name = getattr(node, 'name', '')
        assert not name.startswith('test_') or name in named, (path.name, name)
