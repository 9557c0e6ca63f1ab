"""The edits are wrong programs, each in one place; what is listed is there."""

import ast

import pytest

from tests.mutants import check, edits


@pytest.mark.parametrize(
  ('source', 'expected'),
  [
    ('x = a @ b', ['x = b @ a']),
    ('x = (a +\n  b)', ['x = a - b']),
    ('x = f(a, axis=-1)',
     ['x = f(a)', 'x = f(a, axis=1)', 'x = f(a, axis=-0)']),
    ('x = f(a, b)', ['x = f(b, a)']), ('x = f(a, a)', []),
    ('x = f(g(a))', ['x = g(a)', 'x = f(a)']),
    ('a, b = jax.random.split(k)', ['a, b = (k, k)']),
    ('k = jax.random.fold_in(k, i)', ['k = k', 'k = jax.random.fold_in(i, k)']),
    ('x = max(a, b)', ['x = min(a, b)']),
    ('x = q.mT', ['x = q']),
    ('x = a if b else c', ['x = c if b else a']),
    ('x = 1, 0.5, 0.0', ['x = (0, 0.5, 0.0)', 'x = (1, 1.0, 0.0)',
                         'x = (1, 0.5, 1.0)']),
    ('x = a is None and b < c',
     ['x = a is not None and b < c', 'x = a is None or b < c',
      'x = a is None and b <= c']),
    ('if a:\n  raise E(1)', ['if False:\n    raise E(1)']),
    ('def f(x: a | b = True) -> -1:\n  "Doc 1."\n  return f"{-x}"',
     ['def f(x: a | b=False) -> -1:\n    "Doc 1."\n    return f"{-x}"']),
    ('__all__ = [1]', []),
    ('x = zip(a, strict=True)', []),
  ],
)  # fmt: skip
def test_rules(source, expected):
  found = {ast.unparse(ast.parse(e.apply())) for e in edits.edits_of(source)}
  assert found == {ast.unparse(ast.parse(x)) for x in expected}


def test_each_bug_has_its_place():
  bugs = check.planted_bugs()  # Raises where a fragment is not there once.
  assert len(bugs) > 40
  for bug in bugs:
    assert compile(bug.source(), bug.name, 'exec')


def test_each_private_file_is_there_and_has_tests():
  for name in check.PRIVACY:
    assert list(check.PACKAGE.glob(f'{name}*')), name
  for path in check.PACKAGE.rglob('*.py'):
    assert check.near(path), path
