"""Privacy filters: how the costs of releases add up and fill a budget.

Every filter turns a release into a vector of costs that simply add up, so an
account is one such vector and a budget is a condition on it. The condition
stays valid when each release (what it is, and whether there is one at all) is
chosen after seeing the answers so far. What an accountant computes for a
composition that was fixed beforehand does not.
"""

import abc
import dataclasses
import math

import dp_accounting
from dp_accounting import NeighboringRelation, rdp

from prism_optax import _validate
from prism_optax.accounting import _events, _gaussian

Costs = tuple[float, ...]

# Of the rules by which costs are counted: one more wherever the same releases
# would have other costs. A ledger keeps the version under which it was begun.
VERSION = 1

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
    """Returns what one noisy release adds when a record is added or removed."""

  @abc.abstractmethod
  def _epsilon(self, total: Costs) -> float:
    """Returns epsilon of these costs at the cap's delta."""

  def costs(self, event: dp_accounting.DpEvent) -> Costs:
    """Returns what a release adds; raises if it would be a refund."""
    if _events.has_no_noise(event):
      return (math.inf,) * len(self.zero)
    costs = self._costs(_events.with_relation(event, self.relation))
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

  def largest_count(self, totals: Costs, costs: Costs) -> int | float:
    """Returns how many such releases still fit, by doubling and halving."""
    if costs == self.zero:
      return math.inf

    def fits(count: int) -> bool:
      return self.spent(add(totals, costs, count)) <= self.epsilon

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
  """

  zero: Costs = (0.0,)

  def _costs(self, event: dp_accounting.DpEvent) -> Costs:
    squared_mu = 0.0
    for leaf, count in _events.leaves(event):
      if not isinstance(leaf, dp_accounting.GaussianDpEvent):
        raise ValueError(
          f'This account began with Gaussian releases, got {event=}. Releases'
          " of several kinds need an account with composition='renyi'."
        )
      # As a float: a narrow type would round what is added up.
      sigma = _validate.known_non_negative(
        'noise_multiplier', leaf.noise_multiplier
      )
      squared_mu += count * (1 / sigma / sigma)
    return (squared_mu,)

  def _epsilon(self, total: Costs) -> float:
    return _gaussian.gaussian_epsilon(math.sqrt(total[0]), self.delta)


@dataclasses.dataclass
class RenyiFilter(Filter):
  """A filter for any mix of releases that the RDP accountant supports.

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
      float(f'{a:.4g}') if a < 2 else round(a) for a in orders
    )
    self.zero = (0.0,) * len(self._orders)

  def _costs(self, event: dp_accounting.DpEvent) -> Costs:
    accountant = rdp.RdpAccountant(self._orders, self.relation)
    try:
      accountant.compose(event)
    except dp_accounting.UnsupportedEventError as error:
      raise ValueError(
        f'There is no Renyi analysis of this event under {self.relation}:'
        f' {error}'
      ) from error
    return tuple(map(float, accountant.rdp))

  def _epsilon(self, total: Costs) -> float:
    if total == self.zero:
      return 0.0
    return float(rdp.compute_epsilon(self._orders, total, self.delta)[0])


def add(totals: Costs, costs: Costs, count: int) -> Costs:
  """Returns the totals of an account after ``count`` further releases."""
  return tuple(t + count * c for t, c in zip(totals, costs, strict=True))
