"""The advanced composition theorem, to compare the filters with."""

import math
from collections.abc import Sequence

import dp_accounting
import numpy as np
from dp_accounting import NeighboringRelation

from prism_optax.accounting import (
  _checks,
  _composition,
  _dpsgd,
  _events,
  _gaussian,
)


def advanced_composition(
  epsilons: Sequence[float], delta_slack: float
) -> float:
  """Returns epsilon of several releases by the advanced composition theorem.

  For comparison: the filters of :class:`PrivacyBudget` charge less. The slack
  is spent in addition to the releases' own deltas. It holds for the
  neighbouring relation that the epsilons are meant under.

  Args:
    epsilons: Of the releases, each at a delta of its own.
    delta_slack: In (0, 1).

  Returns:
    ``sqrt(2 log(1/slack) sum e^2) + sum e (exp(e) - 1)``; 0.0 for no release.

  Raises:
    ValueError: If a number is negative or NaN, or the slack not in (0, 1).

  References:
    Dwork and Roth, The Algorithmic Foundations of Differential Privacy,
    Theorem 3.20.

  Examples:
    >>> from prism_optax import accounting
    >>> round(accounting.advanced_composition([1.0] * 10, 1e-5), 2)
    32.36
  """
  _checks.between_zero_and_one('delta_slack', delta_slack)
  for epsilon in epsilons:
    _checks.not_negative('epsilons', epsilon)
  e = np.asarray(epsilons, np.float64)
  root = math.sqrt(2 * math.log(1 / delta_slack) * float(e @ e))
  return root + float(e @ np.expm1(e))


class AdvancedRule:
  """The theorem as a rule for :class:`PrivacyBudget`.

  Each release gets ``release_delta`` and its own epsilon at that; half of the
  budget's delta pays for those, the other half is the theorem's slack.

  References:
    Dwork and Roth, The Algorithmic Foundations of Differential Privacy,
    Theorem 3.20; that it may be used as a filter: Whitehouse et al., Fully
    Adaptive Composition in Differential Privacy, arXiv:2203.05481 (with a
    smaller second term).
  """

  zero: _composition.Costs = (0.0, 0.0, 0.0)

  def __init__(
    self,
    epsilon: float,
    delta: float,
    relation: NeighboringRelation,
    release_delta: float,
  ):
    self.epsilon, self._delta, self._relation = epsilon, delta, relation
    self._release_delta = release_delta

  def costs(
    self, event: dp_accounting.DpEvent, count: int
  ) -> _composition.Costs:
    squares = linear = deltas = 0.0
    for leaf, number in _events.leaves(event, count):
      epsilon = self._release_epsilon(leaf)
      # Beyond this exp overflows; nobody's budget is as large.
      if epsilon > 500:
        return (math.inf, math.inf, math.inf)
      squares += number * epsilon**2
      linear += number * epsilon * math.expm1(epsilon)
      deltas += number * self._release_delta
    return squares, linear, deltas

  def _release_epsilon(self, event: dp_accounting.DpEvent) -> float:
    pure = _events.pure_epsilon(event, self._relation)
    if pure is not None:
      return pure
    if isinstance(event, dp_accounting.GaussianDpEvent):
      mu2 = _composition.GaussianRule(1.0, 0.5, self._relation).costs(event, 1)[
        0
      ]
      return _gaussian.gaussian_epsilon(math.sqrt(mu2), self._release_delta)
    return _dpsgd.epsilon(
      event, self._release_delta, neighboring_relation=self._relation
    )

  def fits(self, total: _composition.Costs) -> bool:
    # `spent` is infinite where the releases' deltas have used up their half.
    return self.spent(total) <= self.epsilon

  def spent(self, total: _composition.Costs) -> float:
    squares, linear, deltas = total
    slack = self._delta / 2
    if deltas > slack * (1 + _composition.ROUNDING) or math.isinf(squares):
      return math.inf
    spent = math.sqrt(2 * math.log(1 / slack) * squares) + linear
    return _composition.rounded(spent, self.epsilon)
