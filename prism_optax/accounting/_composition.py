"""How the costs of releases add up, and when they fill a budget.

Every rule turns a release into a vector of costs that simply add up, so that
an account is one such vector and a budget a condition on it. The rules are
privacy filters: the condition stays valid when each release (what it is, and
whether there is one at all) is chosen after seeing the answers so far. What an
accountant computes for a composition that was fixed beforehand does not.
"""

import functools
import math
from collections.abc import Mapping
from typing import Protocol

import dp_accounting
from dp_accounting import NeighboringRelation, rdp

from prism_optax.accounting import _checks, _dpsgd, _events, _gaussian

Costs = tuple[float, ...]

# Sums of floats: a budget that is met exactly must not fail in the last digit.
ROUNDING = 1e-9


class Rule(Protocol):
  """One way to account for a cap of (epsilon, delta)."""

  epsilon: float
  zero: Costs

  def costs(self, event: dp_accounting.DpEvent, count: int) -> Costs:
    """Returns what ``count`` releases add; infinite where nothing protects."""

  def fits(self, total: Costs) -> bool:
    """Whether releases of these costs together stay within the cap."""

  def spent(self, total: Costs) -> float:
    """Returns epsilon of these costs at the cap's delta."""


class GaussianRule:
  """Exact for Gaussian releases: their mu^2 add up.

  A release with a pure epsilon (Laplace, randomised response) is no easier to
  tell from its neighbour than a Gaussian one of ``mu = 2 Phi^-1(p)``, ``p =
  exp(epsilon) / (1 + exp(epsilon))``: its trade-off curve consists of two
  chords of the Gaussian's convex one, which meet at the point (1 - p, 1 - p).

  References:
    Dong, Roth and Su, Gaussian Differential Privacy, arXiv:1905.02383; Smith
    and Thakurta, Fully Adaptive Composition for Gaussian Differential Privacy,
    arXiv:2210.17520, for the filter.
  """

  zero: Costs = (0.0,)

  def __init__(
    self, epsilon: float, delta: float, relation: NeighboringRelation
  ):
    self.epsilon, self._delta, self._relation = epsilon, delta, relation

  def costs(self, event: dp_accounting.DpEvent, count: int) -> Costs:
    return (
      sum(n * self._squared_mu(e) for e, n in _events.leaves(event, count)),
    )

  def _squared_mu(self, event: dp_accounting.DpEvent) -> float:
    if isinstance(event, dp_accounting.NonPrivateDpEvent):
      return math.inf
    if isinstance(event, dp_accounting.GaussianDpEvent):
      if self._relation is NeighboringRelation.REPLACE_ONE:
        event = _events.with_doubled_sensitivity(event)
      sigma = event.noise_multiplier
      _checks.not_negative('noise_multiplier', sigma)
      return 1 / sigma / sigma if sigma else math.inf
    pure = _events.pure_epsilon(event, self._relation)
    if pure is None:
      raise ValueError(
        f'This account began with Gaussian releases, got {event=} under'
        f' {self._relation}. What has neither Gaussian noise nor an epsilon'
        " with delta 0 needs an account with composition='renyi'."
      )
    return _squared_mu_of_pure(pure)

  def fits(self, total: Costs) -> bool:
    return self.spent(total) <= self.epsilon

  def spent(self, total: Costs) -> float:
    spent = _gaussian.gaussian_epsilon(math.sqrt(total[0]), self._delta)
    return rounded(spent, self.epsilon)


def _squared_mu_of_pure(epsilon: float) -> float:
  """Returns mu^2 of the Gaussian release that covers a pure epsilon."""
  if epsilon > 700:  # exp overflows; no budget is as large.
    return math.inf
  # Phi(-mu/2) = 1 / (1 + exp(epsilon)), from below: more privacy lost, not
  # less.
  tail = 1 / (1 + math.exp(epsilon))
  low, high = 0.0, 2 * (epsilon + 2)
  for _ in range(100):
    middle = (low + high) / 2
    if 0.5 * math.erfc(middle / 2 / math.sqrt(2)) > tail:
      low = middle
    else:
      high = middle
  return high**2


class RenyiRule:
  """Any mix of releases that the RDP accountant knows.

  For one order fixed beforehand, Renyi divergences of adaptively chosen
  releases add up and may be stopped at a budget. Here some orders share delta
  equally: as long as any one of them is within its own budget, every answer
  has come out of a process that this order alone would have allowed, and the
  orders' deltas add up to the whole. Choosing the best order afterwards, with
  all of delta, would not be a filter.

  References:
    Feldman and Zrnic, Individual Privacy Accounting via a Renyi Filter,
    arXiv:2008.11193, Theorem 4.3; Lecuyer, Practical Privacy Filters and
    Odometers with Renyi Differential Privacy, arXiv:2103.01379.
  """

  # Around the best order of a Gaussian composition that fills the budget.
  # Subsampled releases do best at lower orders, rare ones at higher ones.
  _FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)

  def __init__(
    self, epsilon: float, delta: float, relation: NeighboringRelation
  ):
    self.epsilon, self._relation = epsilon, relation
    self._delta = delta / len(self._FACTORS)
    log = math.log(1 / self._delta)
    # epsilon = rho + 2 sqrt(rho log(1/delta)) at the order 1 + sqrt(log/rho).
    root = math.sqrt(log + epsilon) - math.sqrt(log)
    best = math.sqrt(log) / root
    orders = [1 + max(best * factor, 0.05) for factor in self._FACTORS]
    # Sampled releases cost a finite sum at whole orders, a series elsewhere.
    self._orders = tuple(
      float(f'{a:.4g}') if a < 2 else float(round(a)) for a in orders
    )
    self.zero: Costs = (0.0,) * len(self._orders)
    self._known: dict[str, Costs] = {}

  def costs(self, event: dp_accounting.DpEvent, count: int) -> Costs:
    # Sampled releases take tens of milliseconds, while others wait.
    name = _events.to_json(event)
    if name not in self._known:
      if len(self._known) >= 1024:
        self._known.clear()
      self._known[name] = self._cost_of_one(event)
    return tuple(count * cost for cost in self._known[name])

  def _cost_of_one(self, event: dp_accounting.DpEvent) -> Costs:
    if any(_is_unprotected(e) for e, _ in _events.leaves(event)):
      return (math.inf,) * len(self._orders)
    if self._relation is NeighboringRelation.REPLACE_ONE:
      event = _events.with_doubled_sensitivity(event)
    accountant = rdp.RdpAccountant(self._orders, self._relation)
    try:
      accountant.compose(event)
    except dp_accounting.UnsupportedEventError as error:
      raise ValueError(
        f'There is no Renyi analysis of this event under {self._relation}:'
        f' {error}'
      ) from error
    return tuple(float(cost) for cost in accountant.rdp)

  def fits(self, total: Costs) -> bool:
    return self.spent(total) <= self.epsilon

  def spent(self, total: Costs) -> float:
    if not any(total):
      return 0.0
    spent, _ = rdp.compute_epsilon(self._orders, total, self._delta)
    return rounded(float(spent), self.epsilon)


class DeclaredRule:
  """Tight accounting of releases that were all declared beforehand.

  Loss distributions have no filter for mechanisms that are chosen adaptively.
  A fixed multiset of them is another matter: in whatever order they are asked
  for, and whichever are left out, what comes out can be computed from the
  whole composition, which the cap must hold.
  """

  def __init__(
    self,
    epsilon: float,
    delta: float,
    relation: NeighboringRelation,
    declared: Mapping[dp_accounting.DpEvent, int],
  ):
    self.epsilon, self._delta, self._relation = epsilon, delta, relation
    self._events = tuple(declared)
    self._names = tuple(map(_events.to_json, self._events))
    self._counts = tuple(declared.values())
    self.zero: Costs = (0.0,) * len(self._counts)
    # A composition takes a second; the same one is asked for again and again.
    self._epsilon_of = functools.lru_cache(maxsize=64)(self._compose)
    whole = self.spent(tuple(map(float, self._counts)))
    if whole > epsilon:
      raise ValueError(
        f'The declared releases have epsilon {whole:.4f} together, more than'
        f' {epsilon=}.'
      )

  def costs(self, event: dp_accounting.DpEvent, count: int) -> Costs:
    asked = dict.fromkeys(self._names, 0)
    whole = _events.to_json(event)
    for leaf, number in (
      [(event, count)] if whole in asked else _events.leaves(event, count)
    ):
      name = _events.to_json(leaf)
      if name not in asked:
        raise ValueError(
          f"composition='pld' knows the declared releases only, got {event=}."
        )
      asked[name] += number
    return tuple(map(float, asked.values()))

  def fits(self, total: Costs) -> bool:
    return all(n <= cap for n, cap in zip(total, self._counts, strict=True))

  def spent(self, total: Costs) -> float:
    return rounded(self._epsilon_of(total), self.epsilon)

  def _compose(self, total: Costs) -> float:
    released = [
      dp_accounting.SelfComposedDpEvent(event, int(number))
      for event, number in zip(self._events, total, strict=True)
      if number
    ]
    return _dpsgd.epsilon(
      dp_accounting.ComposedDpEvent(released),
      self._delta,
      neighboring_relation=self._relation,
    )


def _is_unprotected(event: dp_accounting.DpEvent) -> bool:
  if isinstance(event, dp_accounting.PoissonSampledDpEvent):
    return any(_is_unprotected(e) for e, _ in _events.leaves(event.event))
  return isinstance(event, dp_accounting.NonPrivateDpEvent) or (
    getattr(event, 'noise_multiplier', 1.0) == 0
  )


def rounded(spent: float, cap: float) -> float:
  """Takes what exceeds the cap by rounding alone for the cap."""
  return cap if cap < spent <= cap * (1 + ROUNDING) else spent
