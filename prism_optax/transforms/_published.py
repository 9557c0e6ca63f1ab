"""The rank preconditioner of the PRISM paper, in factor coordinates.

For comparison with the published optimizer (arXiv:2606.00944, Eq. 24-27 and
its code): moments and preconditioning act on the horizontal lift (Prop. A.11),
noise and floor are read off the Gram matrices of the factors, nothing is
transported. Its trajectory depends on the gauge of the starting factors.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from prism_optax import _linalg, _validate, fixed_rank
from prism_optax._linalg import gram, matmul
from prism_optax._modules import LayoutLike, Stacks, map_pairs
from prism_optax.fixed_rank import Factors, Frame, Tangent
from prism_optax.transforms import _moments
from prism_optax.transforms._chain import Stacked, TangentTransformation
from prism_optax.transforms._moments import Scalar
from prism_optax.transforms._rank_preconditioner import (
  capped,
  check_options,
  one_minus_power,
  variance_at,
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
  tangent: Tangent,
  *,
  b1: Scalar,
  b2: Scalar,
  variance: jax.Array,
  mu_correction: jax.Array,
  nu_correction: jax.Array,
  eps: Scalar,
  floor_mode: str,
  floor_factor: Scalar,
  debias: bool,
  max_condition_number: Scalar,
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


class PublishedPreconditionerState(NamedTuple):
  """State of :func:`scale_by_published_preconditioner`.

  Attributes:
    count: Updates so far, shape (), int32.
    pairs: For each stack of same-shape modules its moments.
    others: Adam's moments of each other leaf.
  """

  count: jax.Array  # type: ignore[assignment]  # As in optax's states.
  pairs: tuple[FactorMoments, ...]
  others: tuple[_moments.ElementwiseMoments, ...]


def scale_by_published_preconditioner(
  b1: float | jax.Array = 0.9,
  b2: float | jax.Array = 0.999,
  eps: float | jax.Array = 1e-8,
  *,
  noise_stddev: float | jax.Array | np.ndarray,
  floor_mode: str = 'geometry',
  floor_factor: float | jax.Array = 1.0,
  debias: bool = False,
  max_condition_number: float | jax.Array = 1e4,
  max_update_norm: float | jax.Array | None = None,
  layout: LayoutLike = None,
) -> TangentTransformation:
  """The preconditioner as published, for comparisons.

  PRISM (arXiv:2606.00944), Eq. 24-27, as in the authors' code: moments of the
  horizontal lift (Prop. A.11) of the incoming tangent vector, divided by
  ``1 - b^t``, eps added to the eigenvalues, floors read off the Gram matrices
  of the factors, and no transport between tangent spaces. Its trajectory
  depends on the gauge. :func:`scale_by_rank_preconditioner` is the one to use;
  with this one goes ``retract(align=True)``.

  **Privacy.** It only reads what is already private: post-processing.

  =============================  ==============================================
  ``noise_stddev=0.0``           no floor but that of ``max_condition_number``
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
    debias: Subtract the known noise covariance from the second moments.
    max_condition_number: Eigenvalues are raised to the largest over this.
    max_update_norm: Cap of the norm of the direction over all modules and
      leaves, before the learning rate; None for no cap.
    layout: See :func:`prism_optax.lora.describe_pairs`.

  Returns:
    A transformation on trees in the shapes of the parameters; ``update`` needs
    ``params``. The direction has entries of order one, whatever the unit of
    what came in.

  Raises:
    ValueError: For arguments out of range; in ``init`` if both factors of a
      module are zero; in ``update`` without ``params``.

  Example:
    >>> import jax.numpy as jnp
    >>> from prism_optax import transforms
    >>> params = {'lora_a': jnp.eye(3, 1), 'lora_b': jnp.eye(1, 2)}
    >>> tx = transforms.scale_by_published_preconditioner(noise_stddev=0.0)
    >>> grads = {'lora_a': jnp.array([[0.0], [3.0], [0.0]]),
    ...          'lora_b': jnp.array([[0.0, 2.0]])}
    >>> updates, _ = tx.update(grads, tx.init(params), params)
    >>> [round(float(jnp.linalg.norm(u)), 3) for u in updates.values()]
    [1.732, 1.414]
  """
  check_options(b1, b2, eps, noise_stddev, floor_factor, max_condition_number)
  _validate.one_of('floor_mode', floor_mode, ('geometry', 'scalar', 'none'))
  if max_update_norm is not None:
    _validate.positive('max_update_norm', max_update_norm)

  def init(step):
    stacks = step.tree.coordinates(step.params)
    return PublishedPreconditionerState(
      jnp.zeros((), jnp.int32),
      map_pairs(_init_moments, stacks.pairs),
      map_pairs(_moments.init_elementwise, stacks.others),
    )

  def update(stacks, state, step, **extra_args):
    del extra_args
    variance = variance_at(noise_stddev, state.count)
    count = optax.safe_increment(state.count)

    def scaling(dtype):
      return {
        'mu_correction': one_minus_power(b1, count).astype(dtype),
        'nu_correction': one_minus_power(b2, count).astype(dtype),
        'eps': eps,
        'debias': debias,
      }

    def of_pair(old, frame, tangent):
      dtype = frame.left.dtype
      return _step(
        old,
        frame,
        fixed_rank.multiply_out(tangent),
        b1=b1,
        b2=b2,
        variance=variance.astype(dtype),
        floor_mode=floor_mode,
        floor_factor=floor_factor,
        max_condition_number=max_condition_number,
        **scaling(dtype),
      )

    def of_leaf(old, gradient):
      dtype = gradient.dtype
      moments = _moments.accumulate_elementwise(
        old, gradient, b1=b1, b2=b2, variance=variance.astype(dtype)
      )
      return moments, _moments.direction_elementwise(
        moments,
        floor_factor=0.0 if floor_mode == 'none' else floor_factor,
        **scaling(dtype),
      )

    pairs = map_pairs(of_pair, state.pairs, step.frames, stacks.pairs)
    others = map_pairs(of_leaf, state.others, stacks.others)
    out = Stacks(tuple(d for _, d in pairs), tuple(d for _, d in others))
    state = PublishedPreconditionerState(
      count, tuple(m for m, _ in pairs), tuple(m for m, _ in others)
    )
    return capped(out, max_update_norm), state

  return TangentTransformation(
    Stacked('scale_by_published_preconditioner', init, update), layout
  )
