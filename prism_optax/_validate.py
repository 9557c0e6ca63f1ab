"""Checks of arguments: what Python can see fails while building.

Most checks let through what JAX traces (schedules, injected hyper-parameters):
the value is not known while building, and code under ``jit`` cannot raise an
error that depends on it. Accountants compute with Python floats, so the checks
that return a float refuse whatever is not a number.
"""

import math
import numbers
from collections.abc import Callable, Sequence

from dp_accounting import NeighboringRelation


def _error(expected: str, name: str, value: object) -> ValueError:
  return ValueError(f'Expected {expected}, got {name}={value!r}.')


def _require(
  name: str, value: object, holds: Callable[[float], bool], expected: str
) -> None:
  """Raises ``ValueError`` unless ``value`` is traced or a number that holds."""
  if value is None or isinstance(value, bool | str):
    raise _error(f'{name} to be a number', name, value)
  try:
    number = float(value)  # type: ignore[arg-type]
  except (TypeError, ValueError):  # Traced, a schedule, one for each step.
    return
  if not math.isfinite(number):
    raise _error(f'{name} to be finite', name, value)
  if not holds(number):
    raise _error(expected, name, value)


def non_negative(name: str, value: object) -> None:
  """Raises ``ValueError`` unless ``value`` is traced or a number >= 0."""
  at_least(name, value, 0)


def positive(name: str, value: object) -> None:
  """Raises ``ValueError`` unless ``value`` is traced or a number > 0."""
  _require(name, value, lambda x: x > 0, f'{name} > 0')


def at_least(name: str, value: object, bound: float) -> None:
  """Raises ``ValueError`` unless ``value`` is traced or a number >= bound."""
  _require(name, value, lambda x: x >= bound, f'{name} >= {bound}')


def decay_rate(name: str, value: object) -> None:
  """Raises ``ValueError`` unless ``value`` is traced or in [0, 1)."""
  _require(name, value, lambda x: 0 <= x < 1, f'0 <= {name} < 1')


def _known(
  name: str, value: object, holds: Callable[[float], bool], expected: str
) -> float:
  """Returns a number that holds as a float."""
  if not holds(found := known_number(name, value)):
    raise _error(expected, name, value)
  return found


def known_number(name: str, value: object) -> float:
  """Returns ``value`` as a float; a traced one raises ``ValueError``."""
  try:
    return float(value)  # type: ignore[arg-type]
  except (TypeError, ValueError) as error:
    raise _error(f'{name} to be a number', name, value) from error


def known_non_negative(name: str, value: object) -> float:
  """Returns a number >= 0 as a float; infinity is allowed."""
  return _known(name, value, lambda x: x >= 0, f'{name} >= 0')


def known_positive(name: str, value: object) -> float:
  """Returns a finite number > 0 as a float."""
  return _known(name, value, lambda x: 0 < x < math.inf, f'0 < {name} < inf')


def known_probability(name: str, value: object) -> float:
  """Returns a number in [0, 1] as a float."""
  return _known(name, value, lambda x: 0 <= x <= 1, f'0 <= {name} <= 1')


def known_open_probability(name: str, value: object) -> float:
  """Returns a number in (0, 1) as a float: neither certain nor impossible."""
  return _known(name, value, lambda x: 0 < x < 1, f'0 < {name} < 1')


def one_of(name: str, value: object, choices: Sequence[str]) -> None:
  """Raises ``ValueError`` unless ``value`` is one of ``choices``."""
  if value not in choices:
    raise _error(f'{name} to be one of {choices}', name, value)


def integer(name: str, value: object, minimum: int) -> None:
  """Raises ``ValueError`` unless ``value`` is a Python int >= minimum."""
  whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
  if not whole or value < minimum:  # type: ignore[operator]
    raise _error(f'{name} to be an integer >= {minimum}', name, value)


def neighboring_relation(value: object) -> None:
  """Raises ``ValueError`` unless ``value`` is a neighbouring relation."""
  if not isinstance(value, NeighboringRelation):
    name = 'neighboring_relation'
    raise _error(
      f'{name} to be a dp_accounting.NeighboringRelation', name, value
    )


def params_given(transform: str, params: object) -> None:
  """Raises ``ValueError`` if ``update`` was called without parameters."""
  if params is None:
    raise ValueError(
      f'{transform}: `update` needs `params`, got params=None. Call'
      ' `update(updates, state, params)`.'
    )
