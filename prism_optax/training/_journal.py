"""A journal of one run: each release is written down before it is made.

A step that is done again on another machine has gradients that are rounded in
another way. The same noise on both would cancel, so it gets fresh noise and is
another release. Only what was written down before tells how many there were.
"""

import contextlib
import json
import os
import pathlib
from typing import NamedTuple

import numpy as np

from prism_optax.accounting._ledger import Account, Ledger, Transaction

# The version is that of the meaning of the rows.
_SETTINGS = {'version': 1, 'kind': 'journal of a private training'}
_TIMEOUT = 60.0  # Seconds to wait while another process writes.
_ALL = ''  # The account of all steps together; a step's is its number.


class Count(NamedTuple):
  """What a journal holds.

  Attributes:
    steps: Number of different steps.
    releases: Number of releases: more, where a step was done again elsewhere.
  """

  steps: int = 0
  releases: int = 0

  @property
  def again(self) -> int:
    """Releases beyond one for each step."""
    return self.releases - self.steps


class Journal:
  """The journal of a run, kept by the ledger of a budget and as durable.

  The first row says whose it is, so that a file that is gone is not mistaken
  for that of a run that has released nothing.

  Args:
    path: An SQLite file, for one run.
  """

  def __init__(self, path: str | os.PathLike[str]) -> None:
    self.path = pathlib.Path(path).absolute()
    self._ledger: Ledger | None = None

  def begin(self, run: bytes) -> None:
    """Begins the journal of a run, unless the file is one already."""
    with contextlib.suppress(FileExistsError):
      self._ledger = Ledger(self.path, _SETTINGS, _TIMEOUT, True, None)
    with self._open().transaction() as transaction:
      if transaction.account(_ALL) is None:
        _append(transaction, _ALL, run.hex(), Count(), [])

  def record(self, run: bytes, step: int, digest: np.ndarray) -> int:
    """Writes a release down, if it is not there, and waits for the disk.

    Args:
      run: Whose journal it must be.
      step: Number of the step.
      digest: Of all that makes two releases of this step one and the same.

    Returns:
      How many other releases of this step were written down before this one.

    Raises:
      FileNotFoundError: If there is no journal.
      ValueError: If it is that of another run.
      RuntimeError: If it was changed by hand.
    """
    name = str(step)
    release = f'{name} {digest.tobytes().hex()}'
    with self._open().transaction() as transaction:
      so_far = self._count(transaction, run)
      found = transaction.account(release)
      if found is not None:
        return int(found.totals[0])
      earlier = transaction.account(name)
      attempt = 0 if earlier is None else int(earlier.totals[0])
      after = Count(so_far.steps + (not attempt), so_far.releases + 1)
      accounts = [
        Account(release, 'attempt', (attempt,)),
        Account(name, 'attempts', (attempt + 1,)),
      ]
      _append(transaction, release, run.hex(), after, accounts)
    return attempt

  def count(self, run: bytes | None = None) -> Count:
    """How much was released; nothing, if there is no file and no run is asked.

    Args:
      run: Whose journal it must be; None takes what is there.

    Raises:
      FileNotFoundError, ValueError, RuntimeError: As for :meth:`record`.
    """
    if run is None and not self.path.exists():
      return Count()
    with self._open().transaction() as transaction:
      return self._count(transaction, run)

  def _open(self) -> Ledger:
    if not self.path.exists():
      raise FileNotFoundError(
        f'There is no journal in {self.path}: `init` began it with the run.'
        ' Without it nobody knows how often a step was released. Put it back'
        ' beside the checkpoint, or begin a new run and account for both.'
      )
    if self._ledger is None:
      self._ledger = Ledger(self.path, _SETTINGS, _TIMEOUT, False, None)
    return self._ledger

  def _count(self, transaction: Transaction, run: bytes | None) -> Count:
    account = transaction.account(_ALL)
    if account is None or (
      run is not None and account.filter_name != run.hex()
    ):
      raise ValueError(
        f'The journal in {self.path} is that of another run: give each run a'
        ' file of its own, and go on with the one it began with.'
      )
    return Count(*map(int, account.totals))


def _append(
  transaction: Transaction,
  name: str,
  run: str,
  count: Count,
  accounts: list[Account],
) -> None:
  # Its place for the name of a filter tells whose rows they are.
  accounts = [*accounts, Account(_ALL, run, tuple(map(float, count)))]
  transaction.append(name, json.dumps(name), 1, accounts)
