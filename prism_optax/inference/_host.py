"""The mechanism on the host, with noise that stands up to a close look.

The discrete Gaussian is sampled exactly: all decisions are comparisons of
integers with uniformly random integers. There is no rounding anywhere, and the
law is the one that the proof is about. Its scale is a power of two, so that
most of those integers are just random bits.
"""

import os

import numpy as np
import numpy.typing as npt

from prism_optax import _validate
from prism_optax.inference import _mechanism

Integers = npt.NDArray[np.int64]

# Noise in units of the grid. The finer the grid, the less a state is rounded
# (by less than stddev / 65536 a coordinate); squares of 40,000 stddevs still
# fit into 64 bits.
_SCALE_BITS = 16
_SCALE = 1 << _SCALE_BITS
# A state in units of the grid is an integer that a float64 holds exactly.
_LARGEST_RATIO = 2.0**36


def privatize_on_host(
  hidden: np.ndarray,
  *,
  l2_clip_norm: float,
  stddev: float,
  mask: np.ndarray | None = None,
  block_ndim: int = 1,
) -> np.ndarray:
  """Like :func:`privatize_hidden_states`, with integers that are drawn exactly.

  A Gaussian computed in floating point is not a Gaussian: which numbers can
  come out depends on what the noise is added to, and whoever sees all bits of
  enough sums can tell neighbours apart with certainty (Mironov 2012, for
  Laplace; Jin et al., arXiv:2112.05307, for Gaussian noise). Casting the sum to
  a narrow type, or releasing only the output of a LoRA module on it, helps but
  proves nothing. Here the clipped state is rounded towards zero to a grid of
  stddev / 65536, which does not lengthen it, and the noise is a discrete
  Gaussian on that grid, sampled exactly from the system's entropy: sums of
  integers have no gaps.

  **Privacy.** Each vector (block) satisfies ``rho = (sensitivity / stddev)^2 /
  2`` concentrated differential privacy, for the bits that are released. The
  sensitivity follows from the neighbouring relation and C
  (:func:`hidden_state_sensitivity`); C and ``stddev`` are in the unit of the
  states, ``stddev`` per coordinate. T vectors are T releases: account for them
  by :func:`release_event` with ``noise='discrete'``. Not covered: how many
  vectors there are, the mask, and time: how long sampling takes depends on the
  noise, not on the state.

  =============================  ==============================================
  coordinate with NaN or Inf     its vector (block) counts as zero
  zero vector                    noise alone
  masked vector                  zeros without noise, whatever stands there
  no vectors                     an empty array
  ``stddev=0.0``                 clips only: no privacy
  stddev below C / 2**36         ValueError: the grid would not be exact
  =============================  ==============================================

  Args:
    hidden: States, shape ``(..., d)``, or ``(..., T, d)`` with blocks; anything
      that NumPy turns into float64.
    l2_clip_norm: C, positive, in the unit of the states.
    stddev: Standard deviation of the noise on each coordinate, in the unit of
      the states. 0.0 only clips.
    mask: Booleans, shape ``hidden.shape[:-1]``, True for vectors that are
      present. The mask is public.
    block_ndim: Number of trailing axes that are clipped together, 1 or more.

  Returns:
    float64, the shape of ``hidden``.

  Raises:
    ValueError: If an argument is out of its range or a shape does not fit.

  References:
    Canonne, Kamath and Steinke, arXiv:2004.00010: the discrete Gaussian of
    parameter sigma satisfies ``Delta^2 / (2 sigma^2)`` concentrated privacy.

  Examples:
    >>> import numpy as np
    >>> from prism_optax import inference
    >>> noised = inference.privatize_on_host(
    ...   170.0 * np.ones((5, 16)), l2_clip_norm=1.0, stddev=4.8
    ... )
    >>> noised.shape, noised.dtype
    ((5, 16), dtype('float64'))
  """
  _validate.non_negative('stddev', stddev)
  states = np.asarray(hidden, np.float64)
  states = _mechanism.clip(states, l2_clip_norm, mask, block_ndim)
  if stddev == 0:
    return states
  if l2_clip_norm > _LARGEST_RATIO * stddev:
    raise ValueError(
      f'Expected stddev >= l2_clip_norm / {_LARGEST_RATIO:g}, or 0, got'
      f' {stddev=}, {l2_clip_norm=}.'
    )
  # A power of two times stddev: exact, as is what the accountant assumes.
  grid = float(stddev) / _SCALE
  on_grid = (states / grid).astype(np.int64)  # Towards zero.
  draws = _discrete_gaussian(on_grid.size).reshape(on_grid.shape)
  noised: np.ndarray = (on_grid + draws) * grid
  if mask is not None:
    noised = np.where(np.asarray(mask, bool)[..., None], noised, 0.0)
  return noised


def _discrete_gaussian(count: int) -> Integers:
  """Returns integers with ``P(z)`` proportional to ``exp(-z^2 / 2 SCALE^2)``.

  Args:
    count: Number of integers.

  Returns:
    Independent int64, shape ``(count,)``.

  References:
    Canonne, Kamath and Steinke, The Discrete Gaussian for Differential
    Privacy, arXiv:2004.00010, Algorithms 1 to 3 with t = sigma = SCALE.
  """
  found = np.empty(0, np.int64)
  while len(found) < count:
    # Three in four are kept; a few more than needed save another round.
    y = _discrete_laplace((count - len(found)) * 3 // 2 + 8)
    # exp(-(|y| - SCALE)^2 / (2 SCALE^2)): the exponent in units of 2^-k.
    bits = 2 * _SCALE_BITS + 1
    exponent = (np.abs(y) - _SCALE) ** 2
    keep = _bernoulli_exp(exponent & ((1 << bits) - 1), bits)
    whole = exponent >> bits
    keep &= _successes(whole) == whole
    found = np.concatenate([found, y[keep]])
  return found[:count]


def _discrete_laplace(count: int) -> Integers:
  """About ``count / 1.6`` integers, ``P(y) ~ exp(-|y| / SCALE)``."""
  low = _random_bits(count, _SCALE_BITS)
  low = low[_bernoulli_exp(low, _SCALE_BITS)]
  high = _successes(np.full(len(low), np.iinfo(np.int64).max))
  magnitude: Integers = low + _SCALE * high
  negative = _random_bits(len(low), 1) == 1
  # Zero has one sign only, or it would come up twice as often.
  keep: npt.NDArray[np.bool_] = ~(negative & (magnitude == 0))
  magnitude[negative] *= -1
  return magnitude[keep]


def _successes(at_most: Integers) -> Integers:
  """How often an event of probability 1/e happens before it fails."""
  found = np.zeros(len(at_most), np.int64)
  active = np.flatnonzero(at_most > 0)
  while len(active):
    happened = _bernoulli_exp(np.full(len(active), 2, np.int64), 1)
    active = active[happened]
    found[active] += 1
    active = active[found[active] < at_most[active]]
  return found


def _bernoulli_exp(numerator: Integers, bits: int) -> npt.NDArray[np.bool_]:
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


def _random_below(count: int, bound: int) -> Integers:
  """Uniform integers below ``bound`` < 2^16, without the bias of a modulus."""
  usable = (1 << 32) // bound * bound
  found = _random_bits(count, 32)
  while np.any(reject := found >= usable):
    found[reject] = _random_bits(reject.sum(), 32)
  return found % bound


def _random_bits(count: int, bits: int) -> Integers:
  """Uniform integers of 1 to 62 ``bits``, from the operating system."""
  words = np.frombuffer(os.urandom(8 * count), np.uint64)
  return (words >> np.uint64(64 - bits)).astype(np.int64)
