"""A privacy budget that is spent before the answer leaves."""

import os
from contextlib import AbstractContextManager as Context
from typing import Any

import dp_accounting
from dp_accounting import NeighboringRelation

from prism_optax import _validate
from prism_optax.accounting import _events, _filters
from prism_optax.accounting._events import ADD_OR_REMOVE_ONE
from prism_optax.accounting._ledger import Account, Ledger, Transaction

_SERVER = ''  # Its account; no session has this name.
_NOTHING = dp_accounting.NoOpDpEvent()


class BudgetExceeded(RuntimeError):
  """A release was refused; nothing was recorded, nothing may be released.

  Attributes:
    session: The session that asked.
    scope: Whose cap the release would have passed: 'session' or 'server'.
    remaining: Epsilon left under that cap.
  """

  def __init__(self, session: str, scope: str, remaining: float):
    self.session, self.scope, self.remaining = session, scope, remaining

  def __str__(self) -> str:
    whose = 'the server' if self.scope == 'server' else repr(self.session)
    return (
      f'The release for session {self.session!r} would exceed the budget of'
      f' {whose}: epsilon {self.remaining:.6g} is left.'
    )


class PrivacyBudget:
  """Epsilon and delta for each session, and for all of them together.

  :meth:`spend` must be called before the release. A recorded release is paid
  for even if the answer is lost, and a refused one must not be computed. It
  checks and records in one step, for any number of threads and, if the ledger
  is a file, of processes.

  **Privacy.** All answers to one session together are (``epsilon``,
  ``delta``)-private, whatever the session asks and however its questions depend
  on earlier answers, if each release was paid for by :meth:`spend` and its
  event is right. The guarantee is for neighbours under ``neighboring_relation``
  or, where the event holds the sensitivity of a relation already, under that
  relation. ``server_epsilon`` does the same for all sessions together. Three
  things are not covered. The running figures of :meth:`spent` and
  :meth:`remaining` are for planning: as a bound they hold only where the number
  of releases did not depend on the answers. The caller chooses session names,
  so whoever can choose a new name gets a fresh budget, which only the server's
  cap bounds. And the ledger itself has no noise: it shows in which order and
  how often a session asked. Gaussian noise counts as ideal (see
  ``inference.release_event``).

  **Integrity.** The rows of the ledger are chained by hashes, which cover
  settings and totals. Opening and :meth:`export` check all of them; every other
  call checks the new rows and the last one. So an edited, removed, moved or
  inserted row is found. The hashes have no secret, so they do not detect
  someone who computes them again, nor an older copy of the whole file, unless a
  process has it open. So keep the 'head' of :meth:`export` where the keepers of
  the file cannot write, and pass it as ``expected_head``.

  =============================  ==============================================
  release that does not fit      BudgetExceeded, before anything is recorded
  release that costs nothing     always fits; ``how_many_more`` is ``inf``
  release without noise          never fits
  unknown session                nothing spent, the whole cap remains
  process killed in ``spend``    the state before or the state after
  no ledger in the file          FileNotFoundError: not a fresh budget
  a ledger, ``create=True``      FileExistsError
  creation was interrupted       ``create=True`` again: nothing was spent
  ledger changed by hand         RuntimeError, nothing recorded
  file of other counting rules   ValueError: what was spent is not known
  file with other settings       ValueError: no budget changes by reopening it
  budget in memory, forked       RuntimeError: a copy would be a second budget
  =============================  ==============================================

  Args:
    epsilon: Cap of one session, positive.
    delta: Delta of one session's cap, in (0, 1), well below one over the number
      of records; above 1e-3 there is a warning.
    composition: How costs add up:

      - ``'filter'``: exact for an account whose first release is Gaussian
        (Smith and Thakurta, arXiv:2210.17520), which then takes Gaussian
        releases alone; 'renyi' for any other. The first release does not depend
        on answers; changing between the two later could, and would cost a part
        of delta.
      - ``'renyi'``: a filter for every release that the RDP accountant can
        analyse, in any mixture (Feldman and Zrnic, arXiv:2008.11193, Theorem
        4.3).
    path: SQLite file of the ledger; ``None`` keeps it in memory.
    neighboring_relation: Relation under which events are read, as in
      :func:`epsilon`. The default takes noise multipliers as they are; releases
      whose event holds their sensitivity already (``inference.release_event``)
      need no other.
    server_epsilon: Cap of all sessions together, at the same ``delta``;
      ``None`` for none.
    timeout: Seconds to wait for other processes.
    create: Whether to begin the ledger in this file. Do so once, by hand, and
      not in a program that starts more than once. In memory a budget always
      begins anew.
    expected_head: The 'head' of an :meth:`export`, from which this ledger must
      have grown. An older or another ledger is refused.

  Raises:
    ValueError: If an argument is out of its range, or the file was made with
      other settings, or under another version of the rules by which costs are
      counted.
    FileNotFoundError: If there is no ledger and ``create`` is false.
    FileExistsError: If there is a ledger and ``create`` is true.
    RuntimeError: If the ledger was changed by hand, or is not the expected one.
    TimeoutError: If other processes kept the file.

  Examples:
    >>> import dp_accounting
    >>> from prism_optax import accounting
    >>> budget = accounting.PrivacyBudget(2.0, 1e-5)
    >>> release = dp_accounting.GaussianDpEvent(4.8448)
    >>> round(budget.spend(release, 'alice'), 3)
    0.751
    >>> budget.how_many_more(release, 'alice')
    4
  """

  def __init__(
    self,
    epsilon: float,
    delta: float,
    *,
    composition: str = 'filter',
    path: str | os.PathLike[str] | None = None,
    neighboring_relation: NeighboringRelation = ADD_OR_REMOVE_ONE,
    server_epsilon: float | None = None,
    timeout: float = 60.0,
    create: bool = False,
    expected_head: str | None = None,
  ):
    delta = _validate.known_open_probability('delta', delta)
    _events.check_delta(_NOTHING, delta)
    positive = _validate.known_positive
    caps = {'session': positive('epsilon', epsilon)}
    if server_epsilon is not None:
      caps['server'] = positive('server_epsilon', server_epsilon)
    _validate.one_of('composition', composition, ('filter', 'renyi'))
    _validate.neighboring_relation(neighboring_relation)
    _validate.positive('timeout', timeout)
    self._composition = composition
    self._filters: dict[str, dict[str, _filters.Filter]] = {
      scope: {
        'gaussian': _filters.GaussianFilter(cap, delta, neighboring_relation),
        'renyi': _filters.RenyiFilter(cap, delta, neighboring_relation),
      }
      for scope, cap in caps.items()
    }
    self._settings = {
      'version': _filters.VERSION,
      'caps': caps,
      'delta': delta,
      'composition': composition,
      'neighboring_relation': neighboring_relation.name,
    }
    self._ledger = Ledger(path, self._settings, timeout, create, expected_head)

  def spend(
    self, event: dp_accounting.DpEvent, session: str, *, count: int = 1
  ) -> float:
    """Pays for ``count`` releases before they are made, or refuses all.

    Args:
      event: What will be released, for example
        ``inference.release_event(...)``. T noised vectors are T releases.
      session: Name of the session that pays.
      count: Number of releases of this event, at least 1.

    Returns:
      Epsilon that the session has spent with this.

    Raises:
      BudgetExceeded: If the session or the server cannot afford it. Nothing was
        recorded.
      ValueError: If the composition has no analysis of the event, or an
        argument or a number of the event is out of its range (a negative count
        inside of a composition would be a refund). Nothing was recorded.
      TimeoutError: If other processes kept the file. Nothing was recorded.
      RuntimeError: If the ledger was changed by hand. Nothing was recorded.
    """
    _validate.integer('count', count, 1)
    with self._transaction(session) as transaction:
      spent, after = {}, []
      accounts = self._accounts(transaction, session, event)
      for scope, (found, account) in accounts.items():
        total = _filters.add(account.totals, found.costs(event), count)
        spent[scope] = found.spent(total)
        if spent[scope] > found.epsilon:
          left = found.epsilon - found.spent(account.totals)
          raise BudgetExceeded(session, scope, max(left, 0.0))
        after.append(account._replace(totals=total))
      transaction.append(session, _events.to_json(event), count, after)
    return spent['session']

  def spent(self, session: str) -> float:
    """Returns epsilon that the session has spent, 0.0 for an unknown one.

    Args:
      session: Name of the session.

    Returns:
      Epsilon at the cap's delta.

    Raises:
      ValueError: If the session has no name.
      TimeoutError: If other processes kept the file.
    """
    with self._transaction(session) as transaction:
      found, account = self._accounts(transaction, session)['session']
      return found.spent(account.totals)

  def remaining(self, session: str) -> float:
    """Returns epsilon left to the session, and to the server if that is less.

    Epsilon does not simply add up: :meth:`how_many_more` shows whether a
    release still fits.

    Args:
      session: Name of the session.

    Returns:
      Cap less what is spent, at the caps' deltas.

    Raises:
      ValueError: If the session has no name.
      TimeoutError: If other processes kept the file.
    """
    with self._transaction(session) as transaction:
      return min(
        found.epsilon - found.spent(account.totals)
        for found, account in self._accounts(transaction, session).values()
      )

  def how_many_more(
    self, event: dp_accounting.DpEvent, session: str
  ) -> int | float:
    """Returns how many times :meth:`spend` would accept ``event`` now.

    Args:
      event: What would be released, as for :meth:`spend`.
      session: Name of the session that would pay.

    Returns:
      A count, ``inf`` for a release that costs nothing.

    Raises:
      ValueError: In the cases of :meth:`spend`.
      TimeoutError: If other processes kept the file.
    """
    with self._transaction(session) as transaction:
      accounts = self._accounts(transaction, session, event)
      return min(
        found.largest_count(account.totals, found.costs(event))
        for found, account in accounts.values()
      )

  def export(self) -> dict[str, Any]:
    """Returns settings, accounts and ledger in types of JSON.

    Returns:
      'settings' as given; 'server' with 'spent' and 'remaining', or None;
      'sessions' with the same for each; 'ledger', a list of 'id', 'session',
      'event' and 'count' in the order of spending; 'head', the hash of its last
      row and all before (of the settings, if there is no row).

    Raises:
      TimeoutError: If other processes kept the file.
      RuntimeError: If the ledger was changed by hand. All of it is read.
    """
    with self._ledger.transaction() as transaction:

      def figures(session: str, scope: str = 'session') -> dict[str, float]:
        found, account = self._accounts(transaction, session)[scope]
        spent = found.spent(account.totals)
        return {'spent': spent, 'remaining': found.epsilon - spent}

      server = 'server' in self._filters
      return {
        'settings': dict(self._settings),
        'server': figures(_SERVER, 'server') if server else None,
        'sessions': {name: figures(name) for name in transaction.sessions()},
        'ledger': transaction.rows(),
        'head': transaction.head(),
      }

  def _transaction(self, session: object) -> Context[Transaction]:
    if not isinstance(session, str) or not session:
      raise ValueError(
        'Expected session to be a name, a str that is not empty, got'
        f' {session=}.'
      )
    return self._ledger.transaction()

  def _accounts(
    self,
    transaction: Transaction,
    session: str,
    event: dp_accounting.DpEvent = _NOTHING,
  ) -> dict[str, tuple[_filters.Filter, Account]]:
    """Returns the accounts that pay for ``event``, by scope.

    Each comes with its filter. Where there is none, ``event`` would open it.
    """
    _events.require_event(event)
    opened = self._composition
    if opened == 'filter':
      gaussian = _events.kinds(event) <= {dp_accounting.GaussianDpEvent}
      opened = 'gaussian' if gaussian else 'renyi'
    accounts = {}
    for scope, filters in self._filters.items():
      name = session if scope == 'session' else _SERVER
      account = transaction.account(name)
      if account is None:
        account = Account(name, opened, filters[opened].zero)
      accounts[scope] = filters[account.filter_name], account
    return accounts
