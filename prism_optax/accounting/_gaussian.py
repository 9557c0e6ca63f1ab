"""Closed forms for exact Gaussian releases.

A Gaussian release of sensitivity D with noise of standard deviation s is
exactly as hard to tell from its neighbour as N(0, 1) from N(mu, 1), with
``mu = D / s``. Releases in sequence add their ``mu^2``, also when each is
chosen after seeing the answers to the ones before.
"""

import math
from collections.abc import Callable

from prism_optax import _validate


def gaussian_delta(mu: float, epsilon: float) -> float:
  """Returns the smallest delta at which a Gaussian release has ``epsilon``.

  Zero for ``mu=0.0`` or an infinite epsilon, one for an infinite ``mu``.

  Args:
    mu: Sensitivity (under the neighbouring relation that is meant) over
      standard deviation of the noise per coordinate, for several releases the
      root of the sum of the squares.
    epsilon: A number >= 0; infinity is allowed.

  Returns:
    ``Phi(mu/2 - epsilon/mu) - exp(epsilon) Phi(-mu/2 - epsilon/mu)``, to
    about twelve digits also where the two terms nearly cancel.

  Raises:
    ValueError: If an argument is negative or NaN.

  References:
    Balle and Wang, Improving the Gaussian Mechanism for Differential Privacy,
    arXiv:1805.06530, Theorem 8.

  Examples:
    >>> from prism_optax.accounting import _gaussian
    >>> round(_gaussian.gaussian_delta(1 / 3.730632, 1.0), 9)
    1e-05
  """
  _validate.known_non_negative('mu', mu)
  _validate.known_non_negative('epsilon', epsilon)
  if mu == 0 or math.isinf(epsilon):
    return 0.0
  near = (epsilon / mu - mu / 2) / math.sqrt(2)
  far = (epsilon / mu + mu / 2) / math.sqrt(2)
  # far^2 = near^2 + epsilon: the factor exp(epsilon) of the second term cancels
  # against its tail, and nothing overflows.
  tail, second = math.exp(-near * near), _scaled_erfc(far)
  if near >= 0:
    return 0.5 * tail * (_scaled_erfc(near) - second)
  return 0.5 * (math.erfc(near) - tail * second)


def gaussian_epsilon(mu: float, delta: float) -> float:
  """Returns the exact epsilon of Gaussian releases at ``delta``.

  Inverts ``delta = Phi(mu/2 - epsilon/mu) - exp(epsilon) Phi(-mu/2 -
  epsilon/mu)`` (Balle and Wang 2018, arXiv:1805.06530, Theorem 8) by bisection.

  Args:
    mu: Sensitivity (under the neighbouring relation that is meant) over
      standard deviation of the noise per coordinate, for several releases the
      root of the sum of the squares.
    delta: Delta at which epsilon is wanted, in [0, 1].

  Returns:
    The smallest epsilon >= 0 that holds at ``delta``, rounded up; ``inf`` for
    delta 0.

  Raises:
    ValueError: If ``mu`` is negative or NaN, or ``delta`` no probability.

  Examples:
    The mechanism calibrated with the classic formula for epsilon 1, once,
    ten and a hundred times:

    >>> from prism_optax import accounting
    >>> mu = 1 / 4.8448
    >>> [round(accounting.gaussian_epsilon(mu * k**0.5, 1e-5), 2)
    ...  for k in (1, 10, 100)]
    [0.75, 2.69, 10.39]
  """
  _validate.known_probability('delta', delta)
  if gaussian_delta(mu, 0.0) <= delta:
    return 0.0
  if math.isinf(mu) or delta == 0:
    return math.inf
  return _bisect(lambda x: gaussian_delta(mu, x) > delta)[1]


def gaussian_mu(epsilon: float, delta: float) -> float:
  """Returns the largest ``mu`` that has ``epsilon`` at ``delta``.

  The inverse of :func:`gaussian_epsilon`: noise of standard deviation
  ``sensitivity / mu`` meets the target exactly, and so do several releases
  whose ``mu^2`` add up to its square (Balle and Wang 2018, arXiv:1805.06530,
  with Dong, Roth and Su, arXiv:1905.02383).

  Args:
    epsilon: A number >= 0; infinity is allowed.
    delta: Target, in [0, 1).

  Returns:
    ``mu``, rounded down; 0.0 for delta 0, which no Gaussian noise reaches.

  Raises:
    ValueError: If ``epsilon`` is negative or NaN, or ``delta`` not in [0, 1).

  Examples:
    >>> from prism_optax.accounting import _gaussian
    >>> round(1 / _gaussian.gaussian_mu(1.0, 1e-5), 6)
    3.730632
  """
  _validate.known_non_negative('epsilon', epsilon)
  _validate.known_probability('delta', delta)
  if delta == 1:
    raise ValueError(f'Expected delta < 1, got {delta=}.')
  if delta == 0:
    return 0.0
  if math.isinf(epsilon):
    return math.inf
  return _bisect(lambda x: gaussian_delta(x, epsilon) <= delta)[0]


def _bisect(is_low: Callable[[float], bool]) -> tuple[float, float]:
  """Returns the last float >= 0 at which ``is_low`` holds, and the next one."""
  low, high = 0.0, 1.0
  while is_low(high):
    low, high = high, 2 * high
  while low < (middle := (low + high) / 2) < high:
    if is_low(middle):
      low = middle
    else:
      high = middle
  return low, high


def _scaled_erfc(x: float) -> float:
  """Returns ``exp(x^2) erfc(x)`` for x >= 0."""
  if x < 10:
    return math.exp(x * x) * math.erfc(x)
  # The asymptotic series; its terms fall to 1e-16 before they rise again.
  term = total = 1.0
  for k in range(1, 13):
    term *= -(2 * k - 1) / (2 * x * x)
    total += term
  return total / (x * math.sqrt(math.pi))
