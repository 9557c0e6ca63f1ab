"""Compares the figures of pages with the results that they come from.

    python -m benchmarks.pages.figures [--write]

A comment behind figures, or above a table, says where they come from::

    0.5 points ahead (p = .004)<!-- = points('core-3', 'dp-adamw') -->

It is Python with the names of ``results.py``. Its numbers, flattened, belong to
as many numerals in front of it. Above a table they are rows, each for the last
numerals of a row of the table, or the whole table as text. A figure is right if
it is the number, rounded to the digits that it shows; behind ``<`` it bounds
it. ``...`` stands for a numeral that claims nothing. A text alone says why the
numerals have no result, or names the test that asserts them. Numerals in code,
formulas, links and headings do not count. Any other that looks measured needs a
comment.

``--write`` renews what differs.
"""

import pathlib
import re
import sys
from collections.abc import Iterable, Iterator

from benchmarks.pages import results

ROOT = pathlib.Path(__file__).parents[2]
PAGES = [
  *(ROOT / x for x in ('README.md', 'SECURITY.md')),
  *sorted(
    p for p in (ROOT / 'docs').rglob('*.md') if 'notebooks' not in p.parts
  ),  # Notebooks are pages only where Sphinx has run; they print what they say.
]
_COMMENT = re.compile(r'<!-- = (.*?) -->', re.S)
_NUMERAL = re.compile(
  r'(?<![\w.,-])[-+]?(?:\d+(?:,\d{3})*(?:\.\d+)?|\.\d+)(?:e-?\d+)?'
  r'(?![\w-]|\.\d)'
)
UNIT = (
  r'(?=\s*(?:%|per cent|[MG]B\b|m?s\b|times as|points?\b|nats|clip norms'
  r'|standard errors))'
)
# A decimal fraction, or so many of what is measured.
_MEASURED = re.compile(
  rf'[-+]?(?:\d[\d,]*)?\.\d+|[-+]?\d[\d,]*{UNIT}'
)  # fmt: skip
_NO_FIGURES = re.compile(
  r'^(```+|:::+)[^\n]*\n.*?^\1\s*$|^#+ [^\n]*$|<!--.*?-->'
  r'|`[^`]+`|\$\$.*?\$\$|\$[^$\n]+\$|\]\([^)]*\)|^\[[^]]+\]: .*$|https?://\S+'
  r'|arXiv:\s*\d{4}\.\d{5}|Python \d\.\d+|jax-privacy [\d.]+',
  re.M | re.S,
)
# What is chosen: epsilon 3, delta 1e-5, rank of 8 or 16, condition 1,000.
_SETTING = re.compile(
  r'(?:epsilon|delta|ranks?|multipliers?|norm|condition|decay|probability|alpha'
  r'|rate|scale|factor)s?(?: of| is| at)?'
  r'(?:(?:,| or| and| to)? \**[\d.,]*\d(?:e-?\d+)?)+'
)


def number(numeral: str) -> float:
  return float(numeral.replace(',', ''))


def rendered(value: float, like: str) -> str:
  """A number with the digits and in the style of a numeral."""
  digits, _, exponent = like.partition('e')
  decimals = len(digits.partition('.')[2])
  if exponent:
    short, _, power = f'{value:.{decimals}e}'.partition('e')
    text = f'{short}e{int(power)}'
  else:
    text = f'{value:,.{decimals}f}'
  if not re.search('[1-9]', text):
    text = text.lstrip('-')
  if re.match(r'[-+]?\.', like):
    text = text.replace('0.', '.', 1)
  return f'+{text}' if like[0] == '+' and text[0] != '-' else text


def is_right(value: float, numeral: str, before: str = '') -> bool:
  if before.endswith('< '):
    return value < number(numeral)
  return number(rendered(value, numeral)) == number(numeral)


def flat(values: object) -> list:
  """The numbers and ``...`` in nested lists, without ``None``."""
  if isinstance(values, Iterable):
    return [x for value in values for x in flat(value)]
  return [] if values is None else [values]


class Page:
  """The figures of a text.

  Attributes:
    text: The page.
    compared: ``(start, end)`` of the numerals that have a number.
    wrong: ``(start, end, new text)`` of those that are not the number.
  """

  def __init__(self, text: str):
    self.text = text
    self._bare = _NO_FIGURES.sub(lambda x: re.sub(r'[^\n]', ' ', x[0]), text)
    self._numerals = [x.span() for x in _NUMERAL.finditer(self._bare)]
    self.compared: list[tuple[int, int]] = []
    self.wrong: list[tuple[int, int, str]] = []
    self._sourced: set[tuple[int, int]] = set()
    self._errors: list[tuple[int, str]] = []
    end = 0
    for comment in _COMMENT.finditer(text):
      try:
        values = eval(comment[1], dict(vars(results)))
        self._compare(comment, values, end)
      except Exception as error:
        self._errors.append((comment.start(), f'{comment[1]}: {error!r}'))
      end = comment.end()

  def _compare(self, comment: re.Match, values: object, end: int) -> None:
    table = re.compile(r'\n((?:\|.*\n?)+)').match(self.text, comment.end())
    start = max(end, self.text.rfind('\n\n', 0, comment.start()))
    inside = table.span(1) if table else (start, comment.start())
    if not table and self.text[comment.start() - 1] == '\n':
      raise ValueError('It would end the paragraph: put it behind a word.')
    if table or isinstance(values, str):
      self._sourced |= set(self._between(*inside))
    if isinstance(values, str):
      if (
        table and values.startswith('|') and values.strip() != table[1].strip()
      ):
        self.wrong.append((*inside, values.strip() + '\n'))
    elif table:
      lines = [x for x in re.finditer('.+', table[1]) if '| ---' not in x[0]]
      lines = lines if len(values) == len(lines) else lines[1:]
      for line, row in zip(lines[: len(values)], values, strict=True):
        self._match(*(inside[0] + x for x in line.span()), flat(row))
    else:
      self._match(*inside, flat(values))

  def _between(self, start: int, end: int) -> list[tuple[int, int]]:
    return [x for x in self._numerals if start <= x[0] and x[1] <= end]

  def _match(self, start: int, end: int, values: list) -> None:
    spans = self._between(start, end)
    if len(values) > len(spans):
      raise ValueError(f'{len(values)} numbers for {len(spans)} numerals')
    for span, value in zip(spans[-len(values) :], values, strict=True):
      self._sourced.add(span)
      numeral = self.text[slice(*span)]
      if value is ...:
        continue
      self.compared.append(span)
      if not is_right(value, numeral, self.text[: span[0]]):
        self.wrong.append((*span, rendered(value, numeral)))

  def _unsourced(self) -> Iterator[int]:
    """Where numerals begin that look measured."""
    settings = [x.span() for x in _SETTING.finditer(self._bare)]
    for span in self._numerals:
      if span in self._sourced or not _MEASURED.match(self._bare, span[0]):
        continue
      line = self.text[self.text.rfind('\n', 0, span[0]) + 1 :].split('\n')[0]
      is_setting = any(a <= span[0] and span[1] <= b for a, b in settings)
      # A row of a table may name its test.
      if not is_setting and '`tests/' not in line:
        yield span[0]

  def problems(self) -> list[str]:
    """What is wrong, each with its line."""
    found = [
      *self._errors,
      *((a, f'{self.text[a:b]} should be {new}') for a, b, new in self.wrong),
      *(
        (a, f'no source: {self.text[a : a + 60]!r}') for a in self._unsourced()
      ),
    ]
    return [f'line {self.text.count(chr(10), 0, a) + 1}: {x}' for a, x in found]

  def renewed(self) -> str:
    text = self.text
    for start, end, new in sorted(self.wrong, reverse=True):
      text = text[:start] + new + text[end:]
    return text


def main() -> None:
  found = []
  for path in PAGES:
    page = Page(path.read_text('utf-8'))
    if '--write' in sys.argv[1:] and page.wrong:
      path.write_text(page.renewed(), 'utf-8')
    found += [f'{path.relative_to(ROOT)} {x}' for x in page.problems()]
  sys.exit('\n'.join(found) or None)


if __name__ == '__main__':
  main()
