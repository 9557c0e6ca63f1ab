"""A journal counts what is released again in another environment."""

import functools
import json
import sqlite3
import subprocess
import sys

import jax
import numpy as np
import optax
import pytest

from prism_optax.training import _fingerprint
from prism_optax.training._claim import Claim
from prism_optax.training._journal import Count, Journal
from tests import cases, conftest
from tests.cases import DATA, FROZEN, PARAMS, N

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
  assert journal.record(RUN, 1, DIGESTS[1]) == 1
  assert journal.record(RUN, 1, DIGESTS[2]) == 2
  assert journal.record(RUN, 1, DIGESTS[1]) == 1
  assert journal.record(RUN, 1, DIGESTS[0]) == 0
  assert journal.record(RUN, 2, DIGESTS[1]) == 0
  assert journal.count(RUN) == journal.count() == Count(3, 5)
  assert journal.count().again == 2


def test_a_journal_that_is_gone_or_of_others(tmp_path):
  path = tmp_path / 'journal'
  journal = Journal(path)
  for call in (
    lambda: journal.record(RUN, 0, DIGESTS[0]),
    lambda: journal.count(RUN),
  ):
    with pytest.raises(FileNotFoundError, match='There is no journal in'):
      call()
  journal.begin(RUN)
  for call in (
    lambda: journal.record(OTHER_RUN, 0, DIGESTS[0]),
    lambda: journal.count(OTHER_RUN),
  ):
    with pytest.raises(ValueError, match='is that of another run'):
      call()
  # Gone, and begun again by the init before a restoration: it is not his.
  path.unlink()
  again = Journal(path)
  again.begin(OTHER_RUN)
  with pytest.raises(ValueError, match='is that of another run'):
    again.record(RUN, 0, DIGESTS[0])


def test_a_journal_that_was_changed_by_hand(tmp_path):
  path = tmp_path / 'journal'
  journal = Journal(path)
  journal.begin(RUN)
  journal.record(RUN, 0, DIGESTS[0])
  journal.record(RUN, 0, DIGESTS[1])
  with sqlite3.connect(path) as connection:
    connection.execute('DELETE FROM ledger WHERE id = 3')
  connection.close()
  with pytest.raises(RuntimeError, match='changed outside this library'):
    Journal(path).count()


def make(path, environment=None):
  """A training, in a pretended environment or in this one."""
  with pytest.MonkeyPatch.context() as patch:
    if environment:
      patch.setattr(_fingerprint, 'environment', lambda *_: environment)
    made = cases.make(
      optax.sgd(0.1), prng_key=None, journal=path, expected_batch_size=N
    )
    made._owner.environment  # noqa: B018
  return made


def test_a_step_done_again_elsewhere_is_another_release(tmp_path):
  here = make(tmp_path / 'journal')
  start = here.init(PARAMS)
  saved = jax.tree.map(jax.numpy.copy, start)

  def first_step(made):
    state = jax.tree.map(jax.numpy.copy, saved)
    state = state._replace(step=np.asarray(0))
    return made.step(state, next(iter(made.batches(state, DATA))), FROZEN)

  one = first_step(here)
  assert here.event() == make(tmp_path / 'none').event()
  planned = here.epsilon()
  # Again here: the same release.
  cases.assert_same_bits(first_step(here).params, one.params)
  assert here.epsilon() == planned
  assert ' again ' not in here.statement(one)
  # Elsewhere: fresh noise, which counts.
  elsewhere = make(tmp_path / 'journal', 'another machine')
  elsewhere.init(PARAMS)
  other = first_step(elsewhere)
  noises = [
    np.concatenate(
      [
        np.ravel(y - x)
        for x, y in zip(*map(jax.tree.leaves, (PARAMS, s.params)), strict=True)
      ]
    )
    for s in (one, other)
  ]
  # Far above rounding (1e-7), far below independent noise (1e-3).
  assert np.abs(noises[0] - noises[1]).max() > 2e-5
  for made in (here, elsewhere):
    settings = here.parts.settings
    assert made.event() == Claim(settings, Count(1, 2)).event(3)
    assert made.epsilon() > planned
    assert (
      '1 of 3 steps (epsilon is that of all 3) and 1 of them done again'
      ' elsewhere'
    ) in made.statement(other)
  # It goes on there, and a release more is no second one.
  state = elsewhere.step(
    other, next(iter(elsewhere.batches(other, DATA))), FROZEN
  )
  assert elsewhere._owner.count(state) == Count(2, 3)
  # An old state does not undo what was released after it.
  fixed = elsewhere.statement(saved, stop_was_fixed=True)
  assert '2 of 3 steps (a stop that was fixed beforehand)' in fixed
  # Other data are refused all the same, and another program in one place.
  with pytest.raises(ValueError, match='another one: data'):
    elsewhere.batches(state, tuple(2 * x for x in DATA))


def test_a_journal_is_for_one_run(tmp_path):
  path = tmp_path / 'journal'
  made = make(path)
  first, second = made.init(PARAMS), made.init(PARAMS)
  batch = next(iter(made.batches(second, DATA)))
  with pytest.raises(ValueError, match='is that of another run'):
    made.step(second, batch, FROZEN)
  with pytest.raises(ValueError, match='is that of another run'):
    made.statement(second)
  path.unlink()
  batch = next(iter(made.batches(first, DATA)))
  with pytest.raises(FileNotFoundError):
    made.step(first, batch, FROZEN)
  # Nothing was done: the buffers of the state are still there.
  assert np.isfinite(np.asarray(first.params['head'])).all()


@functools.cache
def elsewhere(devices, folder, *arguments):
  done = subprocess.run(
    [sys.executable, '-m', 'tests.training.elsewhere', folder, *arguments],
    env=conftest.devices(devices),
    text=True,
    capture_output=True,
    timeout=280,
    check=False,
  )
  assert done.returncode == 0, done.stderr[-3000:]
  return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize('journal', [False, True])
def test_one_device_and_two(journal, tmp_path):
  """Processes with another number of devices; the first one may go on."""
  options = ['journal'] * journal
  one = elsewhere(1, str(tmp_path), 'begin', *options)
  again = elsewhere(1, str(tmp_path), 'again', *options)
  assert again == one
  other = elsewhere(2, str(tmp_path), 'again', *options)
  if not journal:
    assert 'another environment' in other['refused']
    return
  cosine = np.vdot(one['noise'], other['noise']) / (
    np.linalg.norm(one['noise']) * np.linalg.norm(other['noise'])
  )
  assert abs(cosine) < 6 / np.sqrt(len(one['noise']))
  assert one['releases'] == 1
  assert other['releases'] == 2
  assert other['epsilon'] > one['epsilon']
