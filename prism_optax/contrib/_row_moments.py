"""One scale for each input and each output, from the released gradients."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from prism_optax import _validate
from prism_optax._modules import LayoutLike, Stacks, StepContext, map_pairs
from prism_optax._types import Scalar
from prism_optax.fixed_rank import Tangent
from prism_optax.fixed_rank._points import Frame
from prism_optax.fixed_rank._tangents import TangentSum, as_sum
from prism_optax.transforms._chain import (
  TangentTransformation,
  tangent_transformation,
)
from prism_optax.transforms._rank_preconditioner import (
  StddevLike,
  check_stddev,
  variance_at,
)


class RowMoments(NamedTuple):
  """Averages of the mean squares of rows, for a stack of k modules.

  Attributes:
    left: (k, m), one number for each output.
    right: (k, n), one number for each input.
  """

  left: jax.Array
  right: jax.Array


class RowMomentsState(NamedTuple):
  """State of :func:`scale_by_row_moments`.

  Attributes:
    count: Updates so far, shape (), int32.
    noise: Average of the noise variance, shape ().
    pairs: For each stack of same-shape modules its moments.
  """

  count: jax.Array  # type: ignore[assignment]  # As in optax's states.
  noise: jax.Array
  pairs: tuple[RowMoments, ...]


def _scales(
  moments: jax.Array, noise: jax.Array, max_condition_number: Scalar
) -> jax.Array:
  """``sqrt(f / max(v, f))`` of (k, m) mean squares, in [0, 1]."""
  largest = jnp.max(moments, -1, keepdims=True)
  floor = jnp.maximum(noise, largest / max_condition_number)
  raised = jnp.maximum(moments, floor)
  return jnp.sqrt(floor / jnp.where(raised > 0, raised, 1))


def _both_sides(frame: Frame, tangent: Tangent | TangentSum) -> Tangent:
  """``T Q_R`` and ``T^T Q_L``: the core ``Q_L^T T Q_R`` is in either."""
  left, right = as_sum(frame, tangent)
  core = right.along.mT
  return Tangent(left.shifted(core).multiply_out(), right.multiply_out())


def _tangent_of(frame: Frame, sides: Tangent) -> TangentSum:
  """What both sides say outside of the core, and in it their mean."""
  left, right = as_sum(frame, sides)
  core = (left.along + right.along.mT) / 2
  return TangentSum(left.outside(), right.shifted(core.mT - right.along))


def scale_by_row_moments(
  b2: Scalar = 0.99,
  *,
  noise_stddev: StddevLike,
  floor_factor: Scalar = 1.0,
  max_condition_number: Scalar = 1e4,
  layout: LayoutLike = None,
) -> TangentTransformation:
  """Shrinks the rows of tangent coordinates that stand out of the noise.

  Some inputs and outputs of a layer are orders of magnitude larger than others,
  in language models above all. Adam on the factors evens them out, entry by
  entry, but depends on the gauge. The r x r moments of
  :func:`prism_optax.scale_by_rank_preconditioner` do not depend on it, and
  cannot adapt to single inputs. This transformation can: a row of ``T Q_R``
  belongs to an output, a row of ``T^T Q_L`` to an input, and their lengths are
  the same in every gauge. With w any of the rows, in r numbers::

    v  <- b2 v + (1 - b2) |w|^2 / r
    w  <- w sqrt(f / max(v, f)),    f = floor_factor * s^2, averaged like v

  and back to the tangent space; the core ``Q_L^T T Q_R``, which belongs to both
  sides, is the mean of both results. Rows that hold only noise stay nearly as
  they are, and no row grows, so ``noise_stddev=s`` still bounds the noise for
  the transformations after it. Place it directly after the noise, in the lines
  of :func:`prism_optax.prism`::

    prism_optax.chain(
      intrinsic_clip(C, normalize_by=b), tangent_privatizer(s),
      contrib.scale_by_row_moments(noise_stddev=s),
      scale_by_rank_preconditioner(noise_stddev=s), add_decayed_factors(0.1),
      scale_by_learning_rate(learning_rate), retract())

  Ours; Adafactor keeps one number a row for a matrix (arXiv:1804.04235), and
  the floor is PRISM's (arXiv:2606.00944, Eq. 27).

  **Privacy.** It reads only noisy values, so it is post-processing.

  =============================  ==============================================
  ``noise_stddev=0.0``           only the floor of ``max_condition_number``
  zero gradients                 zero, no 0 / 0
  factor zero or of lower rank   its hidden directions stay zero
  more steps than entries        the last entry of ``noise_stddev`` holds
  NaN or Inf comes in            the moments keep it: clip at the start of the
                                 chain
  leaves that are no factors     pass
  bfloat16 parameters            computed in float32
  =============================  ==============================================

  Args:
    b2: Decay of the averages.
    noise_stddev: s, the standard deviation per coordinate of the noise in the
      incoming updates; a number, or one per step. 0.0 for training without
      noise.
    floor_factor: How much larger than noise the mean square of a row has to be
      before it is shrunk.
    max_condition_number: Within a module no mean square counts as less than the
      largest over this.
    layout: See :func:`prism_optax.lora.describe_pairs`.

  Returns:
    A transformation on trees in the shapes of the parameters; ``update`` needs
    ``params``. Units stay as they are.

  Raises:
    ValueError: For arguments out of range; in ``init`` if both factors of a
      module are zero; in ``update`` without ``params``.

  Example:
    >>> import jax.numpy as jnp
    >>> from prism_optax import contrib
    >>> params = {'lora_a': jnp.eye(3, 1), 'lora_b': jnp.eye(1, 2)}
    >>> tx = contrib.scale_by_row_moments(noise_stddev=0.5)
    >>> grads = {'lora_a': jnp.array([[0.0], [4.0], [0.25]]),
    ...          'lora_b': jnp.array([[0.0, 2.0]])}
    >>> updates, _ = tx.update(grads, tx.init(params), params)
    >>> updates['lora_a'].ravel().round(2).tolist()
    [0.0, 0.5, 0.25]
  """
  _validate.decay_rate('b2', b2)
  check_stddev(noise_stddev)
  _validate.non_negative('floor_factor', floor_factor)
  _validate.at_least('max_condition_number', max_condition_number, 1)

  def averaged(old: jax.Array, new: jax.Array) -> jax.Array:
    return jnp.asarray(b2 * old + (1 - b2) * new, old.dtype)

  def init(step: StepContext) -> RowMomentsState:
    coordinates = step.tree.coordinates(step.params)
    pairs = tuple(
      RowMoments(*(jnp.zeros(x.shape[:-1], x.dtype) for x in pair))
      for pair in coordinates.pairs
    )
    return RowMomentsState(jnp.zeros((), jnp.int32), jnp.zeros(()), pairs)

  def update(
    stacks: Stacks, state: RowMomentsState, step: StepContext
  ) -> tuple[Stacks, RowMomentsState]:
    noise = averaged(state.noise, variance_at(noise_stddev, state.count))
    # Both are averages from zero: in their quotient no correction is left.
    floor = floor_factor * noise

    def of_pair(
      frame: Frame, moments: RowMoments, tangent: Tangent | TangentSum
    ) -> tuple[RowMoments, TangentSum]:
      sides = _both_sides(frame, tangent)
      squares = (jnp.mean(jnp.square(x), -1) for x in sides)
      moments = RowMoments(*map(averaged, moments, squares))
      scaled = (
        x * _scales(v, floor.astype(v.dtype), max_condition_number)[..., None]
        for x, v in zip(sides, moments, strict=True)
      )
      return moments, _tangent_of(frame, Tangent(*scaled))

    found = map_pairs(of_pair, step.frames, state.pairs, stacks.pairs)
    state = RowMomentsState(
      optax.safe_increment(state.count), noise, tuple(m for m, _ in found)
    )
    return stacks._replace(pairs=tuple(x for _, x in found)), state

  return tangent_transformation(
    'scale_by_row_moments', update, init, layout=layout
  )
