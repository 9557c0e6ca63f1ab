"""Privacy filters: how the costs of releases add up and fill a budget.

Every filter turns a release into a vector of costs that simply add up, so an
account is one such vector and a budget is a condition on it. The condition
stays valid when each release (what it is, and whether there is one at all) is
chosen after seeing the answers so far. What an accountant computes for a
composition that was fixed beforehand does not.
"""

import abc
import dataclasses
import functools
import math
from collections.abc import Mapping

import dp_accounting
from dp_accounting import NeighboringRelation, rdp

from prism_optax import _validate
from prism_optax.accounting import _dpsgd, _events, _gaussian

Costs = tuple[float, ...]

# Sums of floats: a budget that is met exactly must not fail in the last digit.
_ROUNDING = 1e-9


@dataclasses.dataclass
class Filter(abc.ABC):
  """One way to account for a cap of (epsilon, delta).

  Attributes:
    epsilon: The cap.
    delta: Delta at which costs are turned into epsilon.
    relation: Relation under which events are read.
    zero: The costs of an account in which nothing was spent.
  """

  epsilon: float
  delta: float
  relation: NeighboringRelation
  zero: Costs = dataclasses.field(init=False)

  @abc.abstractmethod
  def _costs(self, event: dp_accounting.DpEvent) -> Costs:
    """Returns what one release adds; infinite where nothing protects."""

  @abc.abstractmethod
  def _epsilon(self, total: Costs) -> float:
    """Returns epsilon of these costs at the cap's delta."""

  def costs(self, event: dp_accounting.DpEvent, count: int) -> Costs:
    """Returns what ``count`` releases add; raises if it would be a refund."""
    costs = tuple(count * cost for cost in self._costs(event))
    # NaN fails the comparison, too.
    if not all(cost >= 0 for cost in costs):
      raise ValueError(
        f'Expected an event whose parameters and counts are not negative, got'
        f' {event=}.'
      )
    return costs

  def spent(self, total: Costs) -> float:
    """Returns epsilon of these costs, the cap if only rounding exceeds it."""
    spent = self._epsilon(total)
    within = self.epsilon < spent <= self.epsilon * (1 + _ROUNDING)
    return self.epsilon if within else spent

  def fits(self, total: Costs) -> bool:
    """Returns whether releases of these costs together stay within the cap."""
    return self.spent(total) <= self.epsilon

  def largest_count(
    self, totals: Costs, event: dp_accounting.DpEvent
  ) -> int | float:
    """Returns how many releases still fit, by doubling and halving."""
    if not any(self.costs(event, 1)):
      return math.inf

    def fits(count: int) -> bool:
      return self.fits(add(totals, self.costs(event, count)))

    low, high = 0, 1
    while fits(high):
      low, high = high, 2 * high
    while high - low > 1:
      middle = (low + high) // 2
      low, high = (middle, high) if fits(middle) else (low, middle)
    return low


class GaussianFilter(Filter):
  """The exact filter for Gaussian releases: their mu^2 add up.

  That the sum is a filter is shown by Smith and Thakurta, arXiv:2210.17520.
  A release with a pure epsilon (Laplace, randomised response) is no easier to
  tell from its neighbour than a Gaussian one of ``mu = 2 Phi^-1(p)``, ``p =
  exp(epsilon) / (1 + exp(epsilon))``: its trade-off curve consists of two
  chords of the Gaussian's convex one, which meet at the point (1 - p, 1 - p)
  (Dong, Roth and Su, arXiv:1905.02383).
  """

  zero: Costs = (0.0,)

  def _costs(self, event: dp_accounting.DpEvent) -> Costs:
    leaves = _events.leaves(event)
    return (sum(n * self._squared_mu(leaf) for leaf, n in leaves),)

  def _squared_mu(self, event: dp_accounting.DpEvent) -> float:
    """Returns mu^2 of a single release."""
    if isinstance(event, dp_accounting.NonPrivateDpEvent):
      return math.inf
    if isinstance(event, dp_accounting.GaussianDpEvent):
      sigma = _events.with_relation(event, self.relation).noise_multiplier
      _validate.known_non_negative('noise_multiplier', sigma)
      return 1 / sigma / sigma if sigma else math.inf
    pure = _events.pure_epsilon(event, self.relation)
    if pure is None:
      raise ValueError(
        f'This account began with Gaussian releases, got {event=} under'
        f' {self.relation}. What has neither Gaussian noise nor an epsilon'
        " with delta 0 needs an account with composition='renyi'."
      )
    return _gaussian.squared_mu_of_pure(pure)

  def _epsilon(self, total: Costs) -> float:
    return _gaussian.gaussian_epsilon(math.sqrt(total[0]), self.delta)


@dataclasses.dataclass
class RenyiFilter(Filter):
  """A filter for any mix of releases that the RDP accountant knows.

  For one order fixed beforehand, Renyi divergences of adaptively chosen
  releases add up and may be stopped at a budget (Feldman and Zrnic,
  arXiv:2008.11193, Theorem 4.3; Lecuyer, arXiv:2103.01379). Here some orders
  share delta equally: as long as any one of them is within its own budget,
  every answer has come out of a process that this order alone would have
  allowed, and the orders' deltas add up to the whole. Choosing the best order
  afterwards, with all of delta, would not be a filter.
  """

  # Around the best order of a Gaussian composition that fills the budget.
  # Subsampled releases do best at lower orders, rare ones at higher ones.
  _FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)

  def __post_init__(self) -> None:
    self.delta = self.delta / len(self._FACTORS)
    log = math.log(1 / self.delta)
    # epsilon = rho + 2 sqrt(rho log(1/delta)) at the order 1 + sqrt(log/rho).
    root = math.sqrt(log + self.epsilon) - math.sqrt(log)
    best = math.sqrt(log) / root
    orders = [1 + max(best * factor, 0.05) for factor in self._FACTORS]
    # Sampled releases cost a finite sum at whole orders, a series elsewhere.
    self._orders = tuple(
      float(f'{a:.4g}') if a < 2 else float(round(a)) for a in orders
    )
    self.zero = (0.0,) * len(self._orders)
    self._known: dict[str, Costs] = {}

  def _costs(self, event: dp_accounting.DpEvent) -> Costs:
    # Sampled releases take tens of milliseconds, while others wait.
    name = _events.to_json(event)
    if name not in self._known:
      if len(self._known) >= 1024:
        self._known.clear()
      self._known[name] = self._costs_of_one(event)
    return self._known[name]

  def _costs_of_one(self, event: dp_accounting.DpEvent) -> Costs:
    if _events.has_no_noise(event):
      return (math.inf,) * len(self._orders)
    event = _events.with_relation(event, self.relation)
    accountant = rdp.RdpAccountant(self._orders, self.relation)
    try:
      accountant.compose(event)
    except dp_accounting.UnsupportedEventError as error:
      raise ValueError(
        f'There is no Renyi analysis of this event under {self.relation}:'
        f' {error}'
      ) from error
    return tuple(float(cost) for cost in accountant.rdp)

  def _epsilon(self, total: Costs) -> float:
    if not any(total):
      return 0.0
    return float(rdp.compute_epsilon(self._orders, total, self.delta)[0])


@dataclasses.dataclass
class DeclaredFilter(Filter):
  """Tight accounting of releases that were all declared beforehand.

  Loss distributions have no filter for mechanisms that are chosen adaptively.
  A fixed multiset of them is another matter: in whatever order they are asked
  for, and whichever are left out, what comes out can be computed from the
  whole composition, which the cap must hold.

  Attributes:
    declared: How often each event may happen.
  """

  declared: Mapping[dp_accounting.DpEvent, int]

  def __post_init__(self) -> None:
    if not self.declared:
      raise ValueError('Expected declared to name an event, got declared={}.')
    for event, count in self.declared.items():
      _events.require_event(event)
      _validate.integer('declared', count, 1)
    self.declared = dict(self.declared)
    self.zero = (0.0,) * len(self.declared)
    # A composition takes a second; the same one is asked for again and again.
    self._epsilon_of = functools.lru_cache(maxsize=64)(self._compose)
    whole = self.spent(tuple(map(float, self.declared.values())))
    if whole > self.epsilon:
      raise ValueError(
        f'The declared releases have epsilon {whole:.4f} together, more than'
        f' epsilon={self.epsilon!r}.'
      )

  def _costs(self, event: dp_accounting.DpEvent) -> Costs:
    asked = dict.fromkeys(map(_events.to_json, self.declared), 0)
    whole = _events.to_json(event) in asked
    leaves = [(event, 1)] if whole else _events.leaves(event)
    for leaf, number in leaves:
      name = _events.to_json(leaf)
      if name not in asked:
        raise ValueError(
          f"composition='pld' knows the declared releases only, got {event=}."
        )
      asked[name] += number
    return tuple(map(float, asked.values()))

  def fits(self, total: Costs) -> bool:
    counts = self.declared.values()
    return all(n <= cap for n, cap in zip(total, counts, strict=True))

  def _epsilon(self, total: Costs) -> float:
    return self._epsilon_of(total)

  def _compose(self, total: Costs) -> float:
    released = [
      dp_accounting.SelfComposedDpEvent(event, int(number))
      for event, number in zip(self.declared, total, strict=True)
      if number
    ]
    return _dpsgd.epsilon(
      dp_accounting.ComposedDpEvent(released),
      self.delta,
      neighboring_relation=self.relation,
    )


def add(totals: Costs, costs: Costs) -> Costs:
  """Returns the totals of an account after further costs."""
  return tuple(t + c for t, c in zip(totals, costs, strict=True))


def filters_for(
  composition: str,
  cap: tuple[float, float],
  relation: NeighboringRelation,
  declared: Mapping[dp_accounting.DpEvent, int] | None,
) -> dict[str, Filter]:
  """Returns the filters by which an account under this cap may be counted.

  Raises:
    ValueError: If an option is missing, does not belong to the composition, or
      is out of its range.
  """
  _validate.one_of(
    'composition', composition, ('filter', 'gaussian', 'renyi', 'pld')
  )
  _validate.neighboring_relation(relation)
  if (declared is not None) != (composition == 'pld'):
    raise ValueError(
      "Expected declared with composition='pld' and only there, got"
      f' {declared=} with {composition=}.'
    )
  if declared is not None:
    return {'pld': DeclaredFilter(*cap, relation, declared)}
  makers: dict[str, type[Filter]] = {
    'gaussian': GaussianFilter,
    'renyi': RenyiFilter,
  }
  names = makers if composition == 'filter' else (composition,)
  return {name: makers[name](*cap, relation) for name in names}
