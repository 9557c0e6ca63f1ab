"""Checks of numbers that an accountant must know, not trace."""

import math

from dp_accounting import NeighboringRelation


def number(name: str, value: object) -> float:
  """Returns ``value`` as a float, or raises ``ValueError`` naming it."""
  try:
    return float(value)  # type: ignore[arg-type]
  except (TypeError, ValueError) as error:
    raise ValueError(
      f'Expected {name} to be a number, got {name}={value!r}.'
    ) from error


def not_negative(name: str, value: object) -> float:
  """Returns a number >= 0, infinity allowed."""
  found = number(name, value)
  if math.isnan(found) or found < 0:
    raise ValueError(f'Expected {name} >= 0, got {name}={value!r}.')
  return found


def between_zero_and_one(name: str, value: object) -> float:
  """Returns a number in (0, 1)."""
  found = number(name, value)
  if not 0 < found < 1:
    raise ValueError(f'Expected 0 < {name} < 1, got {name}={value!r}.')
  return found


def relation_given(value: object) -> None:
  """Raises ``ValueError`` unless ``value`` is a neighbouring relation."""
  if not isinstance(value, NeighboringRelation):
    raise ValueError(
      'Expected neighboring_relation to be a'
      ' dp_accounting.NeighboringRelation, got'
      f' neighboring_relation={value!r}.'
    )
