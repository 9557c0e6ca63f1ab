"""The mechanism on the host, with noise that stands up to a close look."""

import os

import numpy as np

from prism_optax import _validate
from prism_optax.inference import _discrete_gaussian
from prism_optax.inference._calibration import NOISES

_MARGIN = 1e-9  # Norms are computed in float64.
# A state in units of the grid is an integer that a float64 holds exactly.
_LARGEST_RATIO = 2.0**36


def privatize_on_host(
  hidden: np.ndarray,
  *,
  l2_clip_norm: float,
  stddev: float,
  mask: np.ndarray | None = None,
  block_ndim: int = 1,
  noise: str = 'discrete',
) -> np.ndarray:
  """Like :func:`privatize_hidden_states`, in NumPy, with the system's entropy.

  A Gaussian computed in floating point is not a Gaussian: which numbers can
  come out depends on what the noise is added to, and whoever sees all bits of
  enough sums can tell neighbours apart with certainty (Mironov 2012, for
  Laplace; Jin et al., arXiv:2112.05307, for Gaussian noise). Casting the sum to
  a narrow type, or releasing only what a LoRA module makes of it, helps but
  proves nothing. With ``noise='discrete'`` the clipped state is rounded towards
  zero to a grid of stddev / 65536, which does not lengthen it, and the noise is
  a discrete Gaussian on that grid, sampled exactly: sums of integers have no
  gaps. What remains open is time: how long sampling takes depends on the noise
  (not on the state). Neighbours are what :func:`hidden_state_sensitivity` says.

  =============================  ==============================================
  coordinate with NaN or Inf     its vector (block) counts as zero
  zero vector                    noise alone
  masked vector                  zeros without noise, whatever stands there
  no vectors                     an empty array
  ``stddev=0.0``                 clips only: no privacy
  stddev below C / 2**36         ValueError with ``'discrete'``: the grid would
                                 not be exact
  =============================  ==============================================

  Args:
    hidden: States, shape ``(..., d)``, or ``(..., T, d)`` with blocks; anything
      that NumPy turns into float64.
    l2_clip_norm: C, positive, in the unit of the states.
    stddev: Of the noise on each coordinate, in the unit of the states. 0.0 only
      clips.
    mask: Booleans, shape ``hidden.shape[:-1]``, True for vectors that are
      there; public.
    block_ndim: Number of trailing axes that are clipped together, 1 or more.
    noise: 'discrete' as above; account for it by :func:`release_event` with
      ``noise='discrete'``. 'gaussian' draws float64 normals from the same
      source, with the exact accounting of the continuous Gaussian and its
      floating-point caveat.

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
  _validate.one_of('noise', noise, NOISES)
  states = clip_on_host(
    hidden, l2_clip_norm=l2_clip_norm, mask=mask, block_ndim=block_ndim
  )
  stddev = float(stddev)
  if stddev == 0:
    return states
  if noise == 'discrete':
    if l2_clip_norm > _LARGEST_RATIO * stddev:
      raise ValueError(
        f'Expected stddev >= l2_clip_norm / {_LARGEST_RATIO:g}, or 0, with'
        f" noise='discrete', got {stddev=}, {l2_clip_norm=}."
      )
    # A power of two times stddev: exact, as is what the accountant assumes.
    grid = stddev / _discrete_gaussian.SCALE
    on_grid = np.trunc(states / grid).astype(np.int64)
    draws = _discrete_gaussian.discrete_gaussian(on_grid.size)
    noised = (on_grid + draws.reshape(on_grid.shape)) * grid
  else:
    noised = states + stddev * _normal(states.size).reshape(states.shape)
  if mask is not None:
    noised = np.where(np.asarray(mask, bool)[..., None], noised, 0.0)
  return noised


def clip_on_host(
  hidden: np.ndarray,
  *,
  l2_clip_norm: float,
  mask: np.ndarray | None = None,
  block_ndim: int = 1,
) -> np.ndarray:
  """Returns the states that the noise is added to, in float64."""
  _validate.positive('l2_clip_norm', l2_clip_norm)
  _validate.integer('block_ndim', block_ndim, 1)
  states = np.array(hidden, np.float64)  # A copy: it is written to.
  if states.ndim < block_ndim:
    raise ValueError(
      f'Expected hidden to have {block_ndim} axes or more, got {states.shape=}.'
    )
  if mask is not None:
    if np.shape(mask) != states.shape[:-1]:
      raise ValueError(
        f'Expected mask to have the shape {states.shape[:-1]}, got'
        f' {np.shape(mask)}.'
      )
    states[~np.asarray(mask, bool)] = 0
  axes = tuple(range(-block_ndim, 0))
  finite = np.all(np.isfinite(states), axis=axes, keepdims=True)
  states = np.where(finite, states, 0.0)
  largest = np.max(np.abs(states), axis=axes, keepdims=True, initial=0.0)
  tiny = largest < np.finfo(np.float64).tiny
  unit = np.where(tiny, 1.0, largest)
  direction = np.where(tiny, 0.0, states / unit)
  norm = np.sqrt(np.sum(np.square(direction), axis=axes, keepdims=True))
  bound = float(l2_clip_norm) * (1 - _MARGIN)
  return direction * np.minimum(unit, bound / np.maximum(norm, 1))


def _normal(count: int) -> np.ndarray:
  """Standard normals by the method of Box and Muller."""
  words = np.frombuffer(os.urandom(16 * count), np.uint64).reshape(2, count)
  # 53 bits, shifted by a half: in (0, 1), never zero.
  uniform = ((words >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
  return np.sqrt(-2 * np.log(uniform[0])) * np.cos(2 * np.pi * uniform[1])
