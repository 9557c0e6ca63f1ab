"""Parquet files and folders of ``datasets``: the rows that JSON lines have."""

import importlib
import json
import pathlib
import sys
from unittest import mock

import pytest

from prism_optax.finetune import data, files, instructions
from prism_optax.finetune import main as finetune
from tests.finetune import conftest

pa = pytest.importorskip('pyarrow', reason='pyarrow is not installed.')
ROWS = [
  {'prompt': 'two plus three', 'response': 'five'},
  {
    'messages': [
      {'role': 'user', 'content': 'two'},
      {'role': 'assistant', 'content': 'is two'},
    ]
  },
  {'prompt': 'a', 'label': 3},
]


def write_parquet(path: pathlib.Path, table) -> pathlib.Path:
  importlib.import_module('pyarrow.parquet').write_table(table, path)
  return path


def write_dataset(folder: pathlib.Path, *tables, **state) -> pathlib.Path:
  """A folder as ``Dataset.save_to_disk`` of version 4 leaves it."""
  folder.mkdir(parents=True)
  names = [f'data-{i:05}-of-{len(tables):05}.arrow' for i in range(len(tables))]
  for name, table in zip(names, tables, strict=True):
    with (
      pa.OSFile(str(folder / name), 'wb') as file,
      pa.ipc.new_stream(file, table.schema) as writer,
    ):
      writer.write_table(table)
  stored = {
    '_data_files': [{'filename': name} for name in names],
    '_fingerprint': '0', '_format_columns': None, '_format_type': None,
    '_split': None,
  }  # fmt: skip
  (folder / 'state.json').write_text(json.dumps(stored | state))
  (folder / 'dataset_info.json').write_text('{"features": {}}')
  return folder


def _read(path):
  return files.read(str(path), '--data')


def test_tables_have_the_rows_of_json_lines(tmp_path):
  """What a row lacks is null in a table; two files are one after the other."""
  table = pa.Table.from_pylist(ROWS, pa.schema([
    ('prompt', pa.string()), ('response', pa.large_string()),
    ('label', pa.int8()),
    ('messages', pa.list_(
      pa.struct([('role', pa.string()), ('content', pa.string())]))),
  ]))  # fmt: skip
  want = [files.Row(row) for row in ROWS]
  assert _read(write_parquet(tmp_path / 'a.PARQUET', table)) == want
  folder = write_dataset(tmp_path / 'd' / 'train', table[:2], table[2:])
  assert _read(folder) == want
  found = instructions.read_private(conftest.columns(folder))
  assert [x and x[-1]['content'] for x in found] == ['five', 'is two', None]
  # One split of a dictionary; which of several is not guessed.
  dictionary = folder.parent / 'dataset_dict.json'
  dictionary.write_text('{"splits": ["train"]}')
  assert _read(folder.parent) == want
  dictionary.write_text('{"splits": ["train", "test"]}')
  with pytest.raises(ValueError, match=r"'test'.: name one, such as .*train"):
    _read(folder.parent)


def test_one_bad_record_keeps_its_place(tmp_path):
  """A string that is no UTF-8: whether that is an error, the caller knows."""
  texts = pa.array([b'a', b'\xff', b'c', b'd', None])
  table = pa.table(
    {'text': texts.view(pa.string()), 'label': pa.array(['x'] * 5)}
  )
  path = str(write_parquet(tmp_path / 'a.parquet', table))
  private = data.read_private(conftest.columns(path))
  assert private.texts == ['a', '', 'c', 'd', '']
  assert private.labels == ['x', None, 'x', 'x', None]
  with pytest.raises(ValueError, match=r'--eval .*row 2: no row \(.utf-8'):
    data.read_public(conftest.columns(path))


def test_labels_that_are_numbers_or_categories(tmp_path):
  labels = {
    'a': pa.array([1, 0], pa.int64()),
    'b': pa.array(['yes', 'no']).dictionary_encode(),
  }
  table = pa.table({'text': ['s', 't'], **labels})
  path = str(write_parquet(tmp_path / 'a.parquet', table))
  for name, want in (('a', ['1', '0']), ('b', ['yes', 'no'])):
    assert data.read_public(conftest.columns(path, label=name)).labels == want


def test_broken_files_and_folders_are_named(tmp_path, monkeypatch, capsys):
  (tmp_path / 'a.parquet').write_text('{}')
  with pytest.raises(ValueError, match='--data: .*a.parquet cannot be read'):
    _read(tmp_path / 'a.parquet')
  (tmp_path / 'no').mkdir()
  with pytest.raises(ValueError, match='expected a file, or a folder that'):
    _read(tmp_path / 'no')
  table = pa.table({'prompt': ['a']})
  selected = write_dataset(
    tmp_path / 'selected', table, _indices_data_files=[{'filename': 'i.arrow'}]
  )
  with pytest.raises(ValueError, match=r'mapping of indices: call flatten_ind'):
    _read(selected)
  lost = write_dataset(tmp_path / 'lost', table)
  # As of a stream in which the number of a dictionary is damaged.
  damaged = mock.Mock(side_effect=pa.ArrowKeyError('type with id 0'))
  monkeypatch.setattr(pa.ipc, 'open_stream', damaged)
  with pytest.raises(ValueError, match=r'cannot be read: .?type with id 0'):
    _read(lost)
  next(lost.glob('*.arrow')).unlink()
  with pytest.raises(ValueError, match=r'data-00000.* cannot be read'):
    _read(lost)
  write_parquet(tmp_path / 'b.parquet', table).rename(tmp_path / 'b.jsonl')
  with pytest.raises(ValueError, match=r'end in .csv or .parquet'):
    instructions.read_private(conftest.columns(tmp_path / 'b.jsonl'))
  monkeypatch.setitem(sys.modules, 'pyarrow.parquet', None)
  argv = ['check-data', '--data', str(tmp_path / 'a.parquet')]
  assert finetune.main([*argv, '--labels', 'yes', 'no']) == 2
  error = capsys.readouterr().err
  assert 'pyarrow is missing: pip install "prism-optax[finetune]"' in error
