"""The rank preconditioner in orthonormal tangent coordinates, on arrays.

A tangent vector has a core ``D = Q_L^T T Q_R`` (r, r) and two outer blocks,
``X_L`` and ``X_R' = X_R - Q_R D^T``. Each rank index has a second moment, in
which the core is counted on both sides::

  V_L <- b2 V_L + (1 - b2) (X_L^T X_L + D^T D) / m      on the Q_R index
  V_R <- b2 V_R + (1 - b2) (X_R'^T X_R' + D D^T) / n    on the Q_L index

so that transposing the module exchanges the two, and isotropic tangent noise
of variance s^2 adds exactly ``s^2 I`` to either. The steps are ``m_L P_L``,
``m_R' P_R`` and ``(P_R m_D + m_D P_L) / 2`` for the core, ``P = V^(-1/2)``
floored. (PRISM, arXiv:2606.00944, Eq. 24-27, works on the factors of a lift;
there the core's share and the noise depend on the gauge.)
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from prism_optax import _linalg, fixed_rank
from prism_optax._linalg import gram, matmul
from prism_optax.fixed_rank import Anchored, Frame, Tangent


class RankMatrices(NamedTuple):
  """Symmetric r x r matrices of a stack of k modules.

  Attributes:
    left: (k, r, r), acts on the columns of ``X_L`` (the index of ``Q_R``).
    right: (k, r, r), acts on the columns of ``X_R`` (the index of ``Q_L``).
  """

  left: jax.Array
  right: jax.Array


class Moments(NamedTuple):
  """What one stack of modules remembers.

  Attributes:
    mu: First moment, and the bases that all is written in: ``[mu_L, Q_L]``
      (k, m, 2r) and ``[mu_R, Q_R]`` (k, n, 2r).
    nu: Second moments V.
    noise: The noise covariance that ``nu`` has seen, with the same decay.
  """

  mu: Anchored
  nu: RankMatrices
  noise: RankMatrices


def init_moments(tangent: Tangent) -> Moments:
  """Zeros; ``tangent`` gives shapes and type.

  Each in an array of its own: a state may be donated, and no buffer twice.
  """

  zeros = jax.tree.map(jnp.zeros_like, tangent)

  def squares():
    return RankMatrices(*(gram(x, x) for x in zeros))

  return Moments(fixed_rank.anchor(zeros, zeros), squares(), squares())


def on_both_sides(fn, left: jax.Array, right: jax.Array):
  """One batched call for the r x r matrices of both sides."""
  both = fn(jnp.concatenate([left, right]))
  return jnp.split(both, 2)


def move(moments: Moments, frame: Frame) -> tuple[Tangent, Moments]:
  """Writes the moments in a new frame (vector transport).

  The first moment is projected on the new tangent space. Second moments turn
  by the polar factors of the overlaps: the overlaps themselves are
  contractions and would shrink V a little at every step.
  """
  mu, (overlap_left, overlap_right) = fixed_rank.carry(moments.mu, frame)
  turn_left, turn_right = on_both_sides(
    _linalg.polar, overlap_right, overlap_left
  )

  def turned(x: RankMatrices) -> RankMatrices:
    return RankMatrices(
      gram(turn_left, matmul(x.left, turn_left)),
      gram(turn_right, matmul(x.right, turn_right)),
    )

  return mu, Moments(
    moments.mu,
    turned(moments.nu),
    turned(moments.noise),
  )


def stay(moments: Moments, frame: Frame) -> tuple[Tangent, Moments]:
  """Reads the old coordinates in the new frame, without transport."""
  rank = frame.left.shape[-1]
  mu = Tangent(*(x[..., :rank] for x in moments.mu))
  return fixed_rank.project(frame, mu), moments


def accumulate(
  moments: Moments,
  frame: Frame,
  tangent: Tangent,
  b1,
  b2,
  variance,
  transport: bool,
) -> Moments:
  """One step of the exponential averages.

  Args:
    moments: As they were left by the last step.
    frame: The current frame.
    tangent: Noisy mean gradient, coordinates.
    b1: Decay of the first moment.
    b2: Decay of the second moments.
    variance: s^2, the noise variance per coordinate in ``tangent``.
    transport: Whether the moments are written in the current frame first.
  """
  mu, moments = (move if transport else stay)(moments, frame)
  core = gram(tangent.right, frame.right)
  m, n = tangent.left.shape[-2], tangent.right.shape[-2]
  seen = RankMatrices(
    (gram(tangent.left, tangent.left) + gram(core, core)) / m,
    # X_R = X_R' + Q_R D^T holds the core already.
    gram(tangent.right, tangent.right) / n,
  )
  known = RankMatrices(variance * frame.right_mask, variance * frame.left_mask)

  def average(decay, old: Any, new: Any) -> Any:
    return jax.tree.map(lambda x, y: decay * x + (1 - decay) * y, old, new)

  return Moments(
    fixed_rank.anchor(frame, average(b1, mu, tangent)),
    average(b2, moments.nu, seen),
    average(b2, moments.noise, known),
  )


def direction(
  moments: Moments,
  frame: Frame,
  *,
  mu_correction,
  nu_correction,
  eps,
  floor_factor,
  debias: bool,
  max_condition_number,
) -> Tangent:
  """The preconditioned first moment, in tangent coordinates.

  Args:
    moments: After :func:`accumulate`.
    frame: The current frame.
    mu_correction: ``1 - b1^t``, or 1.
    nu_correction: ``1 - b2^t``.
    eps: Added to the roots of the eigenvalues, as in Adam.
    floor_factor: The floor in units of the mean noise eigenvalue over the
      observed directions.
    debias: Subtract the noise covariance from V first.
    max_condition_number: Of the floored V.
  """
  noise = jax.tree.map(lambda x: x / nu_correction, moments.noise)
  nu = jax.tree.map(lambda x: x / nu_correction, moments.nu)
  if debias:
    nu = jax.tree.map(jnp.subtract, nu, noise)

  def floor(covariance, mask):
    # The trace of a mask counts the observed directions; the others hold no
    # noise.
    trace, observed = (
      jnp.trace(x, axis1=-2, axis2=-1) for x in (covariance, mask)
    )
    return floor_factor * trace / jnp.maximum(observed, 1)

  floors = jnp.concatenate(
    [floor(noise.left, frame.right_mask), floor(noise.right, frame.left_mask)]
  )
  p_left, p_right = on_both_sides(
    lambda x: _linalg.inverse_sqrt(
      x, floor=floors, max_condition_number=max_condition_number, eps=eps
    ),
    nu.left,
    nu.right,
  )
  p_left, p_right = p_left / mu_correction, p_right / mu_correction
  core = gram(moments.mu.right, frame.right)[..., : frame.right.shape[-1], :]
  new_core = (matmul(p_right, core) + matmul(core, p_left)) / 2
  # X_R is X_R' + Q_R D^T: what p_right makes of the core is replaced.
  change = new_core - matmul(p_right, core)
  return Tangent(
    matmul(moments.mu.left, _stacked(p_left, jnp.zeros_like(p_left))),
    matmul(moments.mu.right, _stacked(p_right, change.mT)),
  )


def _stacked(upper: jax.Array, lower: jax.Array) -> jax.Array:
  """Coefficients of an anchored side: of the coordinates and of the basis."""
  return jnp.concatenate([upper, lower], -2)
