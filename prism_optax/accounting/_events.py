"""What the accountants need to know about dp-accounting's events."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import dp_accounting
from dp_accounting import NeighboringRelation, dp_event

from prism_optax.accounting import _checks


def require_event(event: object) -> None:
  """Raises ``ValueError`` unless ``event`` is a dp-accounting event."""
  if not isinstance(event, dp_accounting.DpEvent):
    raise ValueError(f'Expected event to be a DpEvent, got {event=}.')


def with_doubled_sensitivity(
  event: dp_accounting.DpEvent,
) -> dp_accounting.DpEvent:
  """Doubles what a record adds to a sum, whatever the release is in."""
  match event:
    case dp_accounting.GaussianDpEvent(noise_multiplier=sigma):
      return dp_accounting.GaussianDpEvent(sigma / 2)
    case dp_accounting.LaplaceDpEvent(noise_multiplier=sigma):
      return dp_accounting.LaplaceDpEvent(sigma / 2)
    case dp_event.DiscreteLaplaceDpEvent():
      return dp_event.DiscreteLaplaceDpEvent(
        event.noise_parameter, 2 * event.sensitivity
      )
    case dp_accounting.SelfComposedDpEvent(event=inner, count=count):
      return dp_accounting.SelfComposedDpEvent(
        with_doubled_sensitivity(inner), count
      )
    case dp_accounting.ComposedDpEvent(events=events):
      return dp_accounting.ComposedDpEvent(
        [with_doubled_sensitivity(inner) for inner in events]
      )
    case dp_event.SampledWithoutReplacementDpEvent():
      return dp_event.SampledWithoutReplacementDpEvent(
        event.source_dataset_size,
        event.sample_size,
        with_doubled_sensitivity(event.event),
      )
    case dp_event.RepeatAndSelectDpEvent():
      return dp_event.RepeatAndSelectDpEvent(
        with_doubled_sensitivity(event.event), event.mean, event.shape
      )
  # Whatever remains either states its own guarantee (zCDP, randomised response)
  # or is refused by the accountant under this relation.
  return event


def leaves(
  event: dp_accounting.DpEvent, count: int = 1
) -> list[tuple[dp_accounting.DpEvent, int]]:
  """Returns the single releases of a composition, with their counts."""
  if isinstance(event, dp_accounting.NoOpDpEvent):
    return []
  if isinstance(event, dp_accounting.SelfComposedDpEvent):
    return leaves(event.event, count * event.count)
  if isinstance(event, dp_accounting.ComposedDpEvent):
    return [leaf for inner in event.events for leaf in leaves(inner, count)]
  return [(event, count)]


def pure_epsilon(
  event: dp_accounting.DpEvent, relation: NeighboringRelation
) -> float | None:
  """Returns epsilon of a release with delta 0, or None if it is no such."""
  epsilon = _pure_epsilon(event, relation)
  if epsilon is not None:
    _checks.not_negative('epsilon of the event', epsilon)
  return epsilon


def _pure_epsilon(
  event: dp_accounting.DpEvent, relation: NeighboringRelation
) -> float | None:
  if relation is NeighboringRelation.REPLACE_ONE:
    event = with_doubled_sensitivity(event)
  match event:
    case dp_accounting.LaplaceDpEvent(noise_multiplier=scale):
      return 1 / scale if scale else math.inf
    case dp_event.DiscreteLaplaceDpEvent():
      return event.noise_parameter * event.sensitivity
    case dp_event.RandomizedResponseDpEvent():
      if relation is NeighboringRelation.ADD_OR_REMOVE_ONE:
        return None  # It hides what a record answers, not that there is one.
      if not event.noise_parameter:
        return math.inf
      other = event.noise_parameter / event.num_buckets
      return math.log((1 - event.noise_parameter + other) / other)
  return None


def to_json(event: dp_accounting.DpEvent) -> str:
  """Returns one line that names the event and every number in it."""
  return json.dumps(_plain(event), sort_keys=True)


def _plain(value: Any) -> Any:
  if isinstance(value, dp_accounting.DpEvent):
    fields = value.to_named_tuple()._fields
    return {
      'event': type(value).__name__,
      **{
        name: _plain(getattr(value, name))
        for name in fields
        if name not in ('module_name', 'class_name')
      },
    }
  if isinstance(value, Mapping):
    return {str(key): _plain(inner) for key, inner in value.items()}
  if isinstance(value, Sequence) and not isinstance(value, str):
    return [_plain(inner) for inner in value]
  # NumPy's numbers are no JSON; an integer stays one.
  return value.item() if hasattr(value, 'item') else value
