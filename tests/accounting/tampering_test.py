"""Ledgers that are gone, of other rules, begun by halves, or edited by hand."""

import math
import shutil
import sqlite3

import dp_accounting
import numpy as np
import pytest

from prism_optax import accounting
from tests.core import seams

DELTA = 1e-5
RELEASE = dp_accounting.GaussianDpEvent(4.8448)


def open_budget(path, cap=3.0, **options):
  return accounting.PrivacyBudget(
    cap, DELTA, path=path, server_epsilon=5.0, **options
  )


def edit(path, *statements):
  with sqlite3.connect(path) as connection:
    for statement in statements:
      connection.execute(statement)
  connection.close()


@pytest.fixture
def path(tmp_path):
  """A ledger of five rows of two sessions."""
  path = tmp_path / 'ledger.sqlite'
  budget = open_budget(path, create=True)
  for number, session in enumerate('abaab'):
    budget.spend(RELEASE, session, count=1 + number)
  return path


ID = 'UPDATE ledger SET id = {} WHERE id = {}'
COPY = (
  'INSERT INTO ledger SELECT {}, session, event, count, accounts, hash'
  ' FROM ledger WHERE id = {}'
)
# The server's account is in every row, the session's in every row of it.
TOTALS = (
  'UPDATE ledger SET accounts = (SELECT accounts FROM ledger WHERE id = {})'
  ' WHERE id = {}'
)
EDITS = {
  'a count': ['UPDATE ledger SET count = 1 WHERE id = 2'],
  'an event': ["UPDATE ledger SET event = '{}' WHERE id = 3"],
  'who paid': ["UPDATE ledger SET session = 'c' WHERE id = 3"],
  'totals': ["UPDATE ledger SET accounts = '[]' WHERE id = 3"],
  'totals of the last row': ["UPDATE ledger SET accounts = '[]' WHERE id = 5"],
  'totals older than their row': [TOTALS.format(3, 4)],
  'totals newer than their row': [TOTALS.format(4, 3)],
  'a type': ["UPDATE ledger SET session = x'61' WHERE id = 1"],
  'the first row removed': ['DELETE FROM ledger WHERE id = 1'],
  'a row removed': ['DELETE FROM ledger WHERE id = 3'],
  'a row removed, renumbered': [
    'DELETE FROM ledger WHERE id = 3', *(ID.format(x, x + 1) for x in (3, 4)),
  ],
  'the last row removed': ['DELETE FROM ledger WHERE id = 5'],
  'all rows removed': ['DELETE FROM ledger'],
  'the table removed': ['DROP TABLE ledger'],
  'rows in another order': [ID.format(*x) for x in ((99, 2), (2, 3), (3, 99))],
  'a row inserted behind': [COPY.format(6, 5)],
  'a row inserted in front': [COPY.format(0, 5)],
  'a row inserted far in front': [COPY.format(-3, 5)],
  'an older head': [
    'UPDATE settings SET head = (SELECT hash FROM ledger WHERE id = 4)'
  ],
  'a head of nothing': ["UPDATE settings SET head = ''"],
}  # fmt: skip
# Rows that a process has read it does not read again, but for `export`.
SEEN_BY_SPEND = {
  *('the last row removed', 'all rows removed', 'the table removed'),
  *('a row inserted behind', 'an older head', 'a head of nothing'),
}


@pytest.mark.parametrize('name', EDITS)
def test_a_ledger_edited_by_hand_is_refused(path, name):
  live = open_budget(path)
  edit(path, *EDITS[name])
  for look in (lambda: open_budget(path), live.export):
    with pytest.raises((RuntimeError, sqlite3.OperationalError)) as found:
      look()
    assert 'outside this library' in str(found.value) or 'table' in name


@pytest.mark.parametrize('name', sorted(SEEN_BY_SPEND))
def test_a_release_looks_at_what_is_new_and_at_the_end(path, name):
  live = open_budget(path)
  edit(path, *EDITS[name])
  before = path.read_bytes()
  for ask in (
    lambda: live.spend(RELEASE, 'a'),
    lambda: live.spent('a'),
    lambda: live.remaining('a'),
    lambda: live.how_many_more(RELEASE, 'a'),
  ):
    with pytest.raises((RuntimeError, sqlite3.OperationalError)):
      ask()
  assert path.read_bytes() == before


def test_settings_edited_by_hand_are_refused(path, tmp_path):
  """Also where nothing was spent yet, and by those that are given."""
  empty = tmp_path / 'empty.sqlite'
  open_budget(empty, create=True)
  for file in (path, empty):
    live = open_budget(file)
    edit(file, "UPDATE settings SET value = replace(value, '3.0', '30.0')")
    with pytest.raises(RuntimeError, match='outside this library: .*settings'):
      open_budget(file, cap=30.0)
    with pytest.raises(RuntimeError, match='outside this library'):
      live.export()
    with pytest.raises(ValueError, match=r'caps=.*3\.0.*30\.0'):
      open_budget(file)


def test_rows_without_settings_are_no_fresh_ledger(path):
  edit(path, 'DELETE FROM settings')
  with pytest.raises(FileNotFoundError, match='create=True once'):
    open_budget(path)
  with pytest.raises(RuntimeError, match='outside this library'):
    open_budget(path, create=True)


def test_totals_come_from_rows_that_were_checked(path):
  """What is edited behind a running process gives it nothing back."""
  live = open_budget(path)
  left = live.how_many_more(RELEASE, 'a')
  edit(path, "UPDATE ledger SET accounts = '[]'")
  assert live.how_many_more(RELEASE, 'a') == left


def test_an_older_copy_is_refused_by_who_has_seen_more(path, tmp_path):
  """A running process, and one that is given a head; not by any other."""
  copy = tmp_path / 'copy.sqlite'
  shutil.copy(path, copy)
  live = open_budget(path)
  older = live.export()['head']
  live.spend(RELEASE, 'a')
  head = live.export()['head']
  assert head != older
  live.spend(RELEASE, 'b')
  # A head holds for all that is written behind it, the empty ledger's too.
  fresh = open_budget(tmp_path / 'fresh.sqlite', create=True).export()['head']
  for expected in (fresh, older, head, live.export()['head'], None):
    open_budget(path, expected_head=expected)
  shutil.copy(copy, path)
  open_budget(path, expected_head=older)
  with pytest.raises(RuntimeError, match=f'none of 5 rows has.*{head}'):
    open_budget(path, expected_head=head)
  with pytest.raises(RuntimeError, match='do not fit the last row, 7'):
    live.spend(RELEASE, 'a')
  # Written by another process: a chain, but not the one that was read.
  other = open_budget(path)
  for _ in range(3):
    other.spend(RELEASE, 'b')
  with pytest.raises(RuntimeError, match='row 8 does not fit row 7'):
    live.spend(RELEASE, 'a')


def test_a_ledger_is_begun_once(path, tmp_path):
  with pytest.raises(FileExistsError, match='Leave create=True out'):
    open_budget(path, create=True)
  missing = tmp_path / 'missing.sqlite'
  with pytest.raises(FileNotFoundError, match='missing.sqlite.*create=True'):
    open_budget(missing)
  assert not missing.exists()


def test_a_ledger_of_other_rules_is_refused(path, tmp_path):
  """Also one from before there were versions."""
  refused = pytest.raises(ValueError, match=r'Version 1 of .* version 2')
  with seams.version_of_rules(2), refused:
    open_budget(path)
  open_budget(path)
  path = tmp_path / 'old.sqlite'
  edit(
    path,
    'CREATE TABLE settings (id INTEGER PRIMARY KEY, value TEXT NOT NULL)',
    'INSERT INTO settings VALUES (1, \'{"delta": 1e-05}\')',
  )
  before = path.read_bytes()
  with pytest.raises(ValueError, match='Version None of the rules'):
    open_budget(path)
  assert path.read_bytes() == before


def test_a_ledger_begun_by_halves_is_begun_again(tmp_path):
  path = tmp_path / 'ledger.sqlite'
  # The settings are written.
  with seams.interrupted('start'), pytest.raises(KeyboardInterrupt):
    open_budget(path, create=True)
  assert path.exists()
  with pytest.raises(FileNotFoundError, match='create=True once'):
    open_budget(path)
  open_budget(path, create=True).spend(RELEASE, 'a')
  assert len(open_budget(path).export()['ledger']) == 1


def test_a_row_whose_reading_is_interrupted_is_read_again(path):
  """By Ctrl-C in a notebook: the totals may not fall behind the rows."""
  live, other = open_budget(path), open_budget(path)
  spent = other.spend(RELEASE, 'a', count=3)
  with seams.interrupted('read'), pytest.raises(KeyboardInterrupt):
    live.spent('a')
  assert live.spent('a') == spent


def test_counts_of_numpy_are_kept_as_they_are_hashed(path):
  budget = open_budget(path)
  budget.spend(RELEASE, 'c', count=np.int64(2))
  expected = accounting.gaussian_epsilon(math.sqrt(3) / 4.8448, DELTA)
  assert budget.spend(RELEASE, 'c') == pytest.approx(expected)
  assert open_budget(path).export() == budget.export()
