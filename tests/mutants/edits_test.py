"""The edits are wrong programs, and each differs in one place."""

import pathlib

import pytest

import prism_optax
from tests.mutants import edits


@pytest.mark.parametrize(
  ('source', 'expected'),
  [
    ('x = a @ b', {'x = b @ a'}),
    ('x = a @ a', set()),
    ('x = (a +\n  b)', {'x = (a -\n  b)'}),
    ('x = (a  # +\n  + b)', set()),
    ('x = -a', {'x = (a)'}),
    ('x = f(a, b)', {'x = f(b, a)'}),
    ('x = max(a, b)', {'x = min(a, b)'}),
    ('x = q.mT', {'x = q'}),
    ('x = left.right', {'x = right.right', 'x = left.left'}),
    ('x = a if b else c', {'x = (c if b else a)'}),
    ('x = 1, 0.5, 0.0', {'x = 2, 0.5, 0.0', 'x = 1, 1.0, 0.0',
                         'x = 1, 0.5, 1.0'}),
    ('x = a is None and b < c',
     {'x = a is not None and b < c', 'x = a is None or b < c',
      'x = a is None and b <= c'}),
    ('if a:\n  raise E(1)', {'if False:\n  raise E(1)'}),
    ('é = "é"; x = a * b', {'é = "é"; x = a / b'}),
    ('def f(x: a | b = True) -> -1:\n  "Doc 1."\n  return f"{-x}"',
     {'def f(x: a | b = False) -> -1:\n  "Doc 1."\n  return f"{-x}"'}),
    ('__all__ = [1]', set()),
  ],
)  # fmt: skip
def test_rules(source, expected):
  assert {e.apply(source) for e in edits.edits_of(source)} == expected


def test_all_of_a_file_are_valid_and_change_the_line_that_they_name():
  package = pathlib.Path(prism_optax.__file__).parent
  source = (package / '_linalg' / '_products.py').read_text()
  found = edits.edits_of(source)
  assert len(found) > 100
  for edit in found:
    changed = edit.apply(source)
    compile(changed, 'changed', 'exec')
    lines = zip(source.splitlines(), changed.splitlines(), strict=False)
    first = next(i for i, (a, b) in enumerate(lines, 1) if a != b)
    assert edit.line <= first <= edit.line + 6  # An operand may span lines.


def test_lines_of_a_statement():
  source = 'if a:\n  x = f(\n    b,\n    c,\n  )\n'
  assert list(edits.statement_lines(source, 4)) == [2, 3, 4]
  assert list(edits.statement_lines(source, 1)) == [1]
