"""Reading: strict for the public file, total for the private one."""

import argparse

import numpy as np
import pytest

from prism_optax.finetune import data, digits
from tests.finetune import conftest


def _public(tmp_path, rows):
  path = conftest.write_lines(tmp_path / 'eval.jsonl', rows)
  return data.read_public(conftest.columns(path))


def test_public_rows_are_read_in_order(tmp_path):
  rows = [{'text': 'b\u2028c', 'label': 1}, {'text': '', 'label': 'x', 'z': 0}]
  assert _public(tmp_path, rows) == (['b\u2028c', ''], ['1', 'x'])


@pytest.mark.parametrize(
  ('row', 'message'),
  [
    ('{"text": ', r'row 2: no JSON'),
    ('[1]', r'row 2: expected a JSON object'),
    ({'text': 'a'}, r"row 2: no column 'label', only \['text'\]"),
    ({'sentence': 'a', 'label': 1}, r"row 2: no column 'text'"),
    ({'text': 3, 'label': 1}, r"row 2: 'text' must be a string, got 3"),
    ({'text': 'a', 'label': None}, r"row 2: 'label' must be .* got None"),
    ({'text': 'a', 'label': 1.5}, r"row 2: 'label' must be .* got 1.5"),
  ],
)
def test_a_bad_public_row_is_named(tmp_path, row, message):
  with pytest.raises(ValueError, match=message):
    _public(tmp_path, [{'text': 'a', 'label': 1}, row])


def test_absent_and_empty_files_are_named(tmp_path):
  with pytest.raises(ValueError, match='--eval: there is no file'):
    data.read_public(conftest.columns(tmp_path / 'no.jsonl'))
  with pytest.raises(ValueError, match='--data: there is no file'):
    data.read_private(conftest.columns(tmp_path / 'no.jsonl'))
  with pytest.raises(ValueError, match='has no rows'):
    _public(tmp_path, [])


# Whatever one private record is, reading does not raise, and the record keeps
# its place: otherwise its presence could be seen outside of the mechanism.
BAD_RECORDS = [
  '{"text": ', '[1]', 'null', '[' * 100_000, '9' * 10_000, {'text': 'a'},
  {'label': 1}, {'text': None, 'label': 1}, {'text': 'a', 'label': None},
  {'text': 'a', 'label': ['x']}, {'text': 'a', 'label': True},
  {'text': 'a', 'label': float('nan')},
]  # fmt: skip


def test_a_bad_private_record_is_blank_and_keeps_its_place(tmp_path):
  good = {'text': 'a', 'label': 'x'}
  rows = [x for bad in BAD_RECORDS for x in (good, bad)]
  path = conftest.write_lines(tmp_path / 't.jsonl', rows)
  with path.open('ab') as file:
    file.write(b'\xff\xfe\n')  # Bytes that are no text.
  file = data.read_private(conftest.columns(path))
  assert file.labels == ['x', None] * len(BAD_RECORDS) + [None]
  # Nor is a label that only the private file has a class.
  encoded = data.encode_labels([*file.labels, 'secret'], ('w', 'x'))
  assert list(encoded) == [1, data.BLANK] * len(BAD_RECORDS) + [data.BLANK] * 2
  assert len(file.texts) == len(file.labels)


def test_a_file_without_the_columns_is_refused(tmp_path):
  path = conftest.write_lines(
    tmp_path / 't.jsonl', [{'sentence': 'a', 'y': 1}] * 3
  )
  with pytest.raises(ValueError, match=r"no row .* 'text'.*'label'"):
    data.read_private(conftest.columns(path))
  found = data.read_private(conftest.columns(path, 'sentence', 'y'))
  assert found.labels == ['1'] * 3


def test_the_private_rows_are_no_evaluation_in_any_order():
  private = [('a', 'x'), ('a', 'x'), ('', None), ('b', 'y')]
  used = argparse.Namespace(data='D', eval='E')
  with pytest.raises(ValueError, match='--eval E has the rows of --data'):
    data.require_other_rows(private, private[::-1], used)
  for public in (
    private[1:],
    [*private, ('c', 'x')],
    [*private[:3], ('b', 'x')],
  ):
    data.require_other_rows(private, public, used)


def test_a_sorted_file_is_measured_on_rows_of_all_of_it():
  rows = data.Examples(np.arange(1000)[:, None], np.arange(1000))
  some = data.chosen(rows, 100)
  assert len(set(some.labels)) == 100
  assert list(some.labels) == list(some.inputs[:, 0])
  assert some.labels.mean() == 467.31  # Always the same ones.
  assert list(data.chosen(rows, None).labels) == list(rows.labels)


def test_label_set_is_declared_or_public(tmp_path):
  assert data.label_set(None, ['b', 'a', 'b']) == ['a', 'b']
  assert data.label_set(['b', 'a', 'c'], ['a']) == ['b', 'a', 'c']
  path = tmp_path / 'labels.txt'
  path.write_text('two words\nb\n\n')
  assert data.label_set([str(path)], ['b']) == ['two words', 'b']


@pytest.mark.parametrize(
  ('declared', 'evaluation', 'message'),
  [
    (['a', 'b'], ['a', 'd', 'c'], r"lacks \['c', 'd'\], .* evaluation .* only"),
    (['a', 'b', 'a'], ['a'], 'repeated'),
    (['a'], ['a'], 'two or more'),
    (None, ['a', 'a'], 'two or more'),
  ],
)
def test_bad_label_sets_are_refused(declared, evaluation, message):
  with pytest.raises(ValueError, match=f'--labels.*{message}'):
    data.label_set(declared, evaluation)


def test_the_parts_of_the_digits():
  sizes = [len(part.labels) for part in digits.load()]
  assert sizes == [600, 900, 297]
