"""Figures of the documentation are those of the results: see ``claims``."""

import re

import pytest

from tests.docs.claims import check as claims
from tests.docs.claims import data


@pytest.mark.parametrize(
  'page', claims.PAGES, ids=lambda p: str(p.relative_to(claims.ROOT))
)
def test_figures_have_a_source_and_agree_with_it(page):
  assert not claims.problems(page), '\n'.join(claims.problems(page))


def test_the_register_has_nothing_that_no_page_has():
  assert not claims.stale()


def test_a_changed_figure_of_a_sentence_is_seen():
  for template, figures in claims.sentences():
    text = template.format(*figures)
    assert not list(claims.wrong_sentences(text))
    found = claims.pattern_of(template).fullmatch(text)
    for i in range(1, len(figures) + 1):
      a, b = found.span(i)
      changed = re.sub(r'\d(?!.*\d)', lambda x: str(9 - int(x[0])), text[a:b])
      wrong = list(claims.wrong_sentences(f'{text[:a]}{changed}{text[b:]}'))
      assert len(wrong) == 1, template


def test_a_changed_table_and_a_figure_without_source_are_seen():
  path = claims.ROOT / 'docs' / 'benchmarks' / 'accuracy.md'
  text = path.read_text('utf-8')
  assert claims.renewed(text.replace('.8363', '.8364')) == text
  name = '<!-- results: heads -->\n'
  empty = f'{name}\n<!-- end -->\nIn between.\n'
  once = claims.renewed(empty + text)
  assert once.endswith(f'\n\n<!-- end -->\nIn between.\n{text}')
  assert claims.renewed(once) == once
  more = text + '\nIt is 7 times as fast, by `2.5`.\n'
  (found,) = claims.without_source(more, claims.COVERED[path])
  assert found.startswith("'7' in line")


def test_the_report_on_accuracy_has_the_means_of_its_runs():
  """The runs by method, epsilon and rate, all else as it was."""
  compared = 0
  for epsilon in (1, 3, 6):
    for method, row in data.utility(f'SST-2, epsilon {epsilon}').items():
      runs = data.accuracies(method, epsilon=float(epsilon), rate=row.rate)
      values = [x for seed, x in runs.items() if seed < 100]
      assert len(values) == row.seeds
      assert data.mean(values) == pytest.approx(row.accuracy, abs=6e-5)
      compared += 1
  assert compared == 21
