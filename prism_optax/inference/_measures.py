"""How much of the signal is left, measured after the clip.

Before the clip a state of norm 177 under noise of norm 190 looks like a ratio
of 0.94. The mechanism clips it to norm 1 first: the ratio is 1/190.

What is computed from raw states is not private: it would tell something about
them, and is named ``nonprivate_*``. All of it runs on the host in float64.
"""

import math

import numpy as np

from prism_optax import _validate
from prism_optax.inference import _mechanism


def signal_to_noise_bound(
  l2_clip_norm: float, stddev: float, size: int
) -> float:
  """Returns the best ratio of norms that a release can have.

  ``C / (stddev sqrt(size))`` (ours): the norm of a clipped state over the root
  mean square norm of its noise. It reads no state, so it may be published.

  Args:
    l2_clip_norm: C, the largest norm after the clip.
    stddev: Standard deviation of the noise on each coordinate, in the unit of
      C.
    size: Number of coordinates of a vector, or of a whole block.

  Returns:
    The ratio, ``inf`` without noise.

  Raises:
    ValueError: If an argument is out of its range.

  Examples:
    >>> from prism_optax import inference
    >>> round(1 / inference.signal_to_noise_bound(1.0, 4.8448, 1536))
    190
  """
  _validate.positive('l2_clip_norm', l2_clip_norm)
  _validate.non_negative('stddev', stddev)
  _validate.integer('size', size, 1)
  return l2_clip_norm / stddev / math.sqrt(size) if stddev else math.inf


def nonprivate_signal_to_noise(
  hidden: np.ndarray,
  *,
  l2_clip_norm: float,
  stddev: float,
  block_ndim: int = 1,
) -> np.ndarray:
  """Returns each release's norm after the clip over the noise's norm.

  ``||clip(h)|| / (stddev sqrt(d))`` (ours). Not private: it depends on the
  states.

  Args:
    hidden: States, as for :func:`privatize_on_host`.
    l2_clip_norm: C, the largest norm after the clip.
    stddev: Standard deviation of the noise on each coordinate, positive.
    block_ndim: Number of trailing axes that are clipped together.

  Returns:
    Ratios in float64, one per vector or block: the shape of ``hidden`` without
    its last ``block_ndim`` axes. The noise's norm is the root of its mean
    square. 0.0 for those with a coordinate that is not finite.

  Raises:
    ValueError: If an argument is out of its range or a shape does not fit.

  Examples:
    >>> import numpy as np
    >>> from prism_optax import inference
    >>> inference.nonprivate_signal_to_noise(
    ...   np.array([[0.0, 0.5, 0, 0], [8.0, 0, 0, 0]]),
    ...   l2_clip_norm=1.0, stddev=0.5,
    ... ).round(3).tolist()
    [0.5, 1.0]
  """
  _validate.positive('stddev', stddev)
  states = np.asarray(hidden, np.float64)
  clipped = _mechanism.clip(states, l2_clip_norm, block_ndim=block_ndim)
  norms = np.sqrt(np.sum(np.square(clipped), axis=tuple(range(-block_ndim, 0))))
  size = math.prod(clipped.shape[-block_ndim:])
  ratios: np.ndarray = norms / (stddev * math.sqrt(size or 1))
  return ratios


def rank_attenuation(left: np.ndarray, right: np.ndarray) -> float:
  """Returns how much less a LoRA module amplifies noise than its best signal.

  Of white noise on n coordinates the module passes the root mean square
  ``||Z||_F / sqrt(n)`` per unit, of the signal it is most sensitive to
  ``||Z||_2``. With r equal singular values their ratio is ``sqrt(r / n)``, the
  gain that a projection to rank r is often credited with; a state that does
  not lie in those r directions gains nothing: it is attenuated like the noise.
  The measure is ours; it reads no state.

  Args:
    left: Output side, shape ``(m, r)``.
    right: Input side, shape ``(n, r)``.

  Returns:
    ``||Z||_F / (||Z||_2 sqrt(n))`` with ``Z = left @ right.T``, at most
    ``sqrt(r / n)``; 0.0 for Z = 0.

  Raises:
    ValueError: If the shapes do not fit.

  Examples:
    >>> import numpy as np
    >>> from prism_optax import inference
    >>> eye = np.eye(1536, 32)
    >>> round(1 / inference.rank_attenuation(eye, eye), 1)
    6.9
  """
  _mechanism.check_factors(left, right)
  values = _singular_values(left, right)
  frobenius, largest = float(np.linalg.norm(values)), float(values.max())
  return frobenius / (largest or 1.0) / math.sqrt(np.shape(right)[0])


def nonprivate_delta_signal_to_noise(
  hidden: np.ndarray,
  left: np.ndarray,
  right: np.ndarray,
  *,
  l2_clip_norm: float,
  stddev: float,
) -> np.ndarray:
  """Returns the ratio of signal and noise in the LoRA delta.

  ``||Z clip(h)|| / (stddev ||Z||_F)`` (ours). Not private: it depends on the
  states.

  Args:
    hidden: States, shape ``(..., n)``, released vector by vector.
    left: Output side, shape ``(m, r)``.
    right: Input side, shape ``(n, r)``.
    l2_clip_norm: C, the largest norm after the clip.
    stddev: Standard deviation of the noise on each coordinate, positive.

  Returns:
    Ratios in float64, shape ``hidden.shape[:-1]``; the LoRA scale cancels. 0.0
    for Z = 0 and for states that are not finite.

  Raises:
    ValueError: If an argument is out of its range or a shape does not fit.

  Examples:
    >>> import numpy as np
    >>> from prism_optax import inference
    >>> inference.nonprivate_delta_signal_to_noise(
    ...   np.array([[2.0, 0.0], [0.0, 2.0]]), np.eye(3, 1), np.eye(2, 1),
    ...   l2_clip_norm=1.0, stddev=0.5,
    ... ).round(3).tolist()
    [2.0, 0.0]
  """
  _validate.positive('stddev', stddev)
  _mechanism.check_factors(left, right, hidden)
  states, left, right = (
    np.asarray(x, np.float64) for x in (hidden, left, right)
  )
  clipped = _mechanism.clip(states, l2_clip_norm)
  signal = np.linalg.norm((clipped @ right) @ left.T, axis=-1)
  noise = stddev * float(np.linalg.norm(_singular_values(left, right)))
  ratios: np.ndarray = signal / (noise or 1.0)
  return ratios


def _singular_values(left: np.ndarray, right: np.ndarray) -> np.ndarray:
  """Singular values of left @ right.T, without forming it."""
  left, right = np.asarray(left, np.float64), np.asarray(right, np.float64)
  core = np.linalg.qr(left)[1] @ np.linalg.qr(right)[1].T
  return np.linalg.svd(core, compute_uv=False)
