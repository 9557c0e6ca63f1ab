"""How much noise a release needs, and what it costs. All of it on the host."""

import math

from dp_accounting import NeighboringRelation, dp_event

from prism_optax import _clip, _validate
from prism_optax.accounting import _gaussian


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
    sensitivity: Largest Euclidean distance between the results of two
      neighbouring inputs without noise: :func:`hidden_state_sensitivity`. Not
      the clip norm, unless the neighbour of a query is no query.
    method: 'analytic' inverts the exact delta of the Gaussian mechanism: no
      smaller noise will do. 'classic' is ``sensitivity * sqrt(2 log(1.25 /
      delta)) / epsilon``, which is proved for epsilon < 1 only; it happens to
      suffice up to some epsilon above that (8 at delta 1e-5).

  Returns:
    Standard deviation of the noise on each coordinate, in the unit of
    ``sensitivity``.

  Raises:
    ValueError: If a number is out of its range, or the classic formula gives
      too little noise for ``epsilon``.

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
    neighboring_relation: ``REPLACE_ONE`` protects the content of a query,
      because another query in its place may have a vector in the opposite
      direction. The other two protect only the presence of a vector.

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
  sensitivity = _clip.sensitivity_of_sum(float(l2_clip_norm))
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
  Roth and Su, arXiv:1905.02383), T of them ``mu sqrt(T)``. The event is that of
  ideal Gaussian noise. For a million numbers, at epsilon 8 or less, the noise
  as it is drawn adds less than 1e-6 to epsilon and 1e-9 to delta
  (``accounting.epsilon(..., entries=...)`` includes it).

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
      :func:`hidden_state_sensitivity`. It has no default, because it can make a
      release cost as much as four.
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
