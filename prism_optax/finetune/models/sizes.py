"""Numbers in a ``config.json``."""

import math
from typing import Any


def positive(stored, name, where, types=(int,), default=None) -> Any:
  """The entry of a name, or its default.

  Args:
    stored: The entries.
    name: Of one.
    where: The file, for the message.
    types: Which it may be of.
    default: What it is where it is missing.

  Raises:
    ValueError: If it is no positive number of these types.
  """
  value: Any = stored.get(name)
  value = default if value is None else value
  fits = isinstance(value, types) and not isinstance(value, bool)
  if not fits or not 0 < value < math.inf:
    raise ValueError(
      f'{where}: expected {name} to be a positive number, got {value!r}.'
    )
  return value
