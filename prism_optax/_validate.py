"""Static checks of arguments: what Python can see fails while building.

Numbers that JAX traces (schedules, injected hyper-parameters) are let through:
their values are not known here, and an error that depended on them would not
be one that could be raised under ``jit``.
"""

import math
import numbers
from typing import Any


def _is_python_number(value: Any) -> bool:
  """Whether ``value`` is a number whose value is known while building."""
  return isinstance(value, numbers.Real) and not isinstance(value, bool)


def real(name: str, value: Any) -> None:
  """Raises ``ValueError`` unless ``value`` is traced or a finite number."""
  if isinstance(value, bool | str | None.__class__):
    raise ValueError(f'Expected {name} to be a number, got {name}={value!r}.')
  if _is_python_number(value) and not math.isfinite(value):
    raise ValueError(f'Expected {name} to be finite, got {name}={value!r}.')


def non_negative(name: str, value: Any) -> None:
  """Raises ``ValueError`` unless ``value`` is traced or a number >= 0."""
  real(name, value)
  if _is_python_number(value) and value < 0:
    raise ValueError(f'Expected {name} >= 0, got {name}={value!r}.')


def positive(name: str, value: Any) -> None:
  """Raises ``ValueError`` unless ``value`` is traced or a number > 0."""
  real(name, value)
  if _is_python_number(value) and value <= 0:
    raise ValueError(f'Expected {name} > 0, got {name}={value!r}.')


def at_least(name: str, value: Any, bound: float) -> None:
  """Raises ``ValueError`` unless ``value`` is traced or a number >= bound."""
  real(name, value)
  if _is_python_number(value) and value < bound:
    raise ValueError(f'Expected {name} >= {bound}, got {name}={value!r}.')


def decay_rate(name: str, value: Any) -> None:
  """Raises ``ValueError`` unless ``value`` is traced or in [0, 1)."""
  real(name, value)
  if _is_python_number(value) and not 0 <= value < 1:
    raise ValueError(f'Expected 0 <= {name} < 1, got {name}={value!r}.')


def probability(name: str, value: Any) -> None:
  """Raises ``ValueError`` unless ``value`` is traced or in [0, 1]."""
  real(name, value)
  if _is_python_number(value) and not 0 <= value <= 1:
    raise ValueError(f'Expected 0 <= {name} <= 1, got {name}={value!r}.')


def one_of(name: str, value: Any, choices: tuple[str, ...]) -> None:
  """Raises ``ValueError`` unless ``value`` is one of ``choices``."""
  if value not in choices:
    raise ValueError(
      f'Expected {name} to be one of {choices}, got {name}={value!r}.'
    )


def integer(name: str, value: Any, minimum: int) -> None:
  """Raises ``ValueError`` unless ``value`` is a Python int >= minimum."""
  if (
    not isinstance(value, numbers.Integral)
    or isinstance(value, bool)
    or value < minimum
  ):
    raise ValueError(
      f'Expected {name} to be an integer >= {minimum}, got {name}={value!r}.'
    )


def params_given(transform: str, params: Any) -> None:
  """Raises ``ValueError`` if ``update`` was called without parameters."""
  if params is None:
    raise ValueError(
      f'{transform}: `update` needs `params`, got params=None. Call'
      ' `update(updates, state, params)`.'
    )
