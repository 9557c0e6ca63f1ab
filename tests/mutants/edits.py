"""Small wrong edits of a Python file, by operators over its syntax tree.

Docstrings, annotations, strings, imports and what is raised stay as they are.
"""

import ast
import collections
import dataclasses
from collections.abc import Callable, Iterator

_PAIRS = [
  (ast.Add, ast.Sub), (ast.Mult, ast.Div), (ast.LShift, ast.RShift),
  (ast.BitAnd, ast.BitOr), (ast.Lt, ast.LtE), (ast.Gt, ast.GtE),
  (ast.Eq, ast.NotEq), (ast.Is, ast.IsNot), (ast.In, ast.NotIn),
  (ast.And, ast.Or),
]  # fmt: skip
_OPERATORS = {a: b for pair in _PAIRS for a, b in (pair, pair[::-1])}
_OPERATORS |= {ast.FloorDiv: ast.Div, ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult}
_OPERATORS |= {ast.BitXor: ast.BitOr}
_NAMES = 'left right, maximum minimum, max min, any all, floor ceil'
_NAMES = [x.split() for x in f'{_NAMES}, zeros_like ones_like'.split(', ')]
_NAMES = {a: b for pair in _NAMES for a, b in (pair, pair[::-1])}
# Whose arguments may be exchanged, or where the wrong order cannot run.
_ORDERLESS = {'isinstance', 'getattr', 'map', 'zip', 'asarray', *_NAMES}
# Without them there is another type, or nothing that runs.
_CONVERSIONS = {'len', 'range', 'iter', 'tuple', 'list', 'sorted', 'set', 'str',
                'dict', 'asarray', 'type', 'repr', 'frozenset', 'enumerate',
                'astype', 'reshape', 'append', 'TypeVar'}  # fmt: skip
_KEYS = 'jax.random.split', '_keys.split'


@dataclasses.dataclass(frozen=True)
class Edit:
  """One wrong node.

  Attributes:
    name: 'function kind number': the n-th of its kind in the function.
    shown: What stands there, and what instead.
    apply: Gives the source of the whole file with it.
    lines: Of the body of the function, or of the file.
  """

  name: str
  shown: str
  apply: Callable[[], str]
  lines: range


def _wrong(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
  """(kind, what may stand in place of a node)."""
  match node:
    case ast.BinOp(left, ast.MatMult(), right):
      yield 'operands', ast.BinOp(right, ast.MatMult(), left)
    case ast.BinOp(left, op, right) if type(op) in _OPERATORS:
      yield 'operator', ast.BinOp(left, _OPERATORS[type(op)](), right)
    case ast.Compare(left, [op], right):
      yield 'comparison', ast.Compare(left, [_OPERATORS[type(op)]()], right)
    case ast.BoolOp(op, values):
      yield 'and-or', ast.BoolOp(_OPERATORS[type(op)](), values)
    case ast.UnaryOp(ast.USub() | ast.Not(), operand):
      yield 'sign', operand
    case ast.Constant(bool() as value):
      yield 'constant', ast.Constant(not value)
    case ast.Constant(int() as value):
      yield 'constant', ast.Constant({0: 1, 1: 0}.get(value, value + 1))
    case ast.Constant(float() as value):
      yield 'constant', ast.Constant(value * 2 or 1.0)
    case ast.IfExp(test, body, orelse):
      yield 'branches', ast.IfExp(test, orelse, body)
    case ast.If(_, body, orelse):
      yield 'if', ast.If(ast.Constant(False), body, orelse)
    case ast.Expr(ast.Call()):
      yield 'statement', ast.Pass()
    case ast.Attribute(value, 'T' | 'mT'):
      yield 'transpose', value
    case ast.Attribute(value, name, context) if name in _NAMES:
      yield 'name', ast.Attribute(value, _NAMES[name], context)
    case ast.Name(name, ast.Load()) if name in _NAMES:
      yield 'name', ast.Name(_NAMES[name], ast.Load())
    case ast.Call():
      yield from _wrong_calls(node)


def _wrong_calls(node: ast.Call) -> Iterator[tuple[str, ast.AST]]:
  args, keywords = node.args, node.keywords
  name = getattr(node.func, 'attr', getattr(node.func, 'id', ''))
  match args:
    case [ast.Name() | ast.Attribute() as a, b, *more] if (
      name not in _ORDERLESS
      and not isinstance(b, ast.Starred | ast.Constant)
      and ast.dump(a) != ast.dump(b)
    ):
      yield 'arguments', ast.Call(node.func, [b, a, *more], keywords)
  match args:
    case [key] if ast.unparse(node.func) in _KEYS:
      yield 'key', ast.Tuple([key, key], ast.Load())
    case [key, _] if name == 'fold_in':
      yield 'key', key
    case [x] if not keywords and name not in _CONVERSIONS:
      if not isinstance(x, ast.Starred):
        yield 'call', x
  for i, keyword in enumerate(keywords):
    if keyword.arg != 'strict':  # Of zip: a check of ours alone.
      kept = [*keywords[:i], *keywords[i + 1 :]]
      yield 'keyword', ast.Call(node.func, args, kept)


def _children(node: ast.AST) -> Iterator[tuple[str, int | None, ast.AST]]:
  """(field, place in it, node) of what computes something."""
  fields: tuple[str, ...] = node._fields
  match node:
    case ast.Raise() | ast.JoinedStr() | ast.Import() | ast.ImportFrom():
      return
    case ast.FunctionDef():
      fields = 'args', 'body'
    case ast.arguments():
      fields = 'defaults', 'kw_defaults'
    case ast.ClassDef():
      fields = ('body',)
    case ast.AnnAssign():
      fields = ('value',)
    case ast.Assign(targets=[ast.Name(name)]) if name.startswith('__'):
      return
  for field in fields:
    value = getattr(node, field)
    for i, x in enumerate(value if isinstance(value, list) else [value]):
      if isinstance(x, ast.AST):
        yield field, i if isinstance(value, list) else None, x


def edits_of(source: str) -> Iterator[Edit]:
  """All edits of a source."""
  tree = ast.parse(source)
  counts: collections.Counter[str] = collections.Counter()

  def put(node, field, place, new):
    if place is None:
      setattr(node, field, new)
    else:
      getattr(node, field)[place] = new

  def edit(slot, old, kind, new, where, lines):
    def apply():
      put(*slot, new)
      try:
        return ast.unparse(ast.fix_missing_locations(tree))
      finally:
        put(*slot, old)

    key = f'{where or "module"} {kind}'
    counts[key] += 1
    texts = (ast.unparse(x).partition('\n')[0] for x in (old, new))
    return Edit(f'{key} {counts[key]}', ' -> '.join(texts), apply, lines)

  def visit(node, where, lines):
    for field, place, child in _children(node):
      for kind, new in _wrong(child):
        wrong = edit((node, field, place), child, kind, new, where, lines)
        if getattr(node, 'arg', '') != 'strict':  # Of zip, as above.
          yield wrong
      inner, body = where, lines
      if isinstance(child, ast.FunctionDef | ast.ClassDef):
        inner = f'{where}.{child.name}'.lstrip('.')
      if isinstance(child, ast.FunctionDef):
        body = range(child.body[0].lineno, child.end_lineno + 1)
      yield from visit(child, inner, body)

  yield from visit(tree, '', range(1, source.count('\n') + 2))
