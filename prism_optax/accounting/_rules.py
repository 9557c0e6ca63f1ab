"""Which rules count for a budget, and what is asked of all of them."""

import math
from collections.abc import Mapping

import dp_accounting
from dp_accounting import NeighboringRelation

from prism_optax import _validate
from prism_optax.accounting import _advanced, _checks, _composition, _events

Costs = _composition.Costs

COMPOSITIONS = ('filter', 'gaussian', 'renyi', 'pld', 'advanced')


def cap(
  epsilon_name: str, epsilon: object, delta_name: str, delta: object
) -> tuple[float, float]:
  """Returns the numbers of a cap, or raises ``ValueError`` naming them."""
  found = _checks.number(epsilon_name, epsilon)
  _validate.positive(epsilon_name, found)
  return found, _checks.between_zero_and_one(delta_name, delta)


def rules_for(
  composition: str,
  cap: tuple[float, float],
  relation: NeighboringRelation,
  *,
  declared: Mapping[dp_accounting.DpEvent, int] | None,
  release_delta: float | None,
  server_epsilon: float | None,
) -> dict[str, _composition.Rule]:
  """Returns the rules that an account under this cap may be counted by.

  Raises:
    ValueError: If an option is missing, does not belong to the composition, or
      is out of its range.
  """
  _validate.one_of('composition', composition, COMPOSITIONS)
  _checks.relation_given(relation)
  _belongs('declared', declared, composition, 'pld')
  _belongs('release_delta', release_delta, composition, 'advanced')
  if composition == 'pld':
    if server_epsilon is not None:
      raise ValueError(
        "composition='pld' declares the releases of one session and has no"
        f' cap for any number of them, got {server_epsilon=}.'
      )
    allowed = _counts(declared or {})
    return {'pld': _composition.DeclaredRule(*cap, relation, allowed)}
  if composition == 'advanced':
    each = _checks.between_zero_and_one('release_delta', release_delta)
    return {'advanced': _advanced.AdvancedRule(*cap, relation, each)}
  rules: dict[str, _composition.Rule] = {}
  if composition in ('filter', 'gaussian'):
    rules['gaussian'] = _composition.GaussianRule(*cap, relation)
  if composition in ('filter', 'renyi'):
    rules['renyi'] = _composition.RenyiRule(*cap, relation)
  return rules


def largest_count(
  rule: _composition.Rule,
  totals: Costs,
  event: dp_accounting.DpEvent,
) -> int | float:
  """Returns the largest count that fits, by doubling and halving."""
  cost = _costs(rule, event, 1)
  if not any(cost):
    return math.inf

  def fits(count: int) -> bool:
    return rule.fits(_sum(totals, tuple(count * c for c in cost)))

  low, high = 0, 1
  while fits(high):
    low, high = high, 2 * high
  while high - low > 1:
    middle = (low + high) // 2
    low, high = (middle, high) if fits(middle) else (low, middle)
  return low


def added(
  rule: _composition.Rule,
  totals: Costs,
  event: dp_accounting.DpEvent,
  count: int,
) -> Costs:
  """Returns the totals after ``count`` more releases."""
  return _sum(totals, _costs(rule, event, count))


def _costs(
  rule: _composition.Rule, event: dp_accounting.DpEvent, count: int
) -> Costs:
  """Returns the costs, which must not be a refund."""
  costs = rule.costs(event, count)
  # NaN fails the comparison, too.
  if not all(cost >= 0 for cost in costs):
    raise ValueError(
      f'Expected an event whose parameters and counts are not negative, got'
      f' {event=}.'
    )
  return costs


def _sum(totals: Costs, costs: Costs) -> Costs:
  return tuple(t + c for t, c in zip(totals, costs, strict=True))


def _belongs(name: str, value: object, composition: str, owner: str) -> None:
  if (value is not None) != (composition == owner):
    raise ValueError(
      f'Expected {name} with composition={owner!r} and only there, got'
      f' {name}={value!r} with {composition=}.'
    )


def _counts(
  declared: Mapping[dp_accounting.DpEvent, int],
) -> dict[dp_accounting.DpEvent, int]:
  if not declared:
    raise ValueError(f'Expected declared to name an event, got {declared=}.')
  for event, count in declared.items():
    _events.require_event(event)
    _validate.integer('declared', count, 1)
  return dict(declared)
