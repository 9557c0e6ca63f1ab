"""Where budgets are kept: one SQLite file, or memory.

Each change is one transaction that holds SQLite's write lock from its first
read, so what was read is still true when the change is written, whoever else
has the file open. A process killed between any two instructions leaves either
the state before or the state after.

The rows are a chain: each has a hash of all that was written up to it, with the
totals of the accounts that paid. There is no other place where totals stand. A
process checks each row once, in order, and takes totals from checked rows only.
"""

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import pathlib
import sqlite3
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

_SCHEMA = (
  # `head` is the hash of the last row: else the last rows could be cut off.
  'CREATE TABLE IF NOT EXISTS settings (id INTEGER PRIMARY KEY,'
  ' value TEXT NOT NULL, head TEXT NOT NULL)',
  # Rows are only ever added. `accounts` holds those that paid, afterwards.
  'CREATE TABLE IF NOT EXISTS ledger (id INTEGER PRIMARY KEY,'
  ' session TEXT NOT NULL, event TEXT NOT NULL, count INTEGER NOT NULL,'
  ' accounts TEXT NOT NULL, hash TEXT NOT NULL)',
)


class Account(NamedTuple):
  """What one session, or the server, has spent."""

  name: str  # The session's; no session is called '', as the server is.
  filter_name: str  # The filter that counts; fixed by the first release.
  totals: tuple[float, ...]


def _hash(*parts: object) -> str:
  # Of types that JSON does not know we have written nothing.
  text = json.dumps(parts, default=repr)
  return hashlib.sha256(text.encode()).hexdigest()


def _absent(path: object) -> FileNotFoundError:
  return FileNotFoundError(
    f'There is no ledger in {path}. Say create=True once, when the budget is'
    ' opened for the first time: a ledger that is gone is not a fresh budget.'
  )


def _changed(what: str) -> RuntimeError:
  return RuntimeError(f'The ledger was changed outside this library: {what}.')


@dataclasses.dataclass
class _Chain:
  """The rows up to ``last``, checked, and what they say was spent."""

  last: tuple[int, str]  # Number and hash; before the first row, the settings'.
  accounts: dict[str, Account] = dataclasses.field(default_factory=dict)

  @classmethod
  def start(cls, connection: sqlite3.Connection) -> '_Chain':
    """Returns the chain before its first row."""
    return cls((0, _hash(*connection.execute('SELECT value FROM settings'))))

  def follow(self, connection: sqlite3.Connection) -> None:
    """Checks and adds the rows that were written since."""
    number, head = self.last
    rows = connection.execute(
      'SELECT * FROM ledger WHERE id > ? ORDER BY id',
      (number or -math.inf,),  # No number is so low that a row is not seen.
    )
    for *row, stored in rows:
      if stored != _hash(head, *row):
        raise _changed(
          f'row {row[0]} does not fit row {number} or the settings'
        )
      for name, filter_name, totals in json.loads(row[-1]):
        # Python writes floats so that they come back bit for bit.
        self.accounts[name] = Account(name, filter_name, tuple(totals))
      # Last and at once: a row whose reading is interrupted is read again.
      self.last = number, head = row[0], stored
    end = 'SELECT head, (SELECT max(id) FROM ledger) FROM settings'
    if connection.execute(end).fetchall() != [(head, number or None)]:
      raise _changed(f'the settings do not fit the last row, {number}')


class Transaction:
  """Reads and a write that happen together or not at all."""

  def __init__(self, connection: sqlite3.Connection, chain: _Chain):
    self._connection = connection
    self._chain = chain

  def account(self, name: str) -> Account | None:
    """Returns the account, or None if nothing was spent in it."""
    return self._chain.accounts.get(name)

  def append(
    self, session: str, event: str, count: int, accounts: Sequence[Account]
  ) -> None:
    """Adds a row, the only one of this transaction."""
    number, head = self._chain.last
    # NumPy's integers would not come back as they were hashed.
    row = number + 1, session, event, int(count), json.dumps(accounts)
    head = _hash(head, *row)
    write = self._connection.execute
    write('INSERT INTO ledger VALUES (?, ?, ?, ?, ?, ?)', (*row, head))
    write('UPDATE settings SET head = ?', (head,))

  def sessions(self) -> list[str]:
    """Returns the names of the sessions that have spent something."""
    return sorted(name for name in self._chain.accounts if name)

  def rows(self) -> list[dict[str, object]]:
    """Checks the ledger from the start and returns it in the order written."""
    _Chain.start(self._connection).follow(self._connection)
    rows = self._connection.execute(
      'SELECT id, session, event, count FROM ledger ORDER BY id'
    )
    return [
      {'id': i, 'session': name, 'event': json.loads(event), 'count': count}
      for i, name, event, count in rows
    ]

  def head(self) -> str:
    """Returns the hash of the last row, or of the settings if there is none."""
    return self._chain.last[1]


def _open(
  connection: sqlite3.Connection,
  path: object,
  settings: Mapping[str, object],
  create: bool,
  expected_head: str | None,
) -> _Chain:
  """Writes the settings, or compares them; returns the chain, checked."""
  for statement in _SCHEMA:
    connection.execute(statement)
  found = connection.execute('SELECT value FROM settings').fetchone()
  if create:
    if found:
      raise FileExistsError(
        f'There is a ledger in {path}. Leave create=True out: said at every'
        ' start, it would hide that a ledger is gone.'
      )
    found = (json.dumps(settings),)
    connection.execute("INSERT INTO settings VALUES (1, ?, '')", found)
    head = _Chain.start(connection).last[1]
    connection.execute('UPDATE settings SET head = ?', (head,))
  if not found:
    raise _absent(path)
  stored = json.loads(found[0])
  theirs, ours = stored.get('version'), settings['version']
  if theirs != ours:
    raise ValueError(
      f'Version {theirs} of the rules by which costs are counted wrote this'
      f' ledger, and version {ours} cannot tell what was spent. Use a'
      ' release of prism_optax with the other one, or begin a new ledger.'
    )
  for name in sorted({*stored, *settings}):
    given, kept = settings.get(name), stored.get(name)
    if given != kept:
      raise ValueError(
        f'The ledger was created with other settings, got {name}={given!r}'
        f' (the file: {kept!r}). A budget is not changed by opening it again.'
      )
  chain = _Chain.start(connection)
  first = chain.last[1]
  chain.follow(connection)
  hashes = connection.execute('SELECT hash FROM ledger')
  if expected_head is not None and (expected_head,) not in ((first,), *hashes):
    raise _changed(f'none of {chain.last[0]} rows has {expected_head=}')
  return chain


class Ledger:
  """A store of accounts, in the file ``path`` or in memory.

  Args:
    path: The file. With ``None`` the ledger lives in this process and ends with
      it.
    settings: The budget's settings, in types of JSON, with a 'version'. A
      file keeps those it was created with.
    timeout: Seconds to wait while others write.
    create: Whether the file holds no ledger yet. One that was only begun, by a
      process that was killed, holds none.
    expected_head: A :meth:`Transaction.head` that the ledger has had, if known.

  Raises:
    FileNotFoundError: If there is no ledger, and ``create`` is false.
    FileExistsError: If there is one, and ``create`` is true.
    ValueError: If the file was created with other settings.
    RuntimeError: If the rows are no chain, or never had the expected head.
  """

  def __init__(
    self,
    path: str | os.PathLike[str] | None,
    settings: Mapping[str, object],
    timeout: float,
    create: bool,
    expected_head: str | None,
  ):
    self._timeout = timeout
    self._process = os.getpid()
    self._lock = threading.Lock()
    self._memory: sqlite3.Connection | None = None
    self._uri = ''
    if path is None:
      create = True
      self._memory = sqlite3.connect(':memory:', check_same_thread=False)
    else:
      # Absolute: the budget must not change with the working directory. And
      # 'rw', not 'rwc', afterwards: a file that was moved away is an error, not
      # a fresh budget.
      file = pathlib.Path(path).absolute()
      if create:
        file.touch()
      elif not file.exists():
        raise _absent(path)
      self._uri = f'{file.as_uri()}?mode=rw'
    with self._exclusive() as connection:
      self._chain = _open(connection, path, settings, create, expected_head)

  @contextlib.contextmanager
  def transaction(self) -> Iterator[Transaction]:
    """Yields a transaction; commits it unless an exception comes out.

    Raises:
      TimeoutError: If others held the file for longer than the timeout. Nothing
        was read or written.
      RuntimeError: If the rows are no chain any more. Or if the ledger is in
        memory and this is a forked process, whose copy of the budget would be
        a second budget.
    """
    with self._exclusive() as connection:
      self._chain.follow(connection)
      yield Transaction(connection, self._chain)

  @contextlib.contextmanager
  def _exclusive(self) -> Iterator[sqlite3.Connection]:
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
        yield connection

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
      sqlite3.connect(self._uri, uri=True, timeout=self._timeout)
    )
