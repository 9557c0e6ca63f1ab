"""Epsilon of what was released, of noise as it is drawn, and what to report."""

import functools
import math
from collections.abc import Callable

import dp_accounting
from dp_accounting import NeighboringRelation, dp_event, pld, rdp

from prism_optax import _validate
from prism_optax.accounting import _events
from prism_optax.accounting._events import ADD_OR_REMOVE_ONE

# dp-accounting's own default, so that our figures are the ones it gives.
_INTERVAL = 1e-4
# The accountant takes exp(interval). An epsilon of millions is no guarantee.
_WIDEST_INTERVAL = 100.0

# Of the law P of one entry's noise and a rounded Gaussian G: the largest
# |log P/G| and the chi-square divergence within six standard deviations; how
# much P exceeds G beyond them; the mass of G beyond all that P reaches.
_LARGEST_RATIO = 2e-9
_CHI_SQUARE = 1.1e-23
_EXCESS = 5e-17
_MISSED = 1e-19
# Probability that the log ratios add up to more than they are charged for.
_FAILURE = 1e-20


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
  usually analysed; name it wherever you report the number, or report
  :func:`privacy_statement`, which names it.

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
    event: Describes the releases, in noise multipliers with respect to the clip
      norm. Do not double sensitivities by hand for ``REPLACE_ONE``, because the
      accountant does it.
    delta: Delta at which epsilon is wanted, in [0, 1], well below one over the
      number of records.
    accountant: 'pld' (privacy loss distributions, tight) or 'rdp' (Renyi
      divergences, looser, fast for any number of steps).
    neighboring_relation: dp-accounting's enum. Under ``REPLACE_ONE`` the two
      records' contributions both count: a Gaussian release costs as much as
      with half the noise multiplier. dp-accounting's RDP accountant does not do
      this; here Gaussian and Laplace events are rewritten before they reach it.
    value_discretization_interval: Grid of the loss distribution; only for
      'pld'. ``None`` takes 1e-4. If epsilon is so large (above a hundred) that
      the grid would not fit in memory, a wider one is used. Any grid gives an
      upper bound.
    dataset_size: Number of records, a public constant, against which ``delta``
      is checked. Events of truncated batches already hold it.
    entries: Number of entries to which this library adds noise, over all
      updates together. Epsilon then accounts for the noise as it is drawn, at
      the same delta; otherwise for ideal noise.

  Returns:
    Epsilon, ``inf`` where there is no guarantee (or only one of millions).

  Raises:
    ValueError: If an argument is out of its range; if a number of the event is
      impossible (a negative count or noise, NaN), also inside of compositions;
      or if the accountant has no analysis of the event under the relation (RDP
      has none of Poisson sampling under ``REPLACE_ONE``, nor of truncated
      batches); if there are so many entries that the difference from ideal
      noise takes half of ``delta``.

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
  return _as_drawn(
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


def release_guarantee(
  epsilon: float, delta: float, entries: float
) -> tuple[float, float]:
  """Returns the guarantee with this library's noise, for ideal noise's.

  A mechanism that is (epsilon, delta) private with ideal Gaussian noise on its
  lattice is private with the noise that is drawn, with a little more of both.

  Args:
    epsilon: With ideal noise, a number >= 0; infinity is allowed.
    delta: With ideal noise, in [0, 1].
    entries: Number of entries that get noise, over all updates together.

  Returns:
    Epsilon and delta of the noise as it is drawn.

  Raises:
    ValueError: If ``entries`` is negative or NaN.

  References:
    The derivation is ours (page "Releases that are exact to the last bit" of
    the documentation), with Bernstein's inequality.

  Examples:
    A million entries, a thousand updates:

    >>> from prism_optax.accounting import _epsilon
    >>> epsilon, delta = _epsilon.release_guarantee(8.0, 1e-5, 10**6 * 1000)
    >>> f'{epsilon:.5f} {delta:.3g}'
    '8.00000 1.03e-05'
  """
  k = _validate.known_non_negative('entries', entries)
  if k == 0 or math.isinf(epsilon):
    return epsilon, delta
  far = 2e-9 * _LARGEST_RATIO**2  # A Gaussian's mass beyond six is 2e-9.
  variance = k * (_CHI_SQUARE + far)
  nats = math.log(1 / _FAILURE)
  shift = k * (_CHI_SQUARE + _EXCESS) + 2 / 3 * (2 * _LARGEST_RATIO) * nats
  shift += math.sqrt(2 * variance * nats)
  added = k * _EXCESS + _FAILURE
  # The exponent is capped: a delta above one says nothing anyway.
  missed = math.exp(min(epsilon + shift, 700.0)) * (k * _MISSED + _FAILURE)
  total = math.exp(min(shift, 700.0)) * delta + added + missed
  return epsilon + 2 * shift, min(total, 1.0)


def _as_drawn(
  ideal: Callable[[float], float], delta: float, entries: float | None
) -> float:
  """Returns epsilon at ``delta`` of the noise as it is drawn.

  Args:
    ideal: From delta to epsilon of ideal noise.
    delta: Of the noise as it is drawn.
    entries: Number of entries that get noise; None for ideal noise.

  Raises:
    ValueError: If what is drawn takes half of ``delta``.
  """
  if entries is None:
    return ideal(delta)
  # Where half of delta is left, this epsilon is at least the one that counts.
  left = delta_left(ideal(delta / 2), delta, entries)
  return release_guarantee(ideal(left), left, entries)[0]


def delta_left(epsilon: float, delta: float, entries: float) -> float:
  """The delta that is left for ideal noise of at most this epsilon."""
  added = release_guarantee(epsilon, delta, entries)[1] - delta
  if added > delta / 2:
    raise ValueError(
      f'The noise as it is drawn adds {added:.2g} to delta, got {delta=} and'
      f' {entries=}: ask for a larger delta or a smaller epsilon.'
    )
  return delta - added


def privacy_statement(
  event: dp_accounting.DpEvent,
  delta: float,
  *,
  accountant: str = 'pld',
  neighboring_relation: NeighboringRelation = ADD_OR_REMOVE_ONE,
  dataset_size: int | None = None,
  entries: float | None = None,
  possible_stops: int = 1,
) -> str:
  """Returns the sentence to report: epsilon and everything it depends on.

  Args:
    event: What was released.
    delta: Delta at which epsilon is reported, in [0, 1].
    accountant: 'pld' or 'rdp', as for :func:`epsilon`.
    neighboring_relation: Relation under which epsilon is meant.
    dataset_size: Number of records, as for :func:`epsilon`.
    entries: Number of entries to which this library adds noise, over all
      updates together. Epsilon then accounts for the noise as it is drawn, at
      the same delta; otherwise for ideal noise.
    possible_stops: The number of stops that were fixed beforehand, if the run
      stopped early at one of them. ``event`` then describes the releases up to
      the next stop. Each stop has an equal share of ``delta``, at which epsilon
      is computed.

  Returns:
    One line with epsilon (rounded up), delta, relation, accountant, and the
    sampling that the figure assumes.

  Raises:
    ValueError: In the cases of :func:`epsilon`; if there are so many entries
      that the difference from ideal noise takes half of ``delta``; for fewer
      than one stop.

  Examples:
    >>> from prism_optax import accounting
    >>> event = accounting.dpsgd_event(1.0, 64 / 9919, 300)
    >>> print(*accounting.privacy_statement(event, 1e-5).split(', '), sep='\\n')
    epsilon <= 0.674 at delta = 1e-05
    add-or-remove-one neighbours (PLD)
    Poisson sampling
  """
  delta = _events.check_delta(event, delta, dataset_size)
  _validate.integer('possible_stops', possible_stops, 1)
  spent = _as_drawn(
    lambda delta: epsilon_at(event, delta, accountant, neighboring_relation),
    delta / possible_stops,
    entries,
  )
  drawn = '' if entries is None else ', noise as drawn'
  # Rounding down would claim more privacy than was shown.
  shown = math.ceil(spent * 1000) / 1000 if math.isfinite(spent) else spent
  at = f'{delta:g}'
  at = at if float(at) >= delta else repr(delta)
  relation = neighboring_relation.name.lower().replace('_', '-')
  sampled = _events.kinds(event) & {
    dp_event.PoissonSampledDpEvent,
    dp_event.TruncatedSubsampledGaussianDpEvent,
  }
  sampling = ', Poisson sampling' if sampled else ''
  return (
    f'epsilon <= {shown:.3f} at delta = {at},'
    f' {relation} neighbours ({accountant.upper()}){sampling}{drawn}'
  )
