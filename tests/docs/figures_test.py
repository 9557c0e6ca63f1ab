"""Figures of pages and docstrings are those of the results: ``figures.py``."""

import ast
import random
import re

import pytest

from benchmarks.pages import figures
from benchmarks.pages.figures import ROOT, Page

# Measured figures of docstrings, which can have no comment: who asserts them.
IN_DOCSTRINGS = {
  '0.91 %': 'tests/contrib/heads_test.py',
  '1.83 %': 'twice that',
  'less than 1 %': 'the same, rounded up',
  '8 %': '(1 - 1 / 100)^256',
  '1 %, 10 % and 100 %': 'settings',
  '10 to 25 %': 'tests/training/stops_test.py, of the page on stops',
}


@pytest.mark.parametrize(
  'path', figures.PAGES, ids=lambda p: str(p.relative_to(ROOT))
)
def test_figures_are_those_of_the_results_and_a_changed_one_is_seen(path):
  page = Page(path.read_text('utf-8'))
  assert not page.problems(), '\n'.join(page.problems())
  few = min(5, len(page.compared))
  text = page.text
  for start, end in random.Random(0).sample(page.compared, few):
    text = text[: end - 1] + str(9 - int(text[end - 1])) + text[end:]
    assert start < end
  assert len(Page(text).wrong) == few
  assert few == 0 or Page(text).renewed() == page.text


def test_docstrings_have_no_measurements_of_their_own():
  unit = re.compile(r'\d' + figures.UNIT)
  allowed = re.compile('|'.join(map(re.escape, IN_DOCSTRINGS)))
  for path in (ROOT / 'prism_optax').rglob('*.py'):
    for node in ast.walk(ast.parse(path.read_text('utf-8'))):
      if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef):
        text = re.sub('``.*?``', '', ast.get_docstring(node) or '')
        text = ' '.join(text.split())
        found = unit.search(allowed.sub('', text))
        assert not found, (
          f'{path}: {text[found.start() - 40 : found.end() + 9]}'
        )


@pytest.mark.parametrize(
  ('text', 'problem'),
  [
    ('of 7 it is 0.25 or .5 <!-- = 1 / 4, 0.5 -->, `0.3` $0.4$', None),
    ('it is 0.25 <!-- = 1 / 3 -->', '0.25 should be 0.33'),
    ('it is 0.25 <!-- = 1 / 4, 2 -->', '2 numbers for 1'),
    ('it is < .001 <!-- = .0004 -->, < .001 <!-- = .002 -->', '.001 should be'),
    ('it is 0.25 or 3 <!-- = 1 / 4, ... -->', None),
    ('it is 0.25', "no source: '0.25'"),
    ('a noise multiplier of 0.25, but 12 % of it', "no source: '12 % of it'"),
    ("in 0.25 of 0.5 <!-- = 'a reason' -->", None),
    ("it is 0.25\n<!-- = 'a reason' -->", 'behind a word'),
    ('<!-- = none() -->\n| a |\n| --- |\n', 'NameError'),
    ('<!-- = [[1, 2], [3]] -->\n| a 9.1 | b |\n| --- | --- |\n| 7 | 1 | 2 |\n'
     '| | 3.4 |\n', '3.4 should be 3.0'),
    ("<!-- = '| a |' -->\n| b |\n", 'should be | a |'),
  ],
)  # fmt: skip
def test_what_is_wrong_is_found(text, problem):
  found = Page(text).problems()
  assert bool(found) == (problem is not None), found
  assert problem is None or problem in found[0]
