"""The smallest noise that meets an epsilon."""

import functools
import math
from collections.abc import Callable, Sequence

import dp_accounting
from dp_accounting import NeighboringRelation

from prism_optax import _validate
from prism_optax.accounting import _events, _gaussian
from prism_optax.accounting._epsilon import (
  delta_left,
  epsilon_at,
  release_guarantee,
)
from prism_optax.accounting._events import ADD_OR_REMOVE_ONE

# Ten times coarser than the accountant's grid and about ten times faster, as is
# the wide one again. Both find the neighbourhood, in which the accountant's own
# finds the answer.
_SEARCH_INTERVAL, _WIDE_INTERVAL = 1e-3, 1e-2
# So much less noise, relative, is seen to be too little; 1e-5 is promised.
_ACCURACY = 9e-6
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
  prior_events: Sequence[dp_accounting.DpEvent] = (),
  entries: float | None = None,
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
    dataset_size: Number of records, against which ``delta`` is checked before
      the search; needed with ``truncated_batch_size``.
    prior_events: Events of other releases about the same records, whose noise
      is fixed (the ``.event`` of a prior release). Together with the steps they
      meet the target.
    entries: Number of entries that get noise, over all updates together, as for
      :func:`epsilon`.

  Returns:
    Standard deviation of the noise over the clip norm, as
    :func:`dpsgd_event` takes it.

  Raises:
    ValueError: If an argument is out of its range, the accountant has no
      analysis of this sampling under the relation, or no noise multiplier from
      1e-3 to 1e9 reaches the target (other releases cost more, or the grid and
      tail of the PLD accountant cannot show so small a delta or epsilon), or
      the difference from ideal noise takes half of epsilon or delta.

  Examples:
    >>> from prism_optax import accounting
    >>> sigma = accounting.calibrate_noise_multiplier(6.0, 1e-5, 64 / 9919, 300)
    >>> round(sigma, 3)
    0.516
  """
  target_epsilon = _validate.known_positive('target_epsilon', target_epsilon)
  delta = _validate.known_open_probability('delta', delta)
  _validate.known_positive('sampling_probability', sampling_probability)
  _validate.integer('steps', steps, 1)

  def event(sigma: float) -> dp_accounting.DpEvent:
    training = _events.dpsgd_event(
      sigma,
      sampling_probability,
      steps,
      truncated_batch_size=truncated_batch_size,
      dataset_size=None if truncated_batch_size is None else dataset_size,
    )
    return _events.composed([training, *prior_events])

  _events.check_delta(event(1.0), delta, dataset_size)
  target_epsilon, delta = _ideal_target(target_epsilon, delta, entries)

  def spent(sigma: float, interval: float | None = None) -> float:
    return epsilon_at(
      event(sigma), delta, accountant, neighboring_relation, interval
    )

  # A grid as wide as the target would see nothing; a fine one under a large
  # target has many points and shows nothing more.
  interval = min(_SEARCH_INTERVAL, target_epsilon / 100)
  interval = max(interval, target_epsilon / 5000)
  wide = max(min(_WIDE_INTERVAL, target_epsilon / 30), 2 * interval)

  def coarse(sigma: float) -> float:
    near, far = spent(sigma, interval), spent(sigma, wide)
    if not math.isfinite(far):
      return near
    # What a grid adds to epsilon grows with the square of its interval.
    return near - (far - near) / ((wide / interval) ** 2 - 1)

  def rough(sigma: float) -> float:
    return _events.rough_epsilon(event(sigma), delta)

  # Bad arguments and missing analyses fail here, named, and at no cost.
  spent(100.0, _SEARCH_INTERVAL)
  guess = _solve(rough, target_epsilon, 1.0, tolerance=0.02)
  widest = functools.partial(spent, interval=wide)
  guess = _solve(widest, target_epsilon, guess, tolerance=0.01)
  guess = _refined(coarse, widest, target_epsilon, guess)
  return _refined(spent, coarse, target_epsilon, guess)


def _refined(
  fine: Callable[[float], float],
  coarse: Callable[[float], float],
  target: float,
  guess: float,
) -> float:
  """Returns where ``fine`` falls to ``target``, from above it.

  ``coarse`` takes a tenth of the time and shows how steep epsilon is. So one
  value of ``fine`` is enough if it is at most the target and near it: by half
  of what is promised, since the slope may be wrong by a half.
  """
  less = _ACCURACY / 2
  here, there = coarse(guess), coarse(guess * (1 - less))
  if not 0 < here < there < math.inf:
    here = there = 1.0
  # Both axes are logarithmic. Later the slope is that of ``fine``.
  x, steep = math.log(guess), math.log(there / here) / less
  last: tuple[float, float] | None = None
  for _ in range(7):
    found = fine(math.exp(x))
    if not 0 < found < math.inf:
      break
    height = math.log(found / target)
    if found <= target and height > -steep * less:
      return math.exp(x)
    if last:
      steep = (height - last[1]) / (last[0] - x)
    if 3 * steep <= abs(height):  # A flat curve: it would lead far away.
      break
    # To the middle of where the answer may be.
    x, last = x + height / steep + less / 2, (x, height)
  # A step that is as long as the tolerance could be rounded to a longer one.
  step = 0.99 * _ACCURACY
  return _solve(fine, target, math.exp(x), _ACCURACY, first_step=step)


def approximate_noise_multiplier(
  target_epsilon: float,
  delta: float,
  sampling_probability: float,
  steps: int,
) -> float:
  """Returns :func:`calibrate_noise_multiplier` to one percent, in less time.

  Too much noise rather than too little: a wide grid has the larger epsilon.
  Poisson batches, add or remove one record, arguments that were checked.
  """
  mu = _gaussian.gaussian_mu(target_epsilon, delta)
  # Of many steps with little noise lost by sampling: the central limit theorem
  # of Bu et al., arXiv:1911.11607.
  ratio = mu / (sampling_probability * math.sqrt(steps))
  guess = 1 / math.sqrt(math.log1p(ratio**2))
  return _solve(
    lambda sigma: epsilon_at(
      _events.dpsgd_event(sigma, sampling_probability, steps),
      delta,
      'pld',
      ADD_OR_REMOVE_ONE,
      target_epsilon / 300,
    ),
    target_epsilon,
    guess,
    tolerance=5e-3,
  )


def _ideal_target(
  target_epsilon: float, delta: float, entries: float | None
) -> tuple[float, float]:
  """Returns an epsilon and a delta that ideal noise has to meet.

  Then the noise as it is drawn meets ``target_epsilon`` and ``delta``.

  Raises:
    ValueError: If what is drawn takes half of either.
  """
  if entries is None:
    return target_epsilon, delta
  # More than epsilon at half of delta, with which what drawn noise adds grows.
  most = 1.25 * target_epsilon + 0.5
  left = delta_left(most, delta, entries)
  added = release_guarantee(most, delta, entries)[0] - most
  if added > target_epsilon / 2:
    raise ValueError(
      f'The noise as it is drawn adds {added:.2g} to epsilon, got'
      f' {target_epsilon=} and {entries=}: ask for a larger one.'
    )
  return target_epsilon - added, left


def _solve(
  function: Callable[[float], float],
  target: float,
  guess: float,
  tolerance: float,
  first_step: float = 0.1,
) -> float:
  """Returns where a decreasing function falls to ``target``, from above it.

  Both axes are logarithmic, where epsilon is nearly a straight line: false
  position (the Illinois variant, which cannot stall) takes some five steps.

  Args:
    function: Decreasing, may be infinite or zero.
    target: Value looked for.
    guess: Where to start.
    tolerance: Relative accuracy of the argument.
    first_step: Relative error of the guess, about.

  Returns:
    An argument at which ``function`` has been computed and is at most
    ``target``, as it is not at the tolerance below.

  Raises:
    ValueError: If the function does not fall to ``target``.
  """

  @functools.cache
  def height(x: float) -> float:
    value = function(math.exp(x)) / target
    # Infinite and zero values only say on which side they are.
    return math.log(min(max(value, 1e-6), 1e6))

  low = high = math.log(guess)
  step = first_step
  while height(high) > 0:
    low, high, step = high, high + step, 2 * step
    if high > math.log(_LARGEST):
      raise ValueError(
        f'target_epsilon={target!r} cannot be reached: the accountant shows a'
        f' larger epsilon at every noise multiplier up to {_LARGEST:g}. Ask for'
        ' a larger target_epsilon or delta.'
      )
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
  while high - low > tolerance:
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
