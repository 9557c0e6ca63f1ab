"""What the accountants need to know about dp-accounting's events."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence

import dp_accounting
from dp_accounting import NeighboringRelation, dp_event, rdp

from prism_optax import _validate

# Any Renyi orders give an upper bound of epsilon: a few are enough to judge a
# size. Integers, because fractional orders are slow and warn where their series
# is cut off.
_INTEGER_ORDERS = (
  *(2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32),
  *(48, 64, 96, 128, 256, 512, 1024),
)

# dp-accounting's own default, so that our figures are the ones it gives.
_INTERVAL = 1e-4
# Grid points that the loss distribution of one step, or of all of them, may
# take: some hundred megabytes. Without a bound a noise multiplier of 0.01
# takes all the memory of the machine.
_MAX_GRID = 2e6


# The default of all that takes a relation: the one of Poisson sampling.
ADD_OR_REMOVE_ONE = NeighboringRelation.ADD_OR_REMOVE_ONE


def require_event(event: object) -> None:
  """Raises ``ValueError`` unless ``event`` is a dp-accounting event."""
  if not isinstance(event, dp_event.DpEvent):
    raise ValueError(f'Expected event to be a DpEvent, got {event=}.')


def _doubled(event: dp_event.DpEvent) -> dp_event.DpEvent:
  """Returns the event in which a record adds twice as much to each sum."""
  match event:
    case dp_event.GaussianDpEvent() | dp_event.LaplaceDpEvent():
      return type(event)(event.noise_multiplier / 2)
    case dp_event.DiscreteLaplaceDpEvent():
      return type(event)(event.noise_parameter, 2 * event.sensitivity)
    case dp_event.SelfComposedDpEvent():
      return type(event)(_doubled(event.event), event.count)
    case dp_event.ComposedDpEvent():
      return type(event)([_doubled(inner) for inner in event.events])
    case dp_event.SampledWithoutReplacementDpEvent():
      sizes = event.source_dataset_size, event.sample_size
      return type(event)(*sizes, _doubled(event.event))
    case dp_event.RepeatAndSelectDpEvent():
      return type(event)(_doubled(event.event), event.mean, event.shape)
  # Whatever remains either states its own guarantee (zCDP, randomised response)
  # or is refused by the accountant under this relation.
  return event


def with_relation(
  event: dp_event.DpEvent, relation: NeighboringRelation
) -> dp_event.DpEvent:
  """Returns the event that costs as much when a record is added or removed.

  A record that is replaced moves a sum twice as far.
  """
  if relation is NeighboringRelation.REPLACE_ONE:
    return _doubled(event)
  return event


def leaves(
  event: dp_event.DpEvent, count: int = 1
) -> list[tuple[dp_event.DpEvent, int]]:
  """Returns the single releases of a composition, with their counts."""
  if isinstance(event, dp_event.NoOpDpEvent):
    return []
  if isinstance(event, dp_event.SelfComposedDpEvent):
    return leaves(event.event, count * event.count)
  if isinstance(event, dp_event.ComposedDpEvent):
    return [leaf for inner in event.events for leaf in leaves(inner, count)]
  return [(event, count)]


def pure_epsilon(
  event: dp_event.DpEvent, relation: NeighboringRelation
) -> float | None:
  """Returns epsilon of a release with delta 0, or None for other releases.

  Raises:
    ValueError: If the event's own numbers make epsilon negative or NaN.
  """
  event = with_relation(event, relation)
  match event:
    case dp_event.LaplaceDpEvent(noise_multiplier=scale):
      epsilon = 1 / scale if scale else math.inf
    case dp_event.DiscreteLaplaceDpEvent():
      epsilon = event.noise_parameter * event.sensitivity
    # It hides what a record answers, not that there is a record.
    case dp_event.RandomizedResponseDpEvent() if (
      relation is not NeighboringRelation.ADD_OR_REMOVE_ONE
    ):
      other = event.noise_parameter / event.num_buckets
      kept = 1 - event.noise_parameter + other
      epsilon = math.log(kept / other) if other else math.inf
    case _:
      return None
  return _validate.known_non_negative('epsilon of the event', epsilon)


def kinds(event: dp_event.DpEvent) -> set[type]:
  """Returns the types of the single releases."""
  return {type(leaf) for leaf, _ in leaves(event)}


def _unsampled(event: dp_event.DpEvent) -> Iterator[dp_event.DpEvent]:
  """Yields the single releases, without the sampling that comes before."""
  for leaf, _ in leaves(event):
    if isinstance(leaf, dp_event.PoissonSampledDpEvent):
      yield from _unsampled(leaf.event)
    else:
      yield leaf


def has_no_noise(event: dp_event.DpEvent) -> bool:
  """Whether any part of the event is released as it is."""
  return any(
    isinstance(release, dp_event.NonPrivateDpEvent)
    or getattr(release, 'noise_multiplier', 1.0) == 0
    for release in _unsampled(event)
  )


def rough_epsilon(event: dp_event.DpEvent, delta: float) -> float:
  """Returns a cheap upper bound of epsilon, add or remove one record."""
  accountant = rdp.RdpAccountant(_INTEGER_ORDERS)
  for leaf, count in leaves(event):
    if isinstance(leaf, dp_event.TruncatedSubsampledGaussianDpEvent):
      # RDP has no analysis of truncated batches; Poisson batches with half
      # the noise are close enough to judge a size.
      leaf = dp_event.PoissonSampledDpEvent(
        leaf.sampling_probability,
        dp_event.GaussianDpEvent(leaf.noise_multiplier / 2),
      )
    accountant.compose(leaf, count)
  return float(accountant.get_epsilon(delta))


def affordable_interval(event: dp_event.DpEvent, delta: float) -> float:
  """Returns the grid on which the loss distribution fits in memory."""
  try:
    total = rough_epsilon(_doubled(event), min(max(delta, 1e-30), 0.5))
  except (dp_accounting.UnsupportedEventError, ValueError, ZeroDivisionError):
    total = 0.0
  widest = 0.0  # About how far the loss of a single Gaussian step ranges.
  for release in _unsampled(event):
    sigma = float(getattr(release, 'noise_multiplier', 0.0)) / 2
    if sigma > 1e-150:
      widest = max(widest, 0.5 / sigma**2 + 10 / sigma)
  if math.isfinite(total):  # Else no noise at all: the accountant knows.
    widest = max(widest, 2 * total)
  return max(_INTERVAL, widest / _MAX_GRID)


def to_json(event: dp_event.DpEvent) -> str:
  """Returns one line that names the event and every number in it."""
  return json.dumps(_plain(event), sort_keys=True)


def _plain(value: object) -> object:
  if isinstance(value, dp_event.DpEvent):
    # The first two name the module and the class.
    names = value.to_named_tuple()._fields[2:]
    fields = {name: _plain(getattr(value, name)) for name in names}
    return {'event': type(value).__name__, **fields}
  if isinstance(value, Mapping):
    return {str(key): _plain(inner) for key, inner in value.items()}
  if isinstance(value, Sequence) and not isinstance(value, str):
    return [_plain(inner) for inner in value]
  # NumPy's numbers are no JSON; an integer stays one.
  return value.item() if hasattr(value, 'item') else value
