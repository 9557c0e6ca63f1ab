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

from typing import NamedTuple

import jax
import jax.numpy as jnp

from prism_optax._linalg import _products
from prism_optax._linalg._products import gram, matmul
from prism_optax._types import DTypeLike, Scalar
from prism_optax.fixed_rank import Factors, Tangent
from prism_optax.fixed_rank._points import Frame
from prism_optax.fixed_rank._tangents import (
  TangentSum,
  as_sum,
  multiply_out,
  sum_at,
  transport_sum,
)


class Options(NamedTuple):
  """What the averages and the direction of one step are computed with.

  Attributes:
    b1: Decay of the first moment.
    b2: Decay of the second moments.
    eps: Added to the roots of the eigenvalues, as in Adam.
    floor_factor: The floor in units of the mean noise eigenvalue over the
      observed directions.
    max_condition_number: Largest condition number of the floored V.
    variance: s^2, the noise variance per coordinate in the gradient.
    mu_correction: ``1 - b1^t``, or 1.
    nu_correction: ``1 - b2^t``.
  """

  b1: Scalar
  b2: Scalar
  eps: Scalar
  floor_factor: Scalar
  max_condition_number: Scalar
  variance: Scalar = 0.0
  mu_correction: Scalar = 1.0
  nu_correction: Scalar = 1.0

  def of_step(
    self, dtype: DTypeLike, variance: jax.Array, mu: Scalar, nu: jax.Array
  ) -> 'Options':
    """With the numbers that change from step to step, in a type."""
    variance, mu, nu = (jnp.asarray(x, dtype) for x in (variance, mu, nu))
    return self._replace(variance=variance, mu_correction=mu, nu_correction=nu)


class RankMatrices(NamedTuple):
  """One r x r matrix for either side.

  Attributes:
    left: (..., r, r), acts on the columns of ``X_L``, the index of ``Q_R``.
    right: (..., r, r), acts on the columns of ``X_R``, the index of ``Q_L``.
  """

  left: jax.Array
  right: jax.Array


class Moments(NamedTuple):
  """What one stack of modules remembers.

  Attributes:
    mu: First moment, (k, m, r) and (k, n, r).
    bases: ``Q_L`` (k, m, r) and ``Q_R`` (k, n, r), that all is written in.
    nu: Second moments V, (k, r, r).
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
  return jnp.split(fn(jnp.concatenate([left, right])), 2)


def _transported(
  moments: Moments, frame: Frame
) -> tuple[TangentSum, RankMatrices, RankMatrices]:
  """The old mu, nu and noise in a new frame.

  The first moment is projected on the new tangent space. Second moments turn
  by the polar factors of the overlaps: the overlaps themselves are
  contractions and would shrink V a little at every step.
  """
  mu, overlaps = transport_sum(moments.bases, frame, moments.mu)
  turn_right, turn_left = on_both_sides(_products.polar, *overlaps)

  def turned(x: RankMatrices) -> RankMatrices:
    return RankMatrices(
      gram(turn_left, matmul(x.left, turn_left)),
      gram(turn_right, matmul(x.right, turn_right)),
    )

  return mu, turned(moments.nu), turned(moments.noise)


def step(
  moments: Moments,
  frame: Frame,
  tangent: Tangent | TangentSum,
  options: Options,
) -> tuple[Moments, TangentSum]:
  """One step of the exponential averages, and the preconditioned first moment.

  Args:
    moments: As they were left by the last step.
    frame: The current frame.
    tangent: Noisy mean gradient.
    options: What this step is computed with.

  Returns:
    The new moments and the direction.
  """
  old_mu, old_nu, old_noise = _transported(moments, frame)
  b1, b2, variance = options.b1, options.b2, options.variance
  x = as_sum(frame, tangent)
  mu = TangentSum(
    old_mu.left * b1 + x.left * (1 - b1), old_mu.right * b1 + x.right * (1 - b1)
  )
  core = x.right.along.mT  # D = Q_L^T T Q_R
  m, n = frame.left.shape[-2], frame.right.shape[-2]
  seen = RankMatrices(
    (x.left.squares() + gram(core, core)) / m,
    x.right.squares() / n,  # X_R = X_R' + Q_R D^T holds the core already.
  )
  known = RankMatrices(variance * frame.right_mask, variance * frame.left_mask)

  def average(old: RankMatrices, new: RankMatrices) -> RankMatrices:
    return jax.tree.map(lambda x, y: b2 * x + (1 - b2) * y, old, new)

  new = Moments(
    multiply_out(mu),
    Factors(frame.left, frame.right),
    average(old_nu, seen),
    average(old_noise, known),
  )
  return new, direction(new, mu.right.along.mT, frame, options)


def direction(
  moments: Moments, core: jax.Array, frame: Frame, options: Options
) -> TangentSum:
  """The preconditioned first moment, from it and its core ``Q_L^T mu Q_R``."""
  noise = jax.tree.map(lambda x: x / options.nu_correction, moments.noise)
  nu = jax.tree.map(lambda x: x / options.nu_correction, moments.nu)

  def floor(covariance, mask):
    # The trace of a mask counts the observed directions; the others hold no
    # noise.
    trace, observed = (
      jnp.trace(x, axis1=-2, axis2=-1) for x in (covariance, mask)
    )
    return options.floor_factor * trace / jnp.maximum(observed, 1)

  floors = jnp.concatenate(
    [floor(noise.left, frame.right_mask), floor(noise.right, frame.left_mask)]
  )

  def inverse_root(x):
    root = _products.inverse_sqrt(
      x,
      floor=floors,
      max_condition_number=options.max_condition_number,
      eps=options.eps,
    )
    return root / options.mu_correction

  p_left, p_right = on_both_sides(inverse_root, nu.left, nu.right)
  new_core = (matmul(p_right, core) + matmul(core, p_left)) / 2
  # X_R is X_R' + Q_R D^T: what p_right makes of the core is replaced.
  change = new_core - matmul(p_right, core)
  left, right = sum_at(
    frame,
    ((moments.mu.left, p_left),),
    ((moments.mu.right, p_right),),
    (jnp.zeros_like(core), gram(core, p_right)),
  )
  return TangentSum(left, right.shifted(change.mT))


# Leaves that are no factors: Adam with the same floor.


class ElementwiseMoments(NamedTuple):
  """Adam's moments of one leaf, and the noise variance that ``nu`` has seen.

  Attributes:
    mu: First moment, the leaf's shape.
    nu: Second moment, the leaf's shape.
    noise: Scalar, with the same decay as ``nu``.
  """

  mu: jax.Array
  nu: jax.Array
  noise: jax.Array


def init_elementwise(leaf: jax.Array) -> ElementwiseMoments:
  """Zeros in the shape and type of the leaf."""
  # Each in an array of its own: a state may be donated, and no buffer twice.
  return ElementwiseMoments(
    jnp.zeros_like(leaf), jnp.zeros_like(leaf), jnp.zeros((), leaf.dtype)
  )


def elementwise_step(
  moments: ElementwiseMoments, gradient: jax.Array, options: Options
) -> tuple[ElementwiseMoments, jax.Array]:
  """New averages, and ``mu / (sqrt(max(nu, floor)) + eps)``.

  The direction is zero where nothing was ever seen.
  """
  b1, b2 = options.b1, options.b2
  new = ElementwiseMoments(
    b1 * moments.mu + (1 - b1) * gradient,
    b2 * moments.nu + (1 - b2) * jnp.square(gradient),
    b2 * moments.noise + (1 - b2) * options.variance,
  )
  noise = new.noise / options.nu_correction
  nu = new.nu / options.nu_correction
  floored = jnp.maximum(nu, options.floor_factor * noise)
  root = jnp.sqrt(floored) + options.eps
  mu = new.mu / options.mu_correction
  return new, jnp.where(root > 0, mu / jnp.where(root > 0, root, 1), 0)
