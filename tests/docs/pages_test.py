"""Sessions in the documentation print what the pages say that they print."""

import doctest
import pathlib

from tests import cases
from tests.docs import docs_test

DOCS = pathlib.Path(__file__).parents[2] / 'docs'
PAGES = [p for p in sorted(DOCS.rglob('*.md')) if '\n```pycon' in p.read_text()]


# A scan of the optimizer, and six calibrations; other libraries' accounting;
# many small programs; calibrations beside prior releases.
SLOW = {
  DOCS / 'hyper_parameters.md',
  DOCS / 'differences.md',
  DOCS / 'explanation' / 'divisor.md',
  DOCS / 'explanation' / 'dp_muon.md',
  DOCS / 'explanation' / 'no_way_around.md',
  DOCS / 'explanation' / 'tangent_coordinates.md',
  DOCS / 'how_to' / 'input_metric.md',
  DOCS / 'how_to' / 'private_head.md',
  DOCS / 'how_to' / 'records.md',
}


@cases.fast_first(
  'page', set(PAGES) - SLOW, PAGES, ids=lambda p: str(p.relative_to(DOCS))
)
def test_sessions(page):
  # One session: names go on from block to block.
  text = docs_test.pasted(page, 'pycon')
  parsed = doctest.DocTestParser().get_doctest(
    text, {}, page.name, str(page), 0
  )
  assert parsed.examples
  report = []
  failed, _ = doctest.DocTestRunner(verbose=False).run(
    parsed, out=report.append
  )
  assert not failed, ''.join(report)
