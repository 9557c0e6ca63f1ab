"""How much noise a release needs, what it costs, and what signal it leaves.

The signal is measured after the clip. Before it a state of norm 177 under noise
of norm 190 looks like a ratio of 0.94; the mechanism clips it to norm 1 first,
and the ratio is 1/190.

What is computed from raw states is not private: it would tell something about
them, and is named ``nonprivate_*``. All of it runs on the host in float64.
"""

import math

import numpy as np
from dp_accounting import NeighboringRelation, dp_event

from prism_optax import _per_example, _validate
from prism_optax.accounting import _gaussian
from prism_optax.inference import _mechanism


def gaussian_stddev(
  epsilon: float, delta: float, sensitivity: float, *, method: str = 'analytic'
) -> float:
  """Returns the noise that one release needs to be (epsilon, delta)-private.

  ``sensitivity / mu`` with the largest mu for which ``Phi(mu/2 - epsilon/mu) -
  exp(epsilon) Phi(-mu/2 - epsilon/mu) <= delta`` (Balle and Wang 2018,
  Theorem 8).

  ==============================  =============================================
  ``sensitivity=0.0``             0.0
  ``delta`` of 0 or 1             ValueError: no Gaussian noise, or none needed
  ``'classic'``, epsilon above 1  as long as it suffices, then ValueError
  ==============================  =============================================

  Args:
    epsilon: Target for one release, positive; T released vectors are T
      releases.
    delta: Target for one release, in (0, 1).
    sensitivity: Largest Euclidean distance between what two neighbouring
      inputs would release without noise: :func:`hidden_state_sensitivity`. Not
      the clip norm, unless the neighbour of a query is no query.
    method: 'analytic' inverts the exact delta of the Gaussian mechanism: no
      smaller noise will do. 'classic' is ``sensitivity * sqrt(2 log(1.25 /
      delta)) / epsilon``, which is proved for epsilon < 1 only; it happens to
      suffice up to some epsilon above that (8 at delta 1e-5).

  Returns:
    Standard deviation of the noise on each coordinate, in the unit of
    ``sensitivity``.

  Raises:
    ValueError: If a number is out of its range, or the classic formula falls
      short of what ``epsilon`` needs.

  References:
    Balle and Wang, Improving the Gaussian Mechanism for Differential Privacy,
    arXiv:1805.06530; for the classic formula Dwork and Roth, The Algorithmic
    Foundations of Differential Privacy, Theorem A.1.

  Examples:
    >>> from prism_optax import inference
    >>> round(inference.gaussian_stddev(1.0, 1e-5, 1.0, method='classic'), 4)
    4.8448
    >>> round(inference.gaussian_stddev(1.0, 1e-5, 1.0), 4)
    3.7306
  """
  _validate.positive('epsilon', epsilon)
  delta = _validate.known_open_probability('delta', delta)
  _validate.non_negative('sensitivity', sensitivity)
  _validate.one_of('method', method, ('analytic', 'classic'))
  mu = _gaussian.gaussian_mu(epsilon, delta)
  if method == 'analytic':
    return sensitivity / mu
  noise_multiplier = math.sqrt(2 * math.log(1.25 / delta)) / epsilon
  if noise_multiplier * mu < 1:
    raise ValueError(
      f"method='classic' is not enough for {epsilon=}, {delta=}: it gives"
      f' {noise_multiplier:.4f} times the sensitivity, where the exact formula'
      f" needs {1 / mu:.4f}. It is proved for epsilon < 1; use 'analytic'."
    )
  return sensitivity * noise_multiplier


def hidden_state_sensitivity(
  l2_clip_norm: float, neighboring_relation: NeighboringRelation
) -> float:
  """Returns how far apart the clipped vectors of two neighbours can be.

  The diameter of the ball of radius C, or its radius: the L2 sensitivity of
  Dwork and Roth, The Algorithmic Foundations of Differential Privacy.

  Args:
    l2_clip_norm: C, the largest norm that a clipped vector (or block) has.
    neighboring_relation: ``REPLACE_ONE`` protects what a query says: another
      query in its place, whose vector may point the other way. The other two
      protect only that a vector is there rather than the zero vector.

  Returns:
    2 C under ``REPLACE_ONE``, C under the others.

  Raises:
    ValueError: If the clip norm is not positive, or the relation is not a
      ``NeighboringRelation``.

  Examples:
    >>> from prism_optax import accounting, inference
    >>> inference.hidden_state_sensitivity(
    ...   1.0, accounting.NeighboringRelation.REPLACE_ONE
    ... )
    2.0
  """
  _validate.positive('l2_clip_norm', l2_clip_norm)
  sensitivity = _per_example.sensitivity_of_sum(float(l2_clip_norm))
  return float(sensitivity(neighboring_relation))


def release_event(
  stddev: float,
  l2_clip_norm: float,
  neighboring_relation: NeighboringRelation,
  count: int = 1,
  *,
  noise: str = 'gaussian',
) -> dp_event.DpEvent:
  """Returns the event of ``count`` released vectors (or blocks).

  The event holds the sensitivity of the relation: account for it as it is,
  with the accountant's default relation. Under ``REPLACE_ONE`` an accountant
  would double once more. One release has ``mu = sensitivity / stddev`` (Dong,
  Roth and Su, arXiv:1905.02383), T of them ``mu sqrt(T)``.

  ============================  ===============================================
  ``stddev=0.0``                no budget affords it
  masked vectors                are not released: leave them out of ``count``
  vector that is not finite     counts: it is released as zero and noise
  ============================  ===============================================

  Args:
    stddev: Standard deviation of the noise on each coordinate. 0.0 is an event
      that no budget affords.
    l2_clip_norm: C, in the same unit as ``stddev``.
    neighboring_relation: Relation that the event is meant for, as for
      :func:`hidden_state_sensitivity`. There is no default: this alone makes
      a release cost as much as four.
    count: Number of vectors clipped and noised one by one. One block of T
      vectors that is clipped as a whole counts once. How many vectors are
      released is not hidden by the noise on them: a number of tokens that
      depends on the query is an output of its own.
    noise: 'gaussian', or 'discrete' for :func:`privatize_on_host`, which
      satisfies concentrated privacy (``rho = mu^2 / 2``) and needs an
      accountant for that: ``PrivacyBudget`` counts it by 'renyi'.

  Returns:
    A dp-accounting event for ``accounting.PrivacyBudget.spend`` or
    ``accounting.epsilon``.

  Raises:
    ValueError: If an argument is out of its range.

  Examples:
    A prompt of 256 tokens costs 256 releases, not one:

    >>> from prism_optax import accounting, inference
    >>> relation = accounting.NeighboringRelation.REPLACE_ONE
    >>> event = inference.release_event(4.8448, 1.0, relation, 256)
    >>> round(accounting.PrivacyBudget(50.0, 1e-5).spend(event, 'alice'), 1)
    49.2
  """
  _validate.non_negative('stddev', stddev)
  sensitivity = hidden_state_sensitivity(l2_clip_norm, neighboring_relation)
  _validate.integer('count', count, 1)
  _validate.one_of('noise', noise, ('gaussian', 'discrete'))
  sigma = float(stddev) / sensitivity
  event: dp_event.DpEvent = dp_event.GaussianDpEvent(sigma)
  if noise == 'discrete' and sigma:
    event = dp_event.ZCDpEvent(0.5 / sigma**2)
  if count == 1:
    return event
  return dp_event.SelfComposedDpEvent(event, int(count))


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
