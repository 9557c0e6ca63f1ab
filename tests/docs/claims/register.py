"""Where tables are registered, and what a claim is."""

from collections.abc import Callable, Iterable
from typing import Any

# A sentence with a field for each figure, as in ``str.format``; the figures.
Claim = tuple[str, tuple[Any, ...]]
TABLES: dict[str, Callable[[], list[str]]] = {}


def of(name: str):
  """Of the table that stands at ``<!-- results: NAME -->``."""
  return lambda function: TABLES.setdefault(name, function)


def lines(head: Iterable[str], rows: Iterable[Iterable[object]]) -> list[str]:
  head = list(head)
  body = [head, ['---'] * len(head), *rows]
  text = ['| ' + ' | '.join(map(str, row)) + ' |' for row in body]
  return [line.replace('|  |', '| |').replace('|  |', '| |') for line in text]
