"""Where budgets are kept: one SQLite file, or memory.

Each change is one transaction that holds SQLite's write lock from its first
read, so what was read is still true when the change is written, whoever else
has the file open. A process killed between any two instructions leaves either
the state before or the state after.
"""

import contextlib
import json
import os
import pathlib
import sqlite3
import threading
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

_SCHEMA = (
  'CREATE TABLE IF NOT EXISTS settings (id INTEGER PRIMARY KEY,'
  ' value TEXT NOT NULL)',
  'CREATE TABLE IF NOT EXISTS accounts (name TEXT PRIMARY KEY,'
  ' filter_name TEXT NOT NULL, totals TEXT NOT NULL)',
  # Rows are only ever added.
  'CREATE TABLE IF NOT EXISTS ledger (id INTEGER PRIMARY KEY AUTOINCREMENT,'
  ' session TEXT NOT NULL, event TEXT NOT NULL, count INTEGER NOT NULL)',
)


class Account(NamedTuple):
  """What one session, or the server, has spent."""

  name: str  # The session's; no session is called '', as the server is.
  filter_name: str  # The filter that counts; fixed by the first release.
  totals: tuple[float, ...]


class Transaction:
  """Reads and writes that happen together or not at all."""

  def __init__(self, connection: sqlite3.Connection):
    self._connection = connection

  def account(self, name: str) -> Account | None:
    """Returns the account, or None if nothing was spent in it."""
    row = self._connection.execute(
      'SELECT * FROM accounts WHERE name = ?', (name,)
    ).fetchone()
    # Python writes floats so that they come back bit for bit.
    return row and Account(row[0], row[1], tuple(json.loads(row[2])))

  def store(self, account: Account) -> None:
    """Writes the account."""
    self._connection.execute(
      'INSERT OR REPLACE INTO accounts VALUES (?, ?, ?)',
      (*account[:2], json.dumps(account.totals)),
    )

  def append(self, session: str, event: str, count: int) -> None:
    """Adds a row to the ledger."""
    self._connection.execute(
      'INSERT INTO ledger (session, event, count) VALUES (?, ?, ?)',
      (session, event, count),
    )

  def sessions(self) -> list[str]:
    """Returns the names of the sessions that have spent something."""
    rows = self._connection.execute(
      "SELECT name FROM accounts WHERE name != '' ORDER BY name"
    )
    return [name for (name,) in rows]

  def rows(self) -> list[dict[str, Any]]:
    """Returns the ledger in the order in which it was written."""
    rows = self._connection.execute('SELECT * FROM ledger ORDER BY id')
    return [
      {'id': i, 'session': name, 'event': json.loads(event), 'count': count}
      for i, name, event, count in rows
    ]

  def settle(self, settings: Mapping[str, Any]) -> None:
    """Writes the settings, or compares them with those that are there."""
    for statement in _SCHEMA:
      self._connection.execute(statement)
    self._connection.execute(
      'INSERT OR IGNORE INTO settings VALUES (1, ?)', (json.dumps(settings),)
    )
    rows = self._connection.execute('SELECT value FROM settings')
    stored = json.loads(rows.fetchone()[0])
    for name in sorted({*stored, *settings}):
      given, kept = settings.get(name), stored.get(name)
      if given != kept:
        raise ValueError(
          f'The ledger was created with other settings, got {name}={given!r}'
          f' (the file: {kept!r}). A budget is not changed by opening it again.'
        )


class Ledger:
  """A store of accounts, in the file ``path`` or in memory.

  Args:
    path: The file, created where there is none. With ``None`` the ledger lives
      in this process and ends with it.
    settings: The budget's settings, as JSON knows them. A file keeps those it
      was created with.
    timeout: Seconds to wait while others write.

  Raises:
    ValueError: If the file was created with other settings.
  """

  def __init__(
    self,
    path: str | os.PathLike[str] | None,
    settings: Mapping[str, Any],
    timeout: float,
  ):
    self._timeout = timeout
    self._process = os.getpid()
    self._lock = threading.Lock()
    self._memory: sqlite3.Connection | None = None
    self._uri = ''
    if path is None:
      self._memory = sqlite3.connect(
        ':memory:', check_same_thread=False, isolation_level=None
      )
    else:
      # Absolute: the budget must not change with the working directory. And
      # 'rw', not 'rwc', afterwards: a file that was moved away is an error, not
      # a fresh budget.
      file = pathlib.Path(path).absolute()
      sqlite3.connect(file).close()
      self._uri = f'{file.as_uri()}?mode=rw'
    with self.transaction() as transaction:
      transaction.settle(settings)

  @contextlib.contextmanager
  def transaction(self) -> Iterator[Transaction]:
    """Yields a transaction; commits it unless an exception comes out.

    Raises:
      TimeoutError: If others held the file for longer than the timeout. Nothing
        was read or written.
      RuntimeError: If the ledger is in memory and this is a forked process,
        whose copy of the budget would be a second budget.
    """
    with self._own_lock(), self._connected() as connection:
      # On the disk before `spend` returns: the answer may leave the machine.
      connection.execute('PRAGMA synchronous = FULL')
      try:
        connection.execute('BEGIN IMMEDIATE')
      except sqlite3.OperationalError as error:
        if 'locked' not in str(error):
          raise
        raise TimeoutError(
          f'The ledger was busy for {self._timeout} seconds.'
        ) from error
      with connection:  # Commits, or rolls back if that or the body fails.
        yield Transaction(connection)

  def _own_lock(self) -> threading.Lock:
    if self._process != os.getpid():
      if self._memory is not None:
        raise RuntimeError(
          'A budget in memory belongs to the process that made it. Give'
          ' `path` to share one between processes.'
        )
      # Another thread may have held the lock when this process was forked, and
      # would never let go of it here.
      self._lock = threading.Lock()
      self._process = os.getpid()
    return self._lock

  def _connected(self) -> contextlib.AbstractContextManager[sqlite3.Connection]:
    if self._memory is not None:
      return contextlib.nullcontext(self._memory)
    # A connection each time: none is shared by threads or inherited by forked
    # processes, for which SQLite is not made. It takes a fraction of what
    # writing to the disk does.
    return contextlib.closing(
      sqlite3.connect(
        self._uri, uri=True, timeout=self._timeout, isolation_level=None
      )
    )
