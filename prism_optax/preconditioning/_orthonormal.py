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

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from prism_optax import _linalg, fixed_rank
from prism_optax._linalg import gram, matmul
from prism_optax.fixed_rank import (
  Combination,
  Factors,
  Frame,
  RankMatrices,
  Tangent,
)


class Moments(NamedTuple):
  """What one stack of modules remembers.

  Attributes:
    mu: First moment, (k, m, r) and (k, n, r).
    bases: ``Q_L`` (k, m, r) and ``Q_R`` (k, n, r), that all is written in.
    nu: Second moments V: (k, r, r) on the columns of ``X_L`` (the index of
      ``Q_R``), and on those of ``X_R`` (the index of ``Q_L``).
    noise: The noise covariance that ``nu`` has seen, with the same decay.
  """

  mu: Tangent
  bases: Factors
  nu: RankMatrices
  noise: RankMatrices


def init_moments(tangent: Tangent) -> Moments:
  """Zeros; ``tangent`` gives shapes and type.

  Each in an array of its own: a state may be donated, and no buffer twice.
  """

  def zeros():
    return jax.tree.map(jnp.zeros_like, tangent)

  def squares():
    return RankMatrices(*(gram(x, x) for x in zeros()))

  return Moments(zeros(), Factors(*zeros()), squares(), squares())


def on_both_sides(fn, left: jax.Array, right: jax.Array):
  """One batched call for the r x r matrices of both sides."""
  both = fn(jnp.concatenate([left, right]))
  return jnp.split(both, 2)


class _Carried(NamedTuple):
  """The old moments in a new frame, mu not multiplied out.

  Attributes:
    left: ``mu_L`` as a sum of products of arrays (k, m, r) and (k, r, r), less
      ``Q_L removed``.
    right: ``mu_R`` likewise, with nothing removed.
    removed: (k, r, r).
    core: ``Q_L^T mu Q_R``.
    nu: As in the moments.
    noise: As in the moments.
  """

  left: list[tuple[jax.Array, jax.Array]]
  right: list[tuple[jax.Array, jax.Array]]
  removed: jax.Array
  core: jax.Array
  nu: RankMatrices
  noise: RankMatrices


def _transported(moments: Moments, frame: Frame) -> _Carried:
  """By vector transport.

  The first moment is projected on the new tangent space. Second moments turn
  by the polar factors of the overlaps: the overlaps themselves are
  contractions and would shrink V a little at every step.
  """
  mu, bases, nu, noise = moments
  weights, old, core, overlaps = fixed_rank.carry(bases, frame, mu)
  turn_left, turn_right = on_both_sides(
    _linalg.polar, overlaps.right, overlaps.left
  )

  def turned(x: RankMatrices) -> RankMatrices:
    return RankMatrices(
      gram(turn_left, matmul(x.left, turn_left)),
      gram(turn_right, matmul(x.right, turn_right)),
    )

  return _Carried(
    [(mu.left, weights.left), (bases.left, old.left)],
    [(mu.right, weights.right), (bases.right, old.right)],
    core,
    core,
    turned(nu),
    turned(noise),
  )


def _as_read(moments: Moments, frame: Frame) -> _Carried:
  """The old coordinates read in the new frame, without transport."""
  mu = fixed_rank.projection(frame, moments.mu)
  return _Carried(
    [(mu.columns.left, mu.weights.left)],
    [(mu.columns.right, mu.weights.right)],
    -mu.shift.left,
    fixed_rank.products(frame, mu).along.right.mT,
    moments.nu,
    moments.noise,
  )


def _mean(b1, old: _Carried, frame: Frame, x: Combination) -> Tangent:
  """``b1 mu + (1 - b1) X``, multiplied out, each array once."""
  new = 1 - b1
  left = [(array, b1 * weights) for array, weights in old.left]
  right = [(array, b1 * weights) for array, weights in old.right]
  left.append((x.columns.left, new * x.weights.left))
  right.append((x.columns.right, new * x.weights.right))
  shift = -b1 * old.removed
  if x.shift.left is not None:
    shift = shift + new * x.shift.left
  left.append((frame.left, shift))
  if x.shift.right is not None:
    right.append((frame.right, new * x.shift.right))

  def total(terms):
    return functools.reduce(jnp.add, (matmul(*term) for term in terms))

  return Tangent(total(left), total(right))


def accumulate(
  moments: Moments,
  frame: Frame,
  tangent: Tangent | Combination,
  b1,
  b2,
  variance,
  transport: bool,
) -> tuple[Moments, jax.Array]:
  """One step of the exponential averages.

  Args:
    moments: As they were left by the last step.
    frame: The current frame.
    tangent: Noisy mean gradient.
    b1: Decay of the first moment.
    b2: Decay of the second moments.
    variance: s^2, the noise variance per coordinate in ``tangent``.
    transport: Whether the moments are written in the current frame first.

  Returns:
    The moments, and the core ``Q_L^T mu Q_R`` of the first of them, (k, r, r).
  """
  old = (_transported if transport else _as_read)(moments, frame)
  x = fixed_rank.combination(frame, tangent)
  along, squares = fixed_rank.products(frame, x)
  m, n = x.columns.left.shape[-2], x.columns.right.shape[-2]
  seen = RankMatrices(
    (squares.left + matmul(along.right, along.right.mT)) / m,  # D^T D
    # X_R = X_R' + Q_R D^T holds the core already.
    squares.right / n,
  )
  known = RankMatrices(variance * frame.right_mask, variance * frame.left_mask)

  def average(x: RankMatrices, y: RankMatrices) -> RankMatrices:
    return jax.tree.map(lambda x, y: b2 * x + (1 - b2) * y, x, y)

  moments = Moments(
    _mean(b1, old, frame, x),
    Factors(frame.left, frame.right),
    average(old.nu, seen),
    average(old.noise, known),
  )
  return moments, b1 * old.core + (1 - b1) * along.right.mT


def direction(
  moments: Moments,
  core: jax.Array,
  frame: Frame,
  *,
  mu_correction,
  nu_correction,
  eps,
  floor_factor,
  debias: bool,
  max_condition_number,
) -> Combination:
  """The preconditioned first moment.

  Args:
    moments: After :func:`accumulate`.
    core: Of their first moment, likewise.
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
  new_core = (matmul(p_right, core) + matmul(core, p_left)) / 2
  # X_R is X_R' + Q_R D^T: what p_right makes of the core is replaced.
  change = new_core - matmul(p_right, core)
  return Combination(
    moments.mu,
    RankMatrices(None, core.mT),
    RankMatrices(p_left, p_right),
    RankMatrices(None, change.mT),
  )
