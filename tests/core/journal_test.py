"""The journal of a run: what is written down, and what is refused."""

import sqlite3

import jax
import numpy as np
import optax
import pytest
from jax.experimental import multihost_utils

from prism_optax.training import _fingerprint
from prism_optax.training._journal import Count, Journal
from prism_optax.training._owner import Owner
from tests import cases

RUN, OTHER_RUN = b'run', b'other'
DIGESTS = [_fingerprint.words(name) for name in 'abc']


def test_each_other_release_of_a_step_counts(tmp_path):
  path = tmp_path / 'journal'
  journal = Journal(path)
  assert journal.count() == Count(0, 0)
  journal.begin(RUN)
  assert journal.record(RUN, 0, DIGESTS[0]) == 0
  assert journal.record(RUN, 1, DIGESTS[0]) == 0
  assert journal.count(RUN) == Count(2, 2)
  # Another process, after a crash, elsewhere; and again; and back.
  journal = Journal(path)
  journal.begin(OTHER_RUN)  # What `init` does before a state is restored.
  for step, digest, attempt in (
    (1, 1, 1), (1, 2, 2), (1, 1, 1), (1, 0, 0), (2, 1, 0),
  ):  # fmt: skip
    assert journal.record(RUN, step, DIGESTS[digest]) == attempt
  assert journal.count(RUN) == journal.count() == Count(3, 5)
  assert journal.count().again == 2


def test_processes_take_what_the_first_has(tmp_path, monkeypatch):
  """This one is the second: it has no journal, and no say."""
  private = cases.make(optax.sgd(0.1), journal=tmp_path / 'journal')
  state, owner = private.init(cases.PARAMS), Owner(private.parts)
  without = Owner(cases.make(optax.sgd(0.1)).parts)
  assert without.written_down(None, None, None) == 0
  monkeypatch.setattr(jax, 'process_count', lambda: 2)
  monkeypatch.setattr(jax, 'process_index', lambda: 1)
  monkeypatch.setattr(
    multihost_utils, 'broadcast_one_to_all', lambda x: np.full_like(x, 5)
  )
  assert owner.count(state) == Count(5, 5)
  assert owner.written_down(state, state.fingerprint, DIGESTS[0]) == 5
  np.testing.assert_array_equal(owner.environment, np.full(8, 5))
  batches = private.batches(state, cases.DATA)
  np.testing.assert_array_equal(next(iter(batches)).data, np.full(8, 5))


def test_a_journal_that_was_changed_by_hand(tmp_path):
  journal = Journal(tmp_path / 'journal')
  journal.begin(RUN)
  for digest in DIGESTS[:2]:
    journal.record(RUN, 0, digest)
  with sqlite3.connect(journal.path) as connection:
    connection.execute('DELETE FROM ledger WHERE id = 3')
  connection.close()
  with pytest.raises(RuntimeError, match='changed outside this library'):
    Journal(journal.path).count()
