"""How fine a loss distribution may be, to fit in memory."""

import math

import dp_accounting
from dp_accounting import dp_event, rdp

from prism_optax.accounting import _events

# dp-accounting's own default, so that our figures are the ones it gives.
_INTERVAL = 1e-4
# Grid points that the loss distribution of one step, or of all of them, may
# take: some hundred megabytes. Without a bound a noise multiplier of 0.01
# takes all the memory of the machine.
_MAX_GRID = 2e6
# Any orders give an upper bound, and the size of a grid needs no better one.
# Integers: fractional orders are slow, and warn where their series is cut off.
_ORDERS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128, 256)


def affordable_interval(event: dp_accounting.DpEvent, delta: float) -> float:
  """Returns the grid on which the loss distribution fits in memory."""
  widest = _widest_step(event)
  try:
    accountant = rdp.RdpAccountant(_ORDERS)
    accountant.compose(_untruncated(_events.with_doubled_sensitivity(event)))
    total = accountant.get_epsilon(min(max(delta, 1e-30), 0.5))
  except (dp_accounting.UnsupportedEventError, ValueError, ZeroDivisionError):
    total = 0.0
  if not math.isfinite(total):  # No noise at all: the accountant knows.
    total = 0.0
  return max(_INTERVAL, widest / _MAX_GRID, 2 * total / _MAX_GRID)


def _widest_step(event: dp_accounting.DpEvent) -> float:
  """Returns about how far the loss of a single Gaussian step ranges."""
  if isinstance(event, dp_accounting.ComposedDpEvent):
    return max(map(_widest_step, event.events), default=0.0)
  if isinstance(
    event,
    dp_accounting.SelfComposedDpEvent | dp_accounting.PoissonSampledDpEvent,
  ):
    return _widest_step(event.event)
  sigma = getattr(event, 'noise_multiplier', 0.0) / 2
  return 0.5 / sigma**2 + 10 / sigma if sigma > 1e-150 else 0.0


def _untruncated(event: dp_accounting.DpEvent) -> dp_accounting.DpEvent:
  """Puts Poisson batches in the place of truncated ones, to judge sizes."""
  if isinstance(event, dp_accounting.SelfComposedDpEvent):
    return dp_accounting.SelfComposedDpEvent(
      _untruncated(event.event), event.count
    )
  if isinstance(event, dp_event.TruncatedSubsampledGaussianDpEvent):
    return dp_accounting.PoissonSampledDpEvent(
      event.sampling_probability,
      dp_accounting.GaussianDpEvent(event.noise_multiplier / 2),
    )
  return event
