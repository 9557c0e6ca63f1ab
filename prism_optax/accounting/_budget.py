"""A privacy budget that is spent before the answer leaves."""

import json
import math
import os
from collections.abc import Mapping
from typing import Any

import dp_accounting
from dp_accounting import NeighboringRelation

from prism_optax import _validate
from prism_optax.accounting import _events, _rules
from prism_optax.accounting._ledger import Account, Ledger, Transaction

_SERVER = ('server', '')  # Scope and name of the server's own account.


class BudgetExceeded(RuntimeError):
  """A release was refused; nothing was recorded, nothing may be released.

  Attributes:
    session: The session that asked.
    scope: Whose cap it would have passed: 'session' or 'server'.
    remaining: Epsilon left under that cap.
  """

  def __init__(self, session: str, scope: str, remaining: float):
    super().__init__(session, scope, remaining)
    self.session, self.scope, self.remaining = session, scope, remaining

  def __str__(self) -> str:
    whose = 'the server' if self.scope == 'server' else repr(self.session)
    return (
      f'The release for session {self.session!r} would exceed the budget of'
      f' {whose}: epsilon {self.remaining:.6g} is left.'
    )


class PrivacyBudget:
  """Epsilon and delta for each session, and for all of them together.

  :meth:`spend` comes before the release: what it has recorded is paid for even
  if the answer is lost, and what it refuses must not be computed. It checks and
  records in one step, for any number of threads, and of processes where the
  ledger is a file.

  The guarantee is the cap: whatever a session asks, and however its questions
  depend on earlier answers, all its answers together are (``epsilon``,
  ``delta``)-private. The running figures of :meth:`spent` and
  :meth:`remaining` are for planning; as a bound of their own they hold only
  where the number of releases did not depend on the answers.

  Session names are the caller's: whoever can choose a new one gets a fresh
  budget. ``server_epsilon`` bounds all sessions together.

  =============================  ==============================================
  release that does not fit      BudgetExceeded, before anything is recorded
  release that costs nothing     fits for ever; ``how_many_more`` is ``inf``
  release without noise          never fits
  unknown session                nothing spent, the whole cap remains
  process killed in ``spend``    the state before or the state after
  file with other settings       ValueError: no budget changes by reopening it
  budget in memory, forked       RuntimeError: a copy would be a second budget
  =============================  ==============================================

  Args:
    epsilon: Cap of one session, positive.
    delta: Of one session, in (0, 1).
    composition: How costs add up:

      - ``'filter'``: 'gaussian' for an account whose first release is Gaussian,
        'renyi' for any other. The first release does not depend on answers;
        changing between the two later could, and would cost a part of delta.
      - ``'gaussian'``: exact for Gaussian releases (Smith and Thakurta,
        arXiv:2210.17520); also takes what has an epsilon with delta 0
        (Laplace), as the Gaussian that covers it.
      - ``'renyi'``: a filter for all that the RDP accountant knows, mixed at
        will (Feldman and Zrnic, arXiv:2008.11193, Theorem 4.3).
      - ``'pld'``: tight, for the releases declared beforehand in ``declared``
        alone, in any order.
      - ``'advanced'``: the advanced composition theorem, for comparison: half
        of delta is its slack, the other half pays for the releases' own deltas
        (Whitehouse et al., arXiv:2203.05481).
    path: SQLite file of the ledger, made where there is none; ``None`` keeps it
      in memory.
    neighboring_relation: Of the events, as in :func:`epsilon`. The default
      takes noise multipliers as they are; releases whose event holds their
      sensitivity already (``inference.release_event``) need no other.
    server_epsilon: Cap of all sessions together; ``None`` for none.
    server_delta: Of all sessions together; ``None`` takes ``delta``.
    declared: For 'pld': how often each event may happen in a session.
    release_delta: For 'advanced': the delta of one release.
    timeout: Seconds to wait for other processes.

  Raises:
    ValueError: If a number is out of its range, an option is missing or does
      not belong to the composition, the declared releases do not fit, or the
      file was made with other settings.

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
    neighboring_relation: NeighboringRelation = (
      NeighboringRelation.ADD_OR_REMOVE_ONE
    ),
    server_epsilon: float | None = None,
    server_delta: float | None = None,
    declared: Mapping[dp_accounting.DpEvent, int] | None = None,
    release_delta: float | None = None,
    timeout: float = 60.0,
  ):
    caps = {'session': _rules.cap('epsilon', epsilon, 'delta', delta)}
    if server_epsilon is not None:
      caps['server'] = _rules.cap(
        'server_epsilon',
        server_epsilon,
        'server_delta',
        delta if server_delta is None else server_delta,
      )
    elif server_delta is not None:
      raise ValueError(f'Expected server_epsilon with {server_delta=}.')
    _validate.positive('timeout', timeout)
    self._composition = composition
    self._rules = {
      (scope, name): rule
      for scope, cap in caps.items()
      for name, rule in _rules.rules_for(
        composition,
        cap,
        neighboring_relation,
        declared=declared,
        release_delta=release_delta,
        server_epsilon=server_epsilon,
      ).items()
    }
    self._scopes = tuple(caps)
    self._settings: dict[str, Any] = {
      'caps': caps,
      'composition': composition,
      'neighboring_relation': neighboring_relation.name,
      'declared': declared
      and {_events.to_json(event): n for event, n in declared.items()},
      'release_delta': release_delta,
    }
    self._ledger = Ledger(path, self._settings, timeout)

  def spend(
    self, event: dp_accounting.DpEvent, session: str, *, count: int = 1
  ) -> float:
    """Pays for ``count`` releases before they are made, or refuses all.

    Args:
      event: What will be released, for example
        ``inference.release_event(...)``. T noised vectors are T releases.
      session: Who it is released about.
      count: How many times.

    Returns:
      Epsilon that the session has spent with this.

    Raises:
      BudgetExceeded: If the session or the server cannot afford it. Nothing was
        recorded.
      ValueError: If the composition has no analysis of the event, or an
        argument is out of its range. Nothing was recorded.
      TimeoutError: If other processes kept the file. Nothing was recorded.
    """
    _session_given(session)
    _events.require_event(event)
    _validate.integer('count', count, 1)
    with self._ledger.transaction() as transaction:
      totals = {}
      for scope in self._scopes:
        account = self._account(transaction, scope, session, event)
        rule = self._rules[scope, account.rule]
        total = _rules.added(rule, account.totals, event, count)
        if not rule.fits(total):
          left = rule.epsilon - rule.spent(account.totals)
          raise BudgetExceeded(session, scope, max(left, 0.0))
        totals[scope] = Account(account.rule, total)
      for scope, account in totals.items():
        transaction.store(*_key(scope, session), account)
      transaction.append(session, _events.to_json(event), count)
    mine = totals['session']
    return self._rules['session', mine.rule].spent(mine.totals)

  def spent(self, session: str) -> float:
    """Returns epsilon that the session has spent, 0.0 for an unknown one.

    Args:
      session: Whose.

    Returns:
      Epsilon at the cap's delta.

    Raises:
      ValueError: If the session has no name.
      TimeoutError: If other processes kept the file.
    """
    _session_given(session)
    with self._ledger.transaction() as transaction:
      return self._spent(transaction, 'session', session)

  def remaining(self, session: str) -> float:
    """Returns epsilon left to the session, and to the server if that is less.

    Epsilon does not simply add up: whether a release still fits is what
    :meth:`how_many_more` says.

    Args:
      session: Whose.

    Returns:
      Cap less what is spent, at the caps' deltas.

    Raises:
      ValueError: If the session has no name.
      TimeoutError: If other processes kept the file.
    """
    _session_given(session)
    with self._ledger.transaction() as transaction:
      return min(
        self._epsilon_cap(scope) - self._spent(transaction, scope, session)
        for scope in self._scopes
      )

  def how_many_more(
    self, event: dp_accounting.DpEvent, session: str
  ) -> int | float:
    """Returns how many times :meth:`spend` would accept ``event`` now.

    Args:
      event: As for :meth:`spend`.
      session: As for :meth:`spend`.

    Returns:
      A count, ``inf`` for what costs nothing.

    Raises:
      ValueError: As :meth:`spend`.
      TimeoutError: If other processes kept the file.
    """
    _session_given(session)
    _events.require_event(event)
    with self._ledger.transaction() as transaction:
      found: int | float = math.inf
      for scope in self._scopes:
        account = self._account(transaction, scope, session, event)
        rule = self._rules[scope, account.rule]
        found = min(found, _rules.largest_count(rule, account.totals, event))
    return found

  def reset(self, session: str) -> None:
    """Gives the session a fresh budget, and leaves a row that says so.

    For data that has been replaced: about the same data, the answers given
    before and those to come are together less private than the cap says. The
    server's account keeps what was spent.

    Args:
      session: Whose.

    Raises:
      ValueError: If the session has no name.
      TimeoutError: If other processes kept the file.
    """
    _session_given(session)
    with self._ledger.transaction() as transaction:
      transaction.remove('session', session)
      transaction.append(session, None, 0)

  def export(self) -> dict[str, Any]:
    """Returns settings, accounts and ledger in types that JSON knows.

    Returns:
      'settings' as given; 'server' with 'spent' and 'remaining', or None;
      'sessions' with the same for each; 'ledger', a list of 'id', 'session',
      'event' (None for a reset) and 'count' in the order of spending.

    Raises:
      TimeoutError: If other processes kept the file.
    """
    with self._ledger.transaction() as transaction:

      def figures(scope: str, name: str) -> dict[str, float]:
        spent = self._spent(transaction, scope, name)
        return {'spent': spent, 'remaining': self._epsilon_cap(scope) - spent}

      return {
        'settings': json.loads(json.dumps(self._settings)),
        'server': figures(*_SERVER) if 'server' in self._scopes else None,
        'sessions': {
          name: figures('session', name) for name in transaction.sessions()
        },
        'ledger': transaction.rows(),
      }

  def _account(
    self,
    transaction: Transaction,
    scope: str,
    session: str,
    event: dp_accounting.DpEvent,
  ) -> Account:
    """Returns the account, or the one that ``event`` would open."""
    account = transaction.account(*_key(scope, session))
    if account is not None:
      return account
    name = self._composition
    if name == 'filter':
      gaussian = all(
        isinstance(leaf, dp_accounting.GaussianDpEvent)
        for leaf, _ in _events.leaves(event)
      )
      name = 'gaussian' if gaussian else 'renyi'
    return Account(name, self._rules[scope, name].zero)

  def _spent(self, transaction: Transaction, scope: str, session: str) -> float:
    account = transaction.account(*_key(scope, session))
    if account is None:
      return 0.0
    return self._rules[scope, account.rule].spent(account.totals)

  def _epsilon_cap(self, scope: str) -> float:
    return next(r.epsilon for (s, _), r in self._rules.items() if s == scope)


def _key(scope: str, session: str) -> tuple[str, str]:
  return _SERVER if scope == 'server' else (scope, session)


def _session_given(session: object) -> None:
  if not isinstance(session, str) or not session:
    raise ValueError(
      f'Expected session to be a name, a str that is not empty, got {session=}.'
    )
