"""How libraries name and shape the two factors of a LoRA module.

A table: what the input-side leaf is called, and how the axes of the pair may be
read. Names choose the row; shapes choose among its readings, and only if
exactly one of them fits.
"""

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from prism_optax._modules._layout import Layout

Shape = tuple[int, ...]


def _leading_stacks(a: Shape, b: Shape) -> list[Layout]:
  """a ``(*stack, in, r)``, b ``(*stack, r, out)``."""
  if len(a) != len(b) or a[:-2] != b[:-2] or a[-1] != b[-2]:
    return []
  stack = tuple(range(len(a) - 2))
  return [Layout(-1, -2, stack, stack)]


def _tensors(a: Shape, b: Shape) -> list[Layout]:
  """a ``(*stack, *in, r)``, b ``(*stack, r, *out)``; or a stack in the middle.

  The middle: a (in, layers, r), b (r, layers, out), from scans over axis 1.
  """
  readings = []
  for count in range(min(len(a), len(b)) - 1):
    if a[:count] == b[:count] and a[-1] == b[count]:
      stack = tuple(range(count))
      readings.append(Layout(-1, count, stack, stack))
  if len(a) >= 3 and len(b) >= 3 and a[1] == b[1] and a[-1] == b[0]:
    readings.append(Layout(-1, 0, (1,), (1,)))
  return readings


def _flax(a: Shape, b: Shape) -> list[Layout]:
  """Stacks that lead are what `vmap` and `scan` make: the first reading."""
  return _leading_stacks(a, b) or _tensors(a, b)


def _kernel_like(a: Shape, b: Shape) -> list[Layout]:
  """a ``(*in, r)``, b ``(r, *out)``, never stacked."""
  return [Layout(-1, 0, (), ())] if a[-1] == b[0] else []


def _torch(a: Shape, b: Shape) -> list[Layout]:
  """a (r, in, ...), b (out, r, ...): rows are outputs."""
  return [Layout(0, 1, (), ())] if a[0] == b[1] else []


class Convention(NamedTuple):
  """One way to name the leaves of a pair.

  Attributes:
    library: Who does it.
    a: Pattern of the whole name of the input-side leaf. Group `module` is the
      name of the module; group `side` is the letter that differs in the name
      of its partner.
    readings: From the two shapes (at least two axes each) to the layouts that
      fit them.
  """

  library: str
  a: re.Pattern[str]
  readings: Callable[[Shape, Shape], list[Layout]]


def _pattern(tail: str) -> re.Pattern[str]:
  return re.compile(rf'(?:(?P<module>.*)[/.])?{tail}')


CONVENTIONS = (
  # Also MaxText's, whose whole path is one key with dots.
  Convention('flax', _pattern('lora_(?P<side>a)'), _flax),
  Convention('gemma', _pattern('lora[/.](?P<side>a)'), _tensors),
  Convention(
    'keras', _pattern('lora_(?:kernel|embeddings)_(?P<side>a)'), _kernel_like
  ),
  Convention(
    'PEFT',
    _pattern(r'lora_(?:embedding_)?(?P<side>A)(?:[/.][^/.]+)??(?:[/.]weight)?'),
    _torch,
  ),
  Convention(
    'qwix', re.compile('(?P<module>.+)_lora_(?P<side>a)'), _tensors
  ),
)  # fmt: skip


class Named(NamedTuple):
  """A pair found by its names."""

  module: str
  a: str
  b: str
  convention: Convention


def find(names: Sequence[str]) -> list[Named]:
  """The pairs among ``names``, in their order."""
  found = []
  present = set(names)
  for name in names:
    for convention in CONVENTIONS:
      match = convention.a.fullmatch(name)
      if not match:
        continue
      start, end = match.span('side')
      other = {'a': 'b', 'A': 'B'}[match['side']]
      partner = name[:start] + other + name[end:]
      if partner in present:
        found.append(Named(match['module'] or name, name, partner, convention))
      break
  return found
