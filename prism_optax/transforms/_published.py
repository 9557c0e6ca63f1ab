"""The rank preconditioner of the PRISM paper, in factor coordinates.

For comparison with the published optimizer (arXiv:2606.00944, Eq. 24-27 and
its code): moments and preconditioning act on the horizontal lift (Prop. A.11),
noise and floor are read off the Gram matrices of the factors, nothing is
transported. Its trajectory depends on the gauge of the starting factors.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from prism_optax import _validate, fixed_rank
from prism_optax._linalg import _products
from prism_optax._linalg._products import gram, matmul
from prism_optax._modules import LayoutLike
from prism_optax._types import Scalar
from prism_optax.fixed_rank import Factors, Tangent, _lifts
from prism_optax.fixed_rank._points import Frame
from prism_optax.fixed_rank._tangents import TangentSum
from prism_optax.transforms._chain import TangentTransformation
from prism_optax.transforms._moments import Options
from prism_optax.transforms._rank_preconditioner import (
  StddevLike,
  preconditioner,
)


class FactorMoments(NamedTuple):
  """Moments of one stack of modules, written in its factors.

  Attributes:
    mu: First moments of the lifted steps, (k, m, r) and (k, n, r).
    nu: Second moments ``dL^T dL / m`` and ``dR^T dR / n``, (k, r, r).
  """

  mu: Factors
  nu: Factors


def _init_moments(tangent: Tangent) -> FactorMoments:
  """Zeros; ``tangent`` gives shapes and type."""
  zeros = Factors(*jax.tree.map(jnp.zeros_like, tangent))
  return FactorMoments(zeros, jax.tree.map(lambda x: gram(x, x), zeros))


def _step(
  moments: FactorMoments,
  frame: Frame,
  tangent: Tangent | TangentSum,
  options: Options,
  *,
  floor_mode: str,
) -> tuple[FactorMoments, Tangent]:
  """One update of the moments, and the direction in tangent coordinates."""
  b1, b2, variance = options.b1, options.b2, options.variance
  tangent = fixed_rank.multiply_out(tangent)
  gradient = _lifts.lift(frame, tangent)
  mu = jax.tree.map(lambda x, g: b1 * x + (1 - b1) * g, moments.mu, gradient)
  nu = jax.tree.map(
    lambda x, g: b2 * x + (1 - b2) * gram(g, g) / g.shape[-2],
    moments.nu,
    gradient,
  )
  _, m, rank = mu.left.shape
  # Covariance of unit tangent noise in rank space, for the lift that puts the
  # core on the right factor: (m - r)/m (R^T R)^-1 and (L^T L)^-1.
  unit_noise = Factors(
    matmul(frame.right_inverse, frame.right_inverse.mT) * (m - rank) / m,
    matmul(frame.left_inverse, frame.left_inverse.mT),
  )

  def precondition(second, first, noise):
    second = second / options.nu_correction
    floor = options.floor_factor * variance
    floors = floor * jnp.ones(second.shape[:-2], second.dtype)
    if floor_mode == 'geometry':  # Eq. 26
      mean = jnp.trace(noise, axis1=-2, axis2=-1) / rank
      floors = jnp.maximum(floors, floor * mean)
    # As published: eps is added to the eigenvalues, before the floor.
    root = _products.inverse_sqrt(
      second,
      floor=floors,
      max_condition_number=options.max_condition_number,
      eps=0.0,
      added=options.eps,
    )
    return matmul(first, root / options.mu_correction)

  direction = jax.tree.map(precondition, nu, mu, unit_noise)
  coordinates = _lifts.tangent_from_steps(frame, direction)
  return FactorMoments(mu, nu), coordinates


def scale_by_published_preconditioner(
  b1: Scalar = 0.9,
  b2: Scalar = 0.999,
  eps: Scalar = 1e-8,
  *,
  noise_stddev: StddevLike,
  floor_mode: str = 'geometry',
  floor_factor: Scalar = 1.0,
  max_condition_number: Scalar = 1e4,
  layout: LayoutLike = None,
) -> TangentTransformation:
  """The preconditioner of ``published_prism``, for comparisons.

  PRISM (arXiv:2606.00944), Eq. 24-27, as in the authors' code: moments of the
  horizontal lift (Prop. A.11) of the incoming tangent vector, divided by ``1 -
  b^t``, eps added to the eigenvalues, floors read off the Gram matrices of the
  factors, and no transport between tangent spaces. Its trajectory depends on
  the gauge. Use :func:`scale_by_rank_preconditioner` instead; this one belongs
  with ``retract(align=True)``.

  **Privacy.** It reads only noisy values, so it is post-processing.

  =============================  ==============================================
  ``noise_stddev=0.0``           only the floor of ``max_condition_number``
  factor zero or of lower rank   its hidden directions stay zero
  more steps than entries        the last entry of ``noise_stddev`` holds
  NaN or Inf comes in            the moments keep it: clip at the start of the
                                 chain
  bfloat16 parameters            moments and direction in float32
  =============================  ==============================================

  Args:
    b1: Decay of the first moment.
    b2: Decay of the second moments.
    eps: Added to the eigenvalues.
    noise_stddev: s, the standard deviation per coordinate of the noise in the
      incoming updates, in their unit; a number, or one per step.
    floor_mode: ``'geometry'`` for the floor of Eq. 26 with its trace,
      ``'scalar'`` for s^2, ``'none'`` for no floor.
    floor_factor: Factor of either floor.
    max_condition_number: Eigenvalues are raised to the largest over this.
    layout: See :func:`prism_optax.lora.describe_pairs`.

  Returns:
    A transformation on trees in the shapes of the parameters; ``update``
    needs ``params``. The direction has entries of order one, whatever the unit
    of the input.

  Raises:
    ValueError: For arguments out of range; in ``init`` if both factors of a
      module are zero; in ``update`` without ``params``.

  Example:
    >>> import jax.numpy as jnp
    >>> from prism_optax.transforms import _published
    >>> params = {'lora_a': jnp.eye(3, 1), 'lora_b': jnp.eye(1, 2)}
    >>> tx = _published.scale_by_published_preconditioner(noise_stddev=0.0)
    >>> grads = {'lora_a': jnp.array([[0.0], [3.0], [0.0]]),
    ...          'lora_b': jnp.array([[0.0, 2.0]])}
    >>> updates, _ = tx.update(grads, tx.init(params), params)
    >>> [round(float(jnp.linalg.norm(u)), 3) for u in updates.values()]
    [1.732, 1.414]
  """
  _validate.one_of('floor_mode', floor_mode, ('geometry', 'scalar', 'none'))
  if floor_mode == 'none':
    floor_factor = 0.0
  return preconditioner(
    'scale_by_published_preconditioner',
    _init_moments,
    functools.partial(_step, floor_mode=floor_mode),
    Options(b1, b2, eps, floor_factor, max_condition_number),
    noise_stddev=noise_stddev,
    bias_correction=True,
    layout=layout,
  )
