"""What the noise as it is drawn costs more than ideal noise."""

import math
from collections.abc import Callable

from prism_optax import _validate

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

    >>> from prism_optax.accounting import _as_drawn
    >>> epsilon, delta = _as_drawn.release_guarantee(8.0, 1e-5, 10**6 * 1000)
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


def epsilon(
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
  left = _left(ideal(delta / 2), delta, entries)
  return release_guarantee(ideal(left), left, entries)[0]


def ideal_target(
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
  left = _left(most, delta, entries)
  added = release_guarantee(most, delta, entries)[0] - most
  if added > target_epsilon / 2:
    raise ValueError(
      f'The noise as it is drawn adds {added:.2g} to epsilon, got'
      f' {target_epsilon=} and {entries=}: ask for a larger one.'
    )
  return target_epsilon - added, left


def _left(epsilon: float, delta: float, entries: float) -> float:
  """The delta that is left for ideal noise of at most this epsilon."""
  added = release_guarantee(epsilon, delta, entries)[1] - delta
  if added > delta / 2:
    raise ValueError(
      f'The noise as it is drawn adds {added:.2g} to delta, got {delta=} and'
      f' {entries=}: ask for a larger delta or a smaller epsilon.'
    )
  return delta - added
