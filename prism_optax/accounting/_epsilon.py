"""Epsilon of what was released, and the smallest noise that meets one."""

import functools
import math
from collections.abc import Callable, Sequence

import dp_accounting
from dp_accounting import NeighboringRelation, pld, rdp

from prism_optax import _validate
from prism_optax.accounting import _as_drawn, _events, _gaussian
from prism_optax.accounting._events import ADD_OR_REMOVE_ONE

# dp-accounting's own default, so that our figures are the ones it gives.
_INTERVAL = 1e-4
# The accountant takes exp(interval). An epsilon of millions is no guarantee.
_WIDEST_INTERVAL = 100.0
# Ten times coarser than the accountant's grid and about ten times faster. It
# finds the neighbourhood, in which the fine one finds the answer.
_SEARCH_INTERVAL = 1e-3
# So much less noise, relative, is seen to be too little; 1e-5 is promised.
_ACCURACY = 9e-6
_SMALLEST, _LARGEST = 1e-3, 1e9


def epsilon(
  event: dp_accounting.DpEvent,
  delta: float,
  *,
  accountant: str = 'pld',
  neighboring_relation: NeighboringRelation = ADD_OR_REMOVE_ONE,
  value_discretization_interval: float | None = None,
  dataset_size: int | None = None,
  entries: float | None = None,
) -> float:
  """Returns an upper bound of epsilon at ``delta`` for what was released.

  An epsilon means nothing without its neighbouring relation. The default,
  adding or removing one record, is the one under which Poisson sampling is
  usually analysed; say it wherever the number is reported, or report
  :func:`privacy_statement`, which says it.

  ================================  ===========================================
  ``delta=0.0``, Gaussian noise     ``inf``: no such noise has a pure epsilon
  ``delta=1.0``                     0.0
  ``delta >= 1 / dataset_size``     ValueError: a record published at random
                                    meets it
  ``delta > 1e-3``, size unknown    UserWarning; so is a delta that is not below
                                    the Poisson sampling probability
  no noise                          ``inf``
  nothing released                  0.0
  epsilon in the millions           ``inf``, in place of a grid of that length
  RDP, Poisson, ``REPLACE_ONE``     ValueError: there is no such analysis
  RDP, truncated batches            ValueError, likewise
  ================================  ===========================================

  Args:
    event: What was released, in noise multipliers with respect to the clip
      norm. Sensitivities that are doubled by hand for ``REPLACE_ONE`` would be
      doubled twice: the accountant does it.
    delta: Delta at which epsilon is wanted, in [0, 1], well below one over the
      number of records.
    accountant: 'pld' (privacy loss distributions, tight) or 'rdp' (Renyi
      divergences, looser, fast for any number of steps).
    neighboring_relation: dp-accounting's enum. Under ``REPLACE_ONE`` the two
      records' contributions both count: a Gaussian release costs as much as
      with half the noise multiplier. dp-accounting's RDP accountant does not do
      this; here Gaussian and Laplace events are rewritten before they reach it.
    value_discretization_interval: Grid of the loss distribution; only for
      'pld'. ``None`` takes 1e-4. Where epsilon is so large (above a hundred)
      that the grid would not fit in memory, a wider one is taken. Any grid
      gives an upper bound.
    dataset_size: Number of records, a public constant, against which ``delta``
      is checked. Events of truncated batches hold theirs.
    entries: Number of entries to which this library adds noise, over all
      updates together. Epsilon is then that of the noise as it is drawn, at the
      same delta; else that of ideal noise.

  Returns:
    Epsilon, ``inf`` where there is no guarantee (or only one of millions).

  Raises:
    ValueError: If an argument is out of its range; if a number of the event is
      impossible (a negative count or noise, NaN), also inside of compositions;
      or if the accountant has no analysis of the event under the relation (RDP
      has none of Poisson sampling under ``REPLACE_ONE``, nor of truncated
      batches); if there are so many entries that what is drawn takes half of
      ``delta``.

  References:
    The accountants are dp-accounting's. PLD: Doroshenko et al., Connect the
    Dots, arXiv:2207.04380. RDP: Mironov, arXiv:1702.07476; with Poisson
    sampling, Mironov, Talwar and Zhang, arXiv:1908.10530.

  Examples:
    >>> from prism_optax import accounting
    >>> event = accounting.dpsgd_event(4.8448, 1.0, 1)
    >>> round(accounting.epsilon(event, 1e-5), 3)
    0.751
    >>> relation = accounting.NeighboringRelation.REPLACE_ONE
    >>> round(
    ...   accounting.epsilon(event, 1e-5, neighboring_relation=relation), 3
    ... )
    1.61
  """
  delta = _events.check_delta(event, delta, dataset_size)
  interval = value_discretization_interval
  return _as_drawn.epsilon(
    lambda delta: epsilon_at(
      event, delta, accountant, neighboring_relation, interval
    ),
    delta,
    entries,
  )


def epsilon_at(
  event: dp_accounting.DpEvent,
  delta: float,
  accountant: str,
  neighboring_relation: NeighboringRelation,
  interval: float | None = None,
) -> float:
  """Returns :func:`epsilon` at a delta that was checked."""
  _validate.one_of('accountant', accountant, ('pld', 'rdp'))
  _validate.neighboring_relation(neighboring_relation)
  if interval is not None:
    _validate.positive('value_discretization_interval', interval)
  if accountant == 'rdp':
    event = _events.with_relation(event, neighboring_relation)
    interval = None
  else:
    # Little noise needs a wide grid, or it would not fit in memory.
    interval = max(
      interval or _INTERVAL, _events.affordable_interval(event, delta)
    )
    if interval > _WIDEST_INTERVAL:
      return math.inf
  event = _events.frozen(event)
  spent = _spent if _hashable(event) else _spent.__wrapped__
  try:
    engine = spent(event, neighboring_relation, interval)
  except dp_accounting.UnsupportedEventError as error:
    raise ValueError(
      f'The accountant {accountant!r} has no analysis of this event under'
      f' neighboring_relation={neighboring_relation}: {error}'
    ) from error
  return float(engine.get_epsilon(delta))


# A loss distribution takes seconds and serves every delta: what a calibration
# has found is stated, and a statement asks twice.
@functools.lru_cache(maxsize=8)
def _spent(
  event: dp_accounting.DpEvent,
  neighboring_relation: NeighboringRelation,
  interval: float | None,
) -> dp_accounting.PrivacyAccountant:
  """Returns an accountant that was told of the event: RDP without a grid."""
  engine: dp_accounting.PrivacyAccountant
  if interval is None:
    engine = rdp.RdpAccountant(neighboring_relation=neighboring_relation)
  else:
    engine = pld.PLDAccountant(neighboring_relation, interval)
  return engine.compose(event)


def _hashable(event: dp_accounting.DpEvent) -> bool:
  """Whether it has no arrays in it, as mixtures of Gaussians have."""
  try:
    hash(event)
  except TypeError:
    return False
  return True


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
    prior_events: Events of what else is released about the same records, with
      noise that is given (the ``.event`` of a prior release). They and the
      steps together meet the target.
    entries: Number of entries that get noise, over all updates together, as for
      :func:`epsilon`.

  Returns:
    Standard deviation of the noise over the clip norm, as
    :func:`dpsgd_event` takes it.

  Raises:
    ValueError: If an argument is out of its range, the accountant has no
      analysis of this sampling under the relation, or no noise multiplier
      from 1e-3 to 1e9 reaches the target (what is released besides costs more,
      or the grid and tail of the PLD accountant cannot show so small a delta or
      epsilon), or what is drawn takes half of epsilon or delta.

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
  target_epsilon, delta = _as_drawn.ideal_target(target_epsilon, delta, entries)

  def spent(sigma: float, interval: float | None = None) -> float:
    return epsilon_at(
      event(sigma), delta, accountant, neighboring_relation, interval
    )

  # A grid as wide as the target would see nothing; a fine one under a large
  # target has many points and shows nothing more.
  interval = min(_SEARCH_INTERVAL, target_epsilon / 100)
  interval = max(interval, target_epsilon / 5000)

  def rough(sigma: float) -> float:
    return _events.rough_epsilon(event(sigma), delta)

  # Bad arguments and missing analyses fail here, named, and at no cost.
  spent(100.0, _SEARCH_INTERVAL)
  guess = _solve(rough, target_epsilon, 1.0, tolerance=0.02)
  if neighboring_relation is NeighboringRelation.REPLACE_ONE:
    guess *= 2
  coarse = functools.partial(spent, interval=interval)
  guess = _solve(coarse, target_epsilon, guess, tolerance=1e-6)
  return _solve(spent, target_epsilon, guess, _ACCURACY, first_step=_ACCURACY)


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
