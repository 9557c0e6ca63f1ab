"""Numbers in a ``config.json``."""

import math
from collections.abc import Mapping
from typing import Any


def positive(
  stored: Mapping[str, Any],
  name: str,
  where: str,
  types: tuple[type, ...] = (int,),
  default: float | None = None,
) -> Any:
  """The entry of a name.

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
