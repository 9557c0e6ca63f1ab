"""Small wrong edits of a Python file: what a tired programmer might type.

Each is a replacement of a stretch of the source, so that all other lines, their
comments and their numbers stay. Docstrings, annotations, messages of errors and
strings are left alone: tests of words find those.
"""

import ast
import dataclasses
from collections.abc import Iterator

_OPERATORS = {
  ast.Add: '-',
  ast.Sub: '+',
  ast.Mult: '/',
  ast.Div: '*',
  ast.FloorDiv: '/',
  ast.Mod: '//',
  ast.Pow: '*',
  ast.LShift: '>>',
  ast.RShift: '<<',
  ast.BitAnd: '|',
  ast.BitOr: '&',
  ast.BitXor: '|',
}
_COMPARISONS = {
  ast.Lt: '<=',
  ast.LtE: '<',
  ast.Gt: '>=',
  ast.GtE: '>',
  ast.Eq: '!=',
  ast.NotEq: '==',
  ast.Is: 'is not',
  ast.IsNot: 'is',
  ast.In: 'not in',
  ast.NotIn: 'in',
}
_NAMES = {
  'left': 'right',
  'right': 'left',
  'maximum': 'minimum',
  'minimum': 'maximum',
  'max': 'min',
  'min': 'max',
  'any': 'all',
  'all': 'any',
  'zeros_like': 'ones_like',
  'ones_like': 'zeros_like',
  'floor': 'ceil',
  'ceil': 'floor',
}
_TRANSPOSES = ('T', 'mT')
# The order does not matter, or the wrong one cannot run.
_ORDERLESS = (
  'isinstance', 'getattr', 'map', 'zip', 'max', 'min', 'maximum', 'minimum'
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Edit:
  """One replacement in a source.

  Attributes:
    start: Index of the first character, in the source as UTF-8.
    end: Index behind the last one.
    new: What stands there instead.
    line: Number of the line, from 1.
    kind: Name of the rule.
  """

  start: int
  end: int
  new: str
  line: int
  kind: str

  def apply(self, source: str) -> str:
    data = source.encode()
    return (data[: self.start] + self.new.encode() + data[self.end :]).decode()


class _Finder:
  """Collects the edits of one source."""

  def __init__(self, source: str):
    self.data = source.encode()
    self.starts = [0]
    for line in self.data.splitlines(keepends=True):
      self.starts.append(self.starts[-1] + len(line))

  def span(self, node: ast.expr) -> tuple[int, int]:
    return (
      self.starts[node.lineno - 1] + node.col_offset,
      self.starts[node.end_lineno - 1] + node.end_col_offset,
    )

  def text(self, node: ast.expr) -> str:
    start, end = self.span(node)
    return self.data[start:end].decode()

  def whole(self, node: ast.expr, new: str, kind: str) -> Edit:
    return Edit(*self.span(node), new, node.lineno, kind)

  def between(
    self, left: ast.expr, right: ast.expr, new: str, kind: str
  ) -> Iterator[Edit]:
    """Replaces the operator between two operands.

    Brackets of the operands and comments may stand there too.
    """
    start, end = self.span(left)[1], self.span(right)[0]
    gap = self.data[start:end].decode()
    token = gap.strip(' ()\n')
    if '#' not in gap and gap.count(token) == 1:
      start += len(gap[: gap.index(token)].encode())
      yield Edit(start, start + len(token), new, left.end_lineno, kind)

  def swapped(self, a: ast.expr, b: ast.expr, kind: str) -> Iterator[Edit]:
    (start, middle), (after, end) = self.span(a), self.span(b)
    if self.text(a) != self.text(b):
      gap = self.data[middle:after].decode()
      yield Edit(start, end, self.text(b) + gap + self.text(a), a.lineno, kind)

  def edits(self, node: ast.AST) -> Iterator[Edit]:
    match node:
      case ast.BinOp(left, ast.MatMult(), right):
        yield from self.swapped(left, right, 'swapped operands')
      case ast.BinOp(left, op, right) if type(op) in _OPERATORS:
        yield from self.between(left, right, _OPERATORS[type(op)], 'operator')
      case ast.Compare(left, [op], [right]):
        new = _COMPARISONS[type(op)]
        yield from self.between(left, right, new, 'comparison')
      case ast.BoolOp(op, [first, second, *_]):
        new = 'or' if isinstance(op, ast.And) else 'and'
        yield from self.between(first, second, new, 'and, or')
      case ast.UnaryOp(ast.USub() | ast.Not(), operand):
        yield self.whole(node, f'({self.text(operand)})', 'sign')
      case ast.Constant(bool() as value):
        yield self.whole(node, str(not value), 'constant')
      case ast.Constant(int() as value):
        yield self.whole(node, str(value + 1), 'constant')
      case ast.Constant(float() as value):
        yield self.whole(node, repr(value * 2 or 1.0), 'constant')
      case ast.IfExp(test, body, orelse):
        yield self.whole(
          node,
          f'({self.text(orelse)} if {self.text(test)} else {self.text(body)})',
          'branches',
        )
      case ast.If(test, [ast.Raise()], []):
        yield self.whole(test, 'False', 'check left out')
      case ast.Attribute(value, attr) if attr in _TRANSPOSES:
        yield self.whole(node, self.text(value), 'transpose')
      case ast.Attribute(value, attr) if attr in _NAMES:
        yield self.whole(node, f'{self.text(value)}.{_NAMES[attr]}', 'name')
      case ast.Name(name, ast.Load()) if name in _NAMES:
        yield self.whole(node, _NAMES[name], 'name')
      case ast.Call(func, [a, b, *_]):
        name = getattr(func, 'attr', getattr(func, 'id', ''))
        fixed = ast.Starred | ast.Constant | ast.Lambda
        if name not in _ORDERLESS and not isinstance(a, fixed):
          yield from self.swapped(a, b, 'swapped arguments')


def _children(node: ast.AST) -> Iterator[ast.AST]:
  """The parts of a node that compute something."""
  match node:
    case ast.Raise() | ast.JoinedStr() | ast.Import() | ast.ImportFrom():
      return
    case ast.FunctionDef():
      defaults = [x for x in node.args.kw_defaults if x is not None]
      yield from [*node.args.defaults, *defaults, *node.body]
    case ast.ClassDef():
      yield from node.body
    case ast.AnnAssign():
      yield from [node.value] if node.value else []
    case ast.Assign(targets=[ast.Name(name)]) if name.startswith('__'):
      return
    case _:
      yield from ast.iter_child_nodes(node)


def statement_lines(source: str, line: int) -> range:
  """The lines of the innermost statement, up to the given one of them."""
  first = max(
    node.lineno
    for node in ast.walk(ast.parse(source))
    if isinstance(node, ast.stmt) and node.lineno <= line <= node.end_lineno
  )
  return range(first, line + 1)


def edits_of(source: str) -> list[Edit]:
  """All edits of a source, in its order. Each is a valid program."""
  finder = _Finder(source)
  found, waiting = [], [ast.parse(source)]
  while waiting:
    node = waiting.pop()
    found += finder.edits(node)
    waiting += _children(node)
  valid = []
  for edit in sorted(set(found), key=lambda e: (e.start, e.end, e.new)):
    try:
      ast.parse(edit.apply(source))
    except SyntaxError:
      continue
    valid.append(edit)
  return valid
