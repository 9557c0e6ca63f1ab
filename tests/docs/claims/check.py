"""Compares pages with results: tables, sentences, and what has no source.

Whole tables stand between ``<!-- results: NAME -->`` and ``<!-- end -->``, and
one function makes each (``register.of``). A figure in a sentence has an entry
in ``sentences()`` of one of the modules: the sentence with a field for every
figure, and what computes the figures from the stored results. Any other numeral
has to be in ``settings``, with the test that asserts it or the reason why it is
no claim.
"""

import functools
import pathlib
import re
import string
from collections.abc import Iterator

from tests.docs import links_test
from tests.docs.claims import (
  accuracy,
  clipping,
  geometry,
  hyper,
  mechanisms,
  privacy,
  scale,
  settings,
  times,
  which_method,
)
from tests.docs.claims.register import TABLES, Claim

ROOT = pathlib.Path(__file__).parents[3]
PAGES = [ROOT / 'README.md', *sorted((ROOT / 'docs').rglob('*.md'))]
# In these each figure has a source; in others only what is registered is
# compared. A page can be added once all its figures are.
_MEASURED = re.compile(  # What looks like a measurement.
  r'(?<![\w.,/-])[-+]?(?:\d*\.\d+|\d[\d,]*(?=\s*'
  r'(?:%|per cent|[MG]B|m?s\b|times|points?|nats|standard errors)))'
)
_ANY = re.compile(
  r'(?<![\w.,-])[-+]?(?:\d+(?:,\d{3})*(?:\.\d+)?|\.\d+)(?:e-?\d+)?'
)
COVERED = {
  ROOT / 'README.md': _MEASURED,
  ROOT / 'docs' / 'which_method.md': _MEASURED,
  **{
    ROOT / 'docs' / 'benchmarks' / f'{name}.md': _ANY
    for name in (
      'index',
      'accuracy',
      'geometry',
      'privacy',
      'speed',
      'language_models',
    )
  },
  ROOT / 'docs' / 'differences.md': _MEASURED,
  ROOT / 'docs' / 'hyper_parameters.md': _MEASURED,
}
# A table that is not written yet ends where it begins.
_MARKED = re.compile(
  r'<!-- results: (\S+) -->\n((?:(?!<!--).)*?)\n*<!-- end -->', re.S
)
_NO_CLAIM = re.compile(
  r'^(```+)[^\n]*\n.*?^\1\s*$'  # Code, checked by running it.
  r'|^#+ [^\n]*$'
  r'|`[^`\n]+`|\$[^$]+\$'
  r'|\]\([^)]*\)|^\[[^]]+\]: .*$|https?://\S+'
  r'|arXiv:\s*\d{4}\.\d{5}|Python \d\.\d+',
  re.M | re.S,
)
# A setting, which is chosen and not measured.
_N = r'(?:\d+(?:,\d{3})*(?:\.\d+)?(?:e-?\d+)?)'
_SETTING = re.compile(
  r'\b(?:ranks?|epsilon|delta|batch|width|length|degrees?|condition|scale|decay'
  r'|multipliers?|norm|microbatch(?:es)?|micro-batch(?:es)?|blocks|version)'
  rf'(?:\s+of)?\s+{_N}(?:(?:,|\s+and|\s+or|\s+to)\s+{_N})*'
  rf'|(?:{_N}\s+or\s+)?{_N}\s+(?:(?:other|private|expected|noisy|adaptive)\s+)*'
  r'(?:steps|rounds|seeds|draws|entries|runs|records|rows|tokens|trials|layers'
  r'|modules|examples|wide|sequences)\b'
  rf'|{_N}\s+x\s+{_N}',
  re.I,
)
_NUMBER = r'([-+]?(?:\d+(?:,\d{3})*(?:\.\d+)?|\.\d+)(?:e[-+]?\d+)?)'


@functools.cache
def sentences() -> list[Claim]:
  """All sentences with their figures."""
  modules = (
    accuracy, clipping, geometry, hyper, mechanisms, privacy, scale,
    times, which_method,
  )  # fmt: skip
  return [claim for module in modules for claim in module.sentences()]


def renewed(text: str) -> str:
  """The page with all its tables as the results have them."""

  def table(found):
    body = '\n'.join(TABLES[found[1]]())
    return f'<!-- results: {found[1]} -->\n{body}\n\n<!-- end -->'

  return _MARKED.sub(table, text)


def _pattern(words: str) -> str:
  """Words of a sentence, however its lines are broken."""
  return r'\s+'.join(map(re.escape, re.split(r'\s+', words)))


@functools.cache
def pattern_of(template: str) -> re.Pattern[str]:
  """What finds a sentence, whatever figures it has."""
  pieces = []
  for words, field, _, _ in string.Formatter().parse(template):
    pieces += [_pattern(words), '' if field is None else _NUMBER]
  return re.compile(''.join(pieces))


def wrong_sentences(text: str) -> Iterator[str]:
  """Sentences of a page whose figures are not those of the results."""
  for template, figures in sentences():
    want = re.sub(r'\s+', ' ', template.format(*figures))
    for found in pattern_of(template).finditer(text):
      if (got := re.sub(r'\s+', ' ', found[0])) != want:
        yield f'is:        {got}\n  should be: {want}'


def covered(text: str) -> list[tuple[int, int]]:
  """Spans of a page whose figures have a source, or make no claim."""
  patterns = [pattern_of(t) for t, _ in sentences()]
  patterns += [
    re.compile(_pattern(words))
    for words in (*settings.TESTED, *settings.SETTINGS)
  ]
  return [
    found.span()
    for pattern in (_MARKED, _NO_CLAIM, _SETTING, *patterns)
    for found in pattern.finditer(text)
  ]


def without_source(text: str, numeral: re.Pattern[str]) -> list[str]:
  """Lines of a page with the numerals that have no source."""
  spans = covered(text)
  out = []
  for found in numeral.finditer(text):
    if not any(a <= found.start() and found.end() <= b for a, b in spans):
      line = text.count('\n', 0, found.start())
      out.append(f'{found[0]!r} in line {line + 1}: {text.splitlines()[line]}')
  return out


def stale() -> list[str]:
  """Entries of the register that are on no page, or name no test."""
  texts = [path.read_text('utf-8') for path in PAGES]
  entries = {t: pattern_of(t) for t, _ in sentences()}
  for words in (*settings.TESTED, *settings.SETTINGS):
    entries[words] = re.compile(_pattern(words))
  out = [
    f'on no page: {words}'
    for words, pattern in entries.items()
    if not any(map(pattern.search, texts))
  ]
  shown = {x[1] for text in texts for x in _MARKED.finditer(text)}
  out += [f'table on no page: {name}' for name in TABLES.keys() - shown]
  for name in settings.TESTED.values():
    path, _, test = name.partition('::')
    if test not in links_test.functions_of(ROOT / path):
      out.append(f'no test: {name}')
  return out


def problems(path: pathlib.Path) -> list[str]:
  """What is wrong with the figures of a page."""
  text = path.read_text('utf-8')
  out = list(wrong_sentences(text))
  if renewed(text) != text:
    out.append('tables differ: python -m tests.docs.claims --write')
  if path in COVERED:
    out += without_source(text, COVERED[path])
  return out
