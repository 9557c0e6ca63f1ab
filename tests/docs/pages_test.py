"""Sessions in the documentation print what the pages say that they print."""

import doctest
import pathlib
import re

from tests import cases

DOCS = pathlib.Path(__file__).parents[2] / 'docs'
_SESSION = re.compile(r'^```pycon\n(.*?)^```$', re.M | re.S)
PAGES = [
  p for p in sorted(DOCS.rglob('*.md')) if _SESSION.search(p.read_text())
]


def session_of(text):
  """All sessions of a page, as one: names go on from block to block."""
  lines = ['\n'] * text.count('\n')
  for found in _SESSION.finditer(text):
    first = text.count('\n', 0, found.start(1))
    for i, line in enumerate(found.group(1).splitlines(keepends=True)):
      lines[first + i] = line
  return ''.join(lines)


# A scan of the optimizer, and six calibrations; other libraries' accounting;
# many small programs; calibrations beside prior releases.
SLOW = {
  DOCS / 'hyper_parameters.md',
  DOCS / 'differences.md',
  DOCS / 'explanation' / 'tangent_coordinates.md',
  DOCS / 'how_to' / 'input_metric.md',
  DOCS / 'how_to' / 'private_head.md',
}


@cases.fast_first(
  'page', set(PAGES) - SLOW, PAGES, ids=lambda p: str(p.relative_to(DOCS))
)
def test_sessions(page):
  text = session_of(page.read_text('utf-8'))
  parsed = doctest.DocTestParser().get_doctest(
    text, {}, page.name, str(page), 0
  )
  assert parsed.examples
  report = []
  failed, _ = doctest.DocTestRunner(verbose=False).run(
    parsed, out=report.append
  )
  assert not failed, ''.join(report)
