"""Exact samples of the discrete Gaussian, from a cryptographic source.

All decisions are comparisons of integers with uniformly random integers: there
is no rounding anywhere, and the law is the one that the proof is about. The
scale is a power of two, so that most of those integers are just random bits.
"""

import os

import numpy as np

# Noise in units of the grid. The finer the grid, the less a state is rounded
# (by less than stddev / 65536 a coordinate); squares of 40,000 stddevs still
# fit into 64 bits.
SCALE_BITS = 16
SCALE = 1 << SCALE_BITS


def discrete_gaussian(count: int) -> np.ndarray:
  """Returns integers with ``P(z)`` proportional to ``exp(-z^2 / 2 SCALE^2)``.

  Args:
    count: How many.

  Returns:
    int64, shape ``(count,)``, independent.

  References:
    Canonne, Kamath and Steinke, The Discrete Gaussian for Differential
    Privacy, arXiv:2004.00010, Algorithms 1 to 3 with t = sigma = SCALE.
  """
  found = np.empty(0, np.int64)
  while len(found) < count:
    # Three in four are kept; a few more than needed save another round.
    y = _discrete_laplace((count - len(found)) * 3 // 2 + 8)
    # exp(-(|y| - SCALE)^2 / (2 SCALE^2)): the exponent in units of 2^-k.
    bits = 2 * SCALE_BITS + 1
    exponent = (np.abs(y) - SCALE) ** 2
    keep = _bernoulli_exp(exponent & ((1 << bits) - 1), bits)
    whole = exponent >> bits
    keep &= _successes(whole) == whole
    found = np.concatenate([found, y[keep]])
  return found[:count]


def _discrete_laplace(count: int) -> np.ndarray:
  """About ``count / 1.6`` integers, ``P(y) ~ exp(-|y| / SCALE)``."""
  low = _random_bits(count, SCALE_BITS)
  low = low[_bernoulli_exp(low, SCALE_BITS)]
  high = _successes(np.full(len(low), np.iinfo(np.int64).max))
  magnitude = low + SCALE * high
  negative = _random_bits(len(low), 1) == 1
  # Zero has one sign only, or it would come up twice as often.
  keep = ~(negative & (magnitude == 0))
  return np.where(negative, -magnitude, magnitude)[keep]


def _successes(at_most: np.ndarray) -> np.ndarray:
  """How often an event of probability 1/e happens before it fails."""
  found = np.zeros(len(at_most), np.int64)
  active = np.flatnonzero(at_most > 0)
  while len(active):
    happened = _bernoulli_exp(np.ones(len(active), np.int64), 0)
    active = active[happened]
    found[active] += 1
    active = active[found[active] < at_most[active]]
  return found


def _bernoulli_exp(numerator: np.ndarray, bits: int) -> np.ndarray:
  """True with probability ``exp(-numerator / 2^bits)``, of at most 1."""
  result = np.zeros(len(numerator), bool)
  active = np.arange(len(numerator))
  k = 1
  while len(active):
    # An event of probability numerator / 2^bits / k, as two independent ones.
    happened = _random_bits(len(active), bits) < numerator[active]
    happened &= _random_below(len(active), k) == 0
    # The alternating series of exp(-x): stopping at an odd k counts.
    result[active[~happened]] = k % 2 == 1
    active = active[happened]
    k += 1
  return result


def _random_below(count: int, bound: int) -> np.ndarray:
  """Uniform integers below ``bound`` < 2^16, without the bias of a modulus."""
  if bound == 1:
    return np.zeros(count, np.int64)
  usable = (1 << 32) // bound * bound
  found = _random_bits(count, 32)
  while np.any(reject := found >= usable):
    found[reject] = _random_bits(int(reject.sum()), 32)
  return found % bound


def _random_bits(count: int, bits: int) -> np.ndarray:
  """Uniform integers of ``bits`` <= 62 bits, from the operating system."""
  if bits == 0:
    return np.zeros(count, np.int64)
  words = np.frombuffer(os.urandom(8 * count), np.uint64)
  return (words >> np.uint64(64 - bits)).astype(np.int64)
