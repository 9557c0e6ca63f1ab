"""The rank preconditioner of the PRISM paper, in factor coordinates.

For comparison with the published optimizer (arXiv:2606.00944, Eq. 24-27 and
its code): moments and preconditioning act on the horizontal lift (Prop. A.11),
noise and floor are read off the Gram matrices of the factors, nothing is
transported. Its trajectory depends on the gauge of the starting factors.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from prism_optax import _linalg, fixed_rank
from prism_optax._linalg import gram, matmul
from prism_optax.fixed_rank import Factors, Frame, Tangent


class FactorMoments(NamedTuple):
  """Moments of one stack of modules, written in its factors.

  Attributes:
    mu: First moments of the lifted steps, (k, m, r) and (k, n, r).
    nu: Second moments ``dL^T dL / m`` and ``dR^T dR / n``, (k, r, r).
  """

  mu: Factors
  nu: Factors


def init_moments(tangent: Tangent) -> FactorMoments:
  """Zeros; ``tangent`` gives shapes and type."""
  zeros = Factors(*jax.tree.map(jnp.zeros_like, tangent))
  return FactorMoments(zeros, jax.tree.map(lambda x: gram(x, x), zeros))


def step(
  moments: FactorMoments,
  frame: Frame,
  tangent: Tangent,
  *,
  b1,
  b2,
  variance,
  mu_correction,
  nu_correction,
  eps,
  floor_mode: str,
  floor_factor,
  debias: bool,
  max_condition_number,
) -> tuple[FactorMoments, Tangent]:
  """One update of the moments, and the direction in tangent coordinates."""
  gradient = fixed_rank.lift(frame, tangent, horizontal=True)
  mu = jax.tree.map(lambda x, g: b1 * x + (1 - b1) * g, moments.mu, gradient)
  nu = jax.tree.map(
    lambda x, g: b2 * x + (1 - b2) * gram(g, g) / g.shape[-2],
    moments.nu,
    gradient,
  )
  m, rank = mu.left.shape[-2:]
  # Covariance of unit tangent noise in rank space, for the lift that puts the
  # core on the right factor: (m - r)/m (R^T R)^-1 and (L^T L)^-1.
  unit_noise = Factors(
    matmul(frame.right_inverse, frame.right_inverse.mT) * (m - rank) / m,
    matmul(frame.left_inverse, frame.left_inverse.mT),
  )

  def precondition(first, second, noise):
    second = second / nu_correction
    if debias:
      second = second - variance * noise
    scalar = floor_factor * variance
    floor = scalar * jnp.ones(second.shape[:-2], second.dtype)
    if floor_mode == 'geometry':  # Eq. 26
      mean = jnp.trace(noise, axis1=-2, axis2=-1) / rank
      floor = jnp.maximum(floor, scalar * mean)
    elif floor_mode == 'none':
      floor = jnp.zeros_like(floor)
    # As published: eps is added to the eigenvalues, before the floor.
    root = _linalg.inverse_sqrt(
      second, floor=floor, max_condition_number=max_condition_number, eps=0.0,
      added=eps,
    )  # fmt: skip
    return matmul(first / mu_correction, root)

  direction = jax.tree.map(precondition, mu, nu, unit_noise)
  coordinates = fixed_rank.tangent_from_steps(frame, direction)
  return FactorMoments(mu, nu), coordinates
