"""What a compiled program does at each call, read from its HLO text."""

import dataclasses
import functools
import re

# No kernel runs for these, and the second half of a pair is its first one's.
_FREE = frozenset(
  (
    'parameter', 'constant', 'tuple', 'get-tuple-element', 'bitcast',
    'after-all', 'opt-barrier', 'partition-id', 'replica-id', 'conditional',
    'while', 'call', 'async-done', 'async-update', 'copy-done',
  )
)  # fmt: skip
_COLLECTIVES = (
  'all-reduce', 'all-gather', 'reduce-scatter', 'all-to-all',
  'collective-permute',
)  # fmt: skip
_HEADER = re.compile(r'^(ENTRY )?%?([\w.$-]+) \(.*\) -> .* \{$')
_NAME = re.compile(r'^\s+(?:ROOT )?%?[\w.$-]+ = ')
# The operation is the first word before a bracket, behind the type, which has
# brackets of its own: tiles such as T(8,128), and tuples.
_OPERATION = re.compile(r'(?:^|\s)([a-z][a-z0-9-]*)\(')
_CALLED = {
  'conditional': re.compile(
    r'(?:branch_computations=\{([^}]*)\}'
    r'|true_computation=(%?[\w.$-]+), false_computation=(%?[\w.$-]+))'
  ),
  'while': re.compile(r'condition=(%?[\w.$-]+), body=(%?[\w.$-]+)'),
  'call': re.compile(r'(?:to_apply|called_computations)=\{?(%?[\w.$-]+)'),
}
# All that a line may call, loops and branches included.
_ANY_CALL = re.compile(
  r'(?:calls|to_apply|body|called_computations|branch_computations'
  r'|true_computation|false_computation)=(\{[^}]*\}|%?[\w.$-]+)'
)
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_SOLVER = re.compile('svd|gesv|syev|eigh|jacobi|qr|getrf', re.IGNORECASE)
_SHAPE = re.compile(r'\b(pred|[suf]\d+|bf16|f8\w*)\[([\d,]*)\]')


@dataclasses.dataclass(frozen=True)
class Cost:
  """Counts of one call.

  Attributes:
    loops: Loops with a number of rounds that the compiler may not know.
    solvers: Calls of a library for SVD, eigenvalues or QR.
    launches: Kernels; those of a loop are counted once.
    conditionals: Branches that are decided while the program runs.
  """

  loops: int = 0
  solvers: int = 0
  launches: int = 0
  conditionals: int = 0

  def __add__(self, other: 'Cost') -> 'Cost':
    pairs = zip(
      dataclasses.astuple(self), dataclasses.astuple(other), strict=True
    )
    return Cost(*(x + y for x, y in pairs))


def _computations(text: str) -> tuple[str, dict[str, list[str]]]:
  """The name of the entry, and the instructions of each computation."""
  entry, lines, found = '', [], {}
  for line in text.splitlines():
    if header := _HEADER.match(line):
      lines = found.setdefault(header[2], [])
      entry = header[2] if header[1] else entry
    elif _NAME.match(line):
      lines.append(_NAME.sub('', line, count=1))
  return entry, found


def _bytes_of(shape: str) -> int:
  total = 0
  for kind, sizes in _SHAPE.findall(shape):
    count = 1
    for size in filter(None, sizes.split(',')):
      count *= int(size)
    bits = re.sub(r'\D', '', kind[:4]) or '8'
    total += count * int(bits) // 8
  return total


def cost(text: str) -> Cost:
  """The cost of one call, where each branch taken is the cheaper one.

  Args:
    text: ``compiled.as_text()``.

  Returns:
    Its counts. Of the branches of a conditional the one with fewest loops, then
    solver calls, then launches counts: what is behind the other one is for
    inputs that hardly occur.
  """
  entry, computations = _computations(text)

  @functools.cache
  def of(name: str) -> Cost:
    total = Cost()
    for line in computations[name]:
      total += one(line)
    return total

  def called(operation: str, line: str) -> list[Cost]:
    match = _CALLED[operation].search(line)
    if match is None:
      raise ValueError(f'No computation is named in {line[:200]!r}.')
    names = ', '.join(filter(None, match.groups())).split(', ')
    return [of(name.removeprefix('%')) for name in names]

  def one(line: str) -> Cost:
    match = _OPERATION.search(line)
    if match is None:
      return Cost()
    operation = match[1]
    if operation == 'conditional':
      branches = called(operation, line)
      return Cost(conditionals=1) + min(branches, key=dataclasses.astuple)
    if operation == 'while':
      return sum(called(operation, line), Cost(loops=1))
    if operation == 'call':
      return sum(called(operation, line), Cost())
    if operation in _FREE or operation.endswith('-done'):
      return Cost()
    target = _TARGET.search(line)
    solvers = int(bool(target and _SOLVER.search(target[1])))
    return Cost(solvers=solvers, launches=1)

  return of(entry)


@dataclasses.dataclass(frozen=True)
class Collective:
  """Communication between devices.

  Attributes:
    bytes: What comes out on one device, in one round.
    loops: Number of loops around it.
  """

  bytes: int
  loops: int


def collectives(text: str) -> list[Collective]:
  """All communication of one call, with every branch that may be taken.

  Args:
    text: ``compiled.as_text()``.

  Returns:
    One entry for each place in the program.
  """
  entry, computations = _computations(text)
  found: list[Collective] = []

  def walk(name: str, loops: int) -> None:
    for line in computations.get(name, ()):
      match = _OPERATION.search(line)
      operation = match[1].removesuffix('-start') if match else ''
      if match and operation in _COLLECTIVES:
        moved = _bytes_of(line[: match.start()])
        found.append(Collective(moved, loops))
        continue  # What it calls adds two numbers.
      for called in _ANY_CALL.findall(line):
        for each in called.strip('{}').split(','):
          inside = each.strip().removeprefix('%')
          walk(inside, loops + (operation == 'while'))

  walk(entry, 0)
  return found
