"""What the accountants need to know about dp-accounting's events."""

import json
import math
from collections.abc import Mapping, Sequence

import dp_accounting
from dp_accounting import NeighboringRelation, dp_event, rdp

from prism_optax import _validate

# Any Renyi orders give an upper bound of epsilon: a few are enough to judge a
# size. Integers, because fractional orders are slow and warn where their series
# is cut off.
INTEGER_ORDERS = (
  *(2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32),
  *(48, 64, 96, 128, 256, 512, 1024),
)

# dp-accounting's own default, so that our figures are the ones it gives.
_INTERVAL = 1e-4
# Grid points that the loss distribution of one step, or of all of them, may
# take: some hundred megabytes. Without a bound a noise multiplier of 0.01
# takes all the memory of the machine.
_MAX_GRID = 2e6


def require_event(event: object) -> None:
  """Raises ``ValueError`` unless ``event`` is a dp-accounting event."""
  if not isinstance(event, dp_accounting.DpEvent):
    raise ValueError(f'Expected event to be a DpEvent, got {event=}.')


def _with_doubled_sensitivity(
  event: dp_accounting.DpEvent,
) -> dp_accounting.DpEvent:
  """Returns the event in which a record adds twice as much to each sum."""
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
        _with_doubled_sensitivity(inner), count
      )
    case dp_accounting.ComposedDpEvent(events=events):
      return dp_accounting.ComposedDpEvent(
        [_with_doubled_sensitivity(inner) for inner in events]
      )
    case dp_event.SampledWithoutReplacementDpEvent():
      return dp_event.SampledWithoutReplacementDpEvent(
        event.source_dataset_size,
        event.sample_size,
        _with_doubled_sensitivity(event.event),
      )
    case dp_event.RepeatAndSelectDpEvent():
      return dp_event.RepeatAndSelectDpEvent(
        _with_doubled_sensitivity(event.event), event.mean, event.shape
      )
  # Whatever remains either states its own guarantee (zCDP, randomised response)
  # or is refused by the accountant under this relation.
  return event


def with_relation(
  event: dp_accounting.DpEvent, relation: NeighboringRelation
) -> dp_accounting.DpEvent:
  """Returns the event that costs as much when a record is added or removed.

  A record that is replaced moves a sum twice as far.
  """
  if relation is NeighboringRelation.REPLACE_ONE:
    return _with_doubled_sensitivity(event)
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
  """Returns epsilon of a release with delta 0, or None for other releases.

  Raises:
    ValueError: If the event's own numbers make epsilon negative or NaN.
  """
  event = with_relation(event, relation)
  match event:
    case dp_accounting.LaplaceDpEvent(noise_multiplier=scale):
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


def is_gaussian(event: dp_accounting.DpEvent) -> bool:
  """Whether the event consists of Gaussian releases and nothing else."""
  return all(
    isinstance(leaf, dp_accounting.GaussianDpEvent) for leaf, _ in leaves(event)
  )


def has_no_noise(event: dp_accounting.DpEvent) -> bool:
  """Whether any part of the event is released as it is."""
  for leaf, _ in leaves(event):
    if isinstance(leaf, dp_accounting.PoissonSampledDpEvent):
      if has_no_noise(leaf.event):
        return True
    elif (
      isinstance(leaf, dp_accounting.NonPrivateDpEvent)
      or getattr(leaf, 'noise_multiplier', 1.0) == 0
    ):
      return True
  return False


def samples(event: dp_accounting.DpEvent) -> bool:
  """Whether any part of the event is amplified by Poisson sampling."""
  sampled = (
    dp_accounting.PoissonSampledDpEvent,
    dp_event.TruncatedSubsampledGaussianDpEvent,
  )
  return any(isinstance(leaf, sampled) for leaf, _ in leaves(event))


def affordable_interval(event: dp_accounting.DpEvent, delta: float) -> float:
  """Returns the grid on which the loss distribution fits in memory."""
  try:
    accountant = rdp.RdpAccountant(INTEGER_ORDERS)
    for leaf, count in leaves(_with_doubled_sensitivity(event)):
      if isinstance(leaf, dp_event.TruncatedSubsampledGaussianDpEvent):
        # RDP has no analysis of truncated batches; Poisson batches with half
        # the noise are close enough to judge a size.
        leaf = dp_accounting.PoissonSampledDpEvent(
          leaf.sampling_probability,
          dp_accounting.GaussianDpEvent(leaf.noise_multiplier / 2),
        )
      accountant.compose(leaf, count)
    total = float(accountant.get_epsilon(min(max(delta, 1e-30), 0.5)))
  except (dp_accounting.UnsupportedEventError, ValueError, ZeroDivisionError):
    total = 0.0
  if not math.isfinite(total):  # No noise at all: the accountant knows.
    total = 0.0
  return max(_INTERVAL, _widest_step(event) / _MAX_GRID, 2 * total / _MAX_GRID)


def _widest_step(event: dp_accounting.DpEvent) -> float:
  """Returns about how far the loss of a single Gaussian step ranges."""
  widest = 0.0
  for leaf, _ in leaves(event):
    if isinstance(leaf, dp_accounting.PoissonSampledDpEvent):
      widest = max(widest, _widest_step(leaf.event))
      continue
    sigma = float(getattr(leaf, 'noise_multiplier', 0.0)) / 2
    if sigma > 1e-150:
      widest = max(widest, 0.5 / sigma**2 + 10 / sigma)
  return widest


def to_json(event: dp_accounting.DpEvent) -> str:
  """Returns one line that names the event and every number in it."""
  return json.dumps(_plain(event), sort_keys=True)


def _plain(value: object) -> object:
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
