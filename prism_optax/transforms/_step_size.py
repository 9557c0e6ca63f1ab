"""A step size that grows as long as noisy gradients agree with their past."""

import functools
import math
import operator
from typing import NamedTuple

import jax
import jax.numpy as jnp

from prism_optax import _validate
from prism_optax._linalg._products import gram
from prism_optax.fixed_rank import Tangent
from prism_optax.fixed_rank._points import Frame, map_ranks
from prism_optax.fixed_rank._tangents import (
  TangentSum,
  multiply_out,
  scaled,
  transport_sum,
)
from prism_optax.transforms._chain import Stacked, TangentTransformation
from prism_optax.transforms._moments import Moments
from prism_optax.transforms._rank_preconditioner import (
  RankPreconditionerState,
  StddevLike,
  check_stddev,
  variance_at,
)

# A loss without a minimum, whose gradients agree for ever, ends in no overflow.
_MOST = math.log(1e4)


class AdaptedStepSizeState(NamedTuple):
  """State of :func:`adapt_step_size`.

  Attributes:
    log_scale: Logarithm of the factor of the steps, shape (), float32.
    preconditioner: Its state, with the momentum.
  """

  log_scale: jax.Array
  preconditioner: RankPreconditionerState


def _inner(x: Tangent, y: Tangent) -> jax.Array:
  """``<x, y>`` of each matrix of a stack, (k,)."""
  parts = (
    jnp.trace(gram(a, b), axis1=-2, axis2=-1) for a, b in zip(x, y, strict=True)
  )
  return functools.reduce(operator.add, parts)


def _products(
  frame: Frame, moments: Moments, tangent: Tangent | TangentSum
) -> tuple[jax.Array, jax.Array]:
  """``<X, mu>`` and ``<mu, mu>`` of each module, mu carried to this frame."""
  mu = multiply_out(transport_sum(moments.bases, frame, moments.mu)[0])
  return _inner(multiply_out(tangent), mu), _inner(mu, mu)


def adapt_step_size(
  preconditioner: TangentTransformation,
  *,
  noise_stddev: StddevLike,
  growth: float = 0.1,
  threshold: float = 1.5,
) -> TangentTransformation:
  """Lets the steps of a preconditioner grow while the descent goes on.

  Some tasks want ten times the learning rate of others: how far the weights
  have to go is not known before. Here each noisy gradient X is compared with
  the momentum mu of those before it. If X were noise alone, of variance s^2
  on each coordinate of the tangent space, then ::

    z = <X, mu> / (s ||mu||)       over all modules and other leaves

  would be a standard normal number, because the noise of a step is independent
  of all earlier ones. A large z says that the last steps were too short, and a
  z far below zero that they went too far::

    log c <- log c + growth * (ramp(z) - ramp(-z))
    ramp(z) = min(max(z / threshold - 1, 0), 1)

  and the direction is that of the preconditioner times c, which starts at one.
  Weight decay after it does not grow along. To adapt a rate by the product of
  successive gradients is known as hypergradient descent (Baydin et al. 2018,
  arXiv:1703.04782). The test against the known noise is ours.

  **Privacy.** It reads only noisy values, so it is post-processing.

  =============================  ==============================================
  noise alone                    log c makes a random walk without drift, whose
                                 steps have a standard deviation of 0.14
                                 ``growth`` at the usual threshold
  ``noise_stddev=0.0``           the sign of ``<X, mu>`` decides, at full growth
  correlated noise               not for it: noise agrees with earlier noise,
                                 so z says nothing
  first step, or momentum zero   c stays
  agreement for ever             c stops at 1e4, and at 1e-4 on the other side
  NaN or Inf comes in            as in the preconditioner: clip at the start of
                                 the chain
  =============================  ==============================================

  Args:
    preconditioner: Made by :func:`scale_by_rank_preconditioner`; its layout
      holds.
    noise_stddev: s, as for the preconditioner.
    growth: Largest change of ``log c`` in a step. With 0.1 the steps can be
      ten times as long after 23 of them.
    threshold: Of z, from which on c grows. At twice the threshold it grows by
      all of ``growth``. Below the negative threshold it shrinks likewise.

  Returns:
    A transformation on trees in the shapes of the parameters; ``update``
    needs ``params``.

  Raises:
    ValueError: For arguments out of range, or another kind of
      ``preconditioner``; in ``init`` and ``update`` as the preconditioner does.

  Example:
    >>> import jax.numpy as jnp
    >>> import prism_optax
    >>> from prism_optax import transforms
    >>> params = {'lora_a': jnp.eye(3, 1), 'lora_b': jnp.eye(1, 2)}
    >>> tx = transforms.adapt_step_size(
    ...   prism_optax.scale_by_rank_preconditioner(noise_stddev=0.1),
    ...   noise_stddev=0.1)
    >>> state = tx.init(params)
    >>> for _ in range(3):  # The same gradient, far above the noise.
    ...   _, state = tx.update(params, state, params)
    >>> round(float(jnp.exp(state.log_scale)), 3)
    1.221
  """
  ours = isinstance(preconditioner, TangentTransformation)
  if not ours or preconditioner.stacked.name != 'scale_by_rank_preconditioner':
    raise ValueError(
      'Expected preconditioner to be made by scale_by_rank_preconditioner, got'
      f' {preconditioner=}.'
    )
  check_stddev(noise_stddev)
  _validate.non_negative('growth', growth)
  _validate.positive('threshold', threshold)
  inner = preconditioner.stacked

  def init(step):
    return AdaptedStepSizeState(jnp.zeros((), jnp.float32), inner.init(step))

  def ramp(z):
    return jnp.clip(z / threshold - 1, 0, 1)

  def update(stacks, state, step, **extra_args):
    old = state.preconditioner
    products = map_ranks(_products, step.frames, old.pairs, stacks.pairs)
    others = [
      (jnp.sum(x * m.mu), jnp.sum(jnp.square(m.mu)))
      for x, m in zip(stacks.others, old.others, strict=True)
    ]
    both = zip(*products, *others, strict=True)
    inner_product, square = (sum(map(jnp.sum, x)) for x in both)
    stddev = jnp.sqrt(variance_at(noise_stddev, old.count))
    scale = stddev * jnp.sqrt(square)
    # Anything over zero is all that counts, zero over zero is nothing.
    most = 2 * threshold * jnp.sign(inner_product)
    safe = jnp.where(scale > 0, scale, 1)
    z = jnp.where(scale > 0, inner_product / safe, most)
    change = growth * (ramp(z) - ramp(-z))
    log_scale = state.log_scale + change.astype(jnp.float32)
    log_scale = jnp.clip(log_scale, -_MOST, _MOST)
    out, new = inner.update(stacks, old, step, **extra_args)
    return scaled(out, jnp.exp(log_scale)), AdaptedStepSizeState(log_scale, new)

  return TangentTransformation(
    Stacked('adapt_step_size', init, update), preconditioner.layout
  )
