"""The smallest noise that meets a privacy target."""

import functools
import math
from collections.abc import Callable

from dp_accounting import NeighboringRelation

from prism_optax import _validate
from prism_optax.accounting import _dpsgd, _events
from prism_optax.accounting._events import ADD_OR_REMOVE_ONE

# Ten times coarser than the accountant's grid and about ten times faster. It
# finds the neighbourhood; the answer is checked on the fine one.
_SEARCH_INTERVAL = 1e-3
_SMALLEST, _LARGEST = 1e-3, 1e9


def calibrate_noise_multiplier(
  target_epsilon: float,
  delta: float,
  sampling_probability: float,
  steps: int,
  *,
  accountant: str = 'pld',
  neighboring_relation: NeighboringRelation = ADD_OR_REMOVE_ONE,
  truncated_batch_size: int | None = None,
  dataset_size: int | None = None,
) -> float:
  """Returns the smallest noise multiplier that meets ``target_epsilon``.

  The answer never gives less privacy than asked for: :func:`epsilon` of
  :func:`dpsgd_event` at it, with the same accountant and relation, has been
  computed and is at most ``target_epsilon``. With 1e-5 (relative) less noise it
  would not be, wherever the accountant's epsilon is a smooth function of the
  noise (not for a delta near 1e-15 or an epsilon below the PLD's grid, 1e-4).
  :func:`epsilon` names the sources of the accountants; the search is ours.

  Args:
    target_epsilon: Epsilon to meet, positive and finite.
    delta: Delta at which to meet it, between 0 and 1, both excluded: no
      Gaussian noise gives delta 0.
    sampling_probability: Probability that a batch has a given record, in
      (0, 1].
    steps: Number of steps, at least 1.
    accountant: 'pld' (tight) or 'rdp'.
    neighboring_relation: The relation under which epsilon is meant; report it
      with the result. The default is adding or removing one record.
    truncated_batch_size: The largest batch, where larger ones are cut, as for
      :func:`dpsgd_event`.
    dataset_size: Number of records, needed with ``truncated_batch_size`` alone.

  Returns:
    Standard deviation of the noise over the clip norm, as
    :func:`dpsgd_event` takes it.

  Raises:
    ValueError: If an argument is out of its range, the accountant has no
      analysis of this sampling under the relation, or no noise multiplier
      from 1e-3 to 1e9 reaches the target (its grid and tail limit how small a
      delta or epsilon the PLD accountant can show).

  Examples:
    >>> from prism_optax import accounting
    >>> sigma = accounting.calibrate_noise_multiplier(6.0, 1e-5, 64 / 9919, 300)
    >>> round(sigma, 3)
    0.516
  """
  target_epsilon = _validate.known_positive('target_epsilon', target_epsilon)
  delta = _validate.known_open_probability('delta', delta)
  sampling_probability = _validate.known_positive(
    'sampling_probability', sampling_probability
  )
  _validate.integer('steps', steps, 1)

  def spent(sigma: float, widest_interval: float = 0.0) -> float:
    event = _dpsgd.dpsgd_event(
      sigma,
      sampling_probability,
      steps,
      truncated_batch_size=truncated_batch_size,
      dataset_size=dataset_size,
    )
    interval = None
    if accountant == 'pld' and widest_interval:
      # Little noise needs a wider grid still, or it would not fit in memory.
      interval = max(widest_interval, _events.affordable_interval(event, delta))
    return _dpsgd.epsilon(
      event,
      delta,
      accountant=accountant,
      neighboring_relation=neighboring_relation,
      value_discretization_interval=interval,
    )

  # Bad arguments and missing analyses fail here, named, and at no cost.
  spent(100.0, _SEARCH_INTERVAL)

  def rough(sigma: float) -> float:
    event = _dpsgd.dpsgd_event(sigma, sampling_probability, steps)
    return _events.rough_epsilon(event, delta)

  guess = _solve(rough, target_epsilon, 1.0, tolerance=0.02)
  if neighboring_relation is NeighboringRelation.REPLACE_ONE:
    guess *= 2
  if accountant == 'pld':
    return _refine(spent, target_epsilon, guess)
  sigma = _solve(spent, target_epsilon, guess, tolerance=1e-7)
  return _nudge(spent, target_epsilon, sigma)


def _refine(spent: Callable[..., float], target: float, guess: float) -> float:
  """Solves on the coarse grid, then corrects to the fine one by Newton."""
  # A grid as wide as the target would see nothing; a fine one under a large
  # target has many points and shows nothing more.
  interval = max(min(_SEARCH_INTERVAL, target / 100), target / 5000)

  @functools.cache
  def coarse(sigma: float) -> float:
    return spent(sigma, interval)

  sigma = _solve(coarse, target, guess, tolerance=1e-6)
  near = sigma * (1 + 1e-3)
  first, second = coarse(sigma), coarse(near)
  if not 0 < second < first < math.inf:
    # No slope: epsilon jumps here (a delta near the accountant's own tail, or
    # an epsilon below its grid). The fine grid alone must do.
    return _nudge(spent, target, _solve(spent, target, sigma, tolerance=1e-6))
  slope = math.log(second / first) / math.log(near / sigma)
  for _ in range(3):
    fine = spent(sigma)
    if not 0 < fine < math.inf:
      break
    gap = math.log(fine / target)
    if gap <= 0 and gap / slope <= 2e-6:
      return sigma
    # The margin is what the test above allows: aim at its middle.
    sigma *= math.exp(-gap / slope + 1e-6)
  return _nudge(spent, target, sigma)


def _nudge(spent: Callable[..., float], target: float, sigma: float) -> float:
  """Adds noise until the target is met, by as little as it takes."""
  step = 1e-7
  while spent(sigma) > target:
    sigma *= 1 + step
    step *= 2
    if sigma > _LARGEST:
      raise _unreachable(target)
  return sigma


def _solve(
  function: Callable[..., float], target: float, guess: float, tolerance: float
) -> float:
  """Returns where a decreasing function falls to ``target``, from above it.

  Both axes are logarithmic, where epsilon is nearly a straight line: false
  position (the Illinois variant, which cannot stall) takes some five steps.

  Args:
    function: Decreasing, may be infinite or zero.
    target: Value looked for.
    guess: Where to start.
    tolerance: Relative accuracy of the argument.

  Returns:
    An argument at which ``function`` is at most ``target``.

  Raises:
    ValueError: If the function does not fall to ``target``.
  """

  @functools.cache
  def height(x: float) -> float:
    value = function(math.exp(x)) / target
    # Infinite and zero values only say on which side they are.
    return math.log(min(max(value, 1e-6), 1e6))

  low = high = math.log(guess)
  step = math.log(1.1)
  while height(high) > 0:
    low, high, step = high, high + step, 2 * step
    if high > math.log(_LARGEST):
      raise _unreachable(target)
  while height(low) <= 0:
    low, high, step = low - step, low, 2 * step
    if low < math.log(_SMALLEST):
      # So little noise is enough: more of it does no harm.
      return math.exp(high)
  # Weights of the two ends. An end that stays twice in a row loses half of its
  # weight; otherwise it would never move.
  below, above, last = height(low), height(high), 0
  # Step over the root by half the tolerance, so that both ends close in.
  margin = tolerance / 2
  for _ in range(100):
    if high - low <= tolerance:
      break
    middle = high - above * (high - low) / (above - below)
    middle = min(max(middle + margin, low + margin), high - margin)
    if height(middle) > 0:
      low, below = middle, height(middle)
      above /= 2 if last > 0 else 1
      last = 1
    else:
      high, above = middle, height(middle)
      below /= 2 if last < 0 else 1
      last = -1
  return math.exp(high)


def _unreachable(target: float) -> ValueError:
  return ValueError(
    f'target_epsilon={target!r} cannot be reached: the accountant shows a'
    f' larger epsilon at every noise multiplier up to {_LARGEST:g}. Ask for a'
    ' larger target_epsilon or delta.'
  )
