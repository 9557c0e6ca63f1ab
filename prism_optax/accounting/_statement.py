"""What to report: epsilon, what it depends on, and the noise as it is drawn."""

import math
from collections.abc import Callable

import dp_accounting
from dp_accounting import NeighboringRelation, dp_event

from prism_optax import _validate
from prism_optax.accounting import _epsilon, _events
from prism_optax.accounting._events import ADD_OR_REMOVE_ONE

# Of the law P of one entry's noise and a rounded Gaussian G: the largest
# |log P/G| and the chi-square divergence within six standard deviations; how
# much P exceeds G beyond them; the mass of G beyond all that P reaches.
_LARGEST_RATIO = 2e-9
_CHI_SQUARE = 1.1e-23
_EXCESS = 5e-17
_MISSED = 1e-19
# Probability that the log ratios add up to more than they are charged for.
_FAILURE = 1e-20


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
    ValueError: If an argument is negative or NaN, or ``delta`` no probability.

  References:
    The derivation is ours (page "Releases that are exact to the last bit" of
    the documentation), with Bernstein's inequality.

  Examples:
    A million entries, a thousand updates:

    >>> from prism_optax import accounting
    >>> epsilon, delta = accounting.release_guarantee(8.0, 1e-5, 10**6 * 1000)
    >>> f'{epsilon:.5f} {delta:.3g}'
    '8.00000 1.03e-05'
  """
  _validate.known_non_negative('epsilon', epsilon)
  _validate.known_probability('delta', delta)
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
      updates together. Epsilon is then that of the noise as it is drawn
      (:func:`release_guarantee`), at the same delta; else that of ideal noise.
    possible_stops: The releases were stopped on the way, at one of so many
      stops that were fixed beforehand, and ``event`` is what was released by
      the next one. Each has the same share of delta, at which epsilon is
      computed; together they have ``delta``.

  Returns:
    One line with epsilon (rounded up), delta, relation, accountant, and the
    sampling that the figure assumes.

  Raises:
    ValueError: In the cases of :func:`epsilon`; if there are so many entries
      that what is drawn takes half of ``delta``; for fewer than one stop.

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
  share = delta / possible_stops

  def spent_at(delta: float) -> float:
    return _epsilon.epsilon_at(event, delta, accountant, neighboring_relation)

  if entries is None:
    spent, drawn = spent_at(share), ''
  else:
    spent, drawn = _as_drawn(spent_at, share, entries), ', noise as drawn'
  # Rounding down would claim more privacy than was shown.
  shown = math.ceil(spent * 1000) / 1000 if math.isfinite(spent) else spent
  relation = neighboring_relation.name.lower().replace('_', '-')
  sampled = _events.kinds(event) & {
    dp_event.PoissonSampledDpEvent,
    dp_event.TruncatedSubsampledGaussianDpEvent,
  }
  sampling = ', Poisson sampling' if sampled else ''
  return (
    f'epsilon <= {shown:.3f} at delta = {delta:g},'
    f' {relation} neighbours ({accountant.upper()}){sampling}{drawn}'
  )


def _as_drawn(
  spent_at: Callable[[float], float], delta: float, entries: float
) -> float:
  """Returns epsilon at ``delta`` of the noise as it is drawn."""
  # Where half of delta is left, this epsilon is at least the one that counts.
  most = spent_at(delta / 2)
  added = release_guarantee(most, delta, entries)[1] - delta
  if added > delta / 2:
    raise ValueError(
      f'The noise as it is drawn adds {added:.2g} to delta, got {delta=} and'
      f' {entries=}: ask for a larger delta or a smaller epsilon.'
    )
  left = delta - added
  return release_guarantee(spent_at(left), left, entries)[0]
