"""Clipping of per-example gradients in the intrinsic norm."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from prism_optax import _linalg, _per_example, _validate, fixed_rank
from prism_optax._linalg import gram
from prism_optax._modules import (
  LayoutLike,
  MatrixAxes,
  ModuleArrays,
)
from prism_optax._types import Scalar
from prism_optax.fixed_rank import Frame
from prism_optax.transforms._chain import Stacked, TangentTransformation


def intrinsic_clip(
  l2_clip_norm: Scalar,
  *,
  normalize_by: Scalar = 1.0,
  layout: LayoutLike = None,
) -> TangentTransformation:
  """Clips per-example gradients in the intrinsic norm and adds them up.

  ``sum_i min(1, C / s_i) X_i / normalize_by`` with tangent coordinates ``X_i``
  (see :func:`tangent_coordinates`) and one norm ``s_i`` for each example over
  all modules and all other leaves (PRISM, arXiv:2606.00944, Eq. 16).

  **Privacy.** What comes out moves by at most ``C / normalize_by`` in the
  Euclidean norm of all its entries when one example is added or removed,
  whatever the example holds. Nothing is private yet: the noise is added by
  :func:`tangent_privatizer`, directly behind.

  All per-example gradients are held at once. For real models use
  ``jax_privacy.clipped_grad`` with micro-batches and
  :func:`tangent_coordinates`, which gives the same. ``optax.MultiSteps`` can
  accumulate behind the clip: with ``normalize_by=expected_batch_size / k`` the
  mean over k micro-batches of one Poisson batch is that of the whole batch, and
  so is the noise that follows. Its ``should_skip_update_fn`` would decide by
  what is not yet private.

  ===================================  ========================================
  NaN or Inf in an example             it counts as zero
  squared norm that overflows          the example counts as zero
  padding example                      counts as zero
  batch of padding only, or of size 0  zeros
  bfloat16 gradients                   norm, clip and sum in float32
  norm below ``C (1 - 1e-6)``          the example stays as it is; longer ones
                                       are cut to this: room for rounding
  gradients of no function of Z        cut up to 1 % shorter where the columns
  (one factor's stopped)               of the factors are orthogonal
  ===================================  ========================================

  Args:
    l2_clip_norm: C, the largest norm of an example's contribution to the sum.
    normalize_by: A public constant that divides the sum: the EXPECTED batch
      size, never the realised one.
    layout: See :func:`prism_optax.lora.describe_pairs`.

  Returns:
    A transformation whose ``update(per_example_grads, state, params,
    is_padding_example=None)`` takes leaves ``(B, *shape)`` and returns
    leaves ``(*shape)`` in tangent coordinates, float32 at least.
    ``.sensitivity(neighboring_relation)`` is C / normalize_by, twice that for
    REPLACE_ONE.

  Raises:
    ValueError: If C or ``normalize_by`` is not a positive finite number (a
      traced one is not checked); if ``optax.masked`` or ``optax.partition``
      hides leaves, whose gradients would pass unclipped; in ``update`` if
      ``params`` is missing or the gradients do not have one leading batch axis,
      as inside of ``optax.MultiSteps``.

  Example:
    >>> import jax.numpy as jnp
    >>> import prism_optax
    >>> params = {'lora_a': jnp.eye(3, 1), 'lora_b': jnp.eye(1, 2)}
    >>> clip = prism_optax.intrinsic_clip(1.0, normalize_by=10.0)
    >>> clip.sensitivity()
    0.1
    >>> grads = {'lora_a': jnp.ones((4, 3, 1)), 'lora_b': jnp.ones((4, 1, 2))}
    >>> clipped, _ = clip.update(grads, clip.init(params), params)
    >>> clipped['lora_b'].shape
    (1, 2)
  """
  _validate.positive('l2_clip_norm', l2_clip_norm)
  _validate.positive('normalize_by', normalize_by)
  what = 'per-example gradients'

  def init(step):
    _per_example.check_whole('intrinsic_clip', step.params)
    return optax.EmptyState()

  def update(grads, state, step, *, is_padding_example=None, **extra_args):
    del extra_args
    _per_example.check_whole('intrinsic_clip', step.params)
    _per_example.check_batched('intrinsic_clip', grads, step.params)

    def weighted_sums(squared, arrays):
      weights, counts = _per_example.clip_weights(squared, is_padding_example)
      weights = weights / normalize_by
      return _per_example.weighted_sums(arrays, weights, counts)

    def to_coordinates(gradients):
      return gradients.map_pairs(
        lambda pair, frame: fixed_rank.tangent_from_gradients(frame, pair),
        step.frames,
      )

    def where_they_lie():
      groups, others = step.tree.per_module(grads, 1, what)
      squared = squared_norms(step.frames, groups, unit=l2_clip_norm)
      if others:
        squared += _per_example.squared_norms(others, l2_clip_norm)
      wide = jax.tree.map(_linalg.at_least_float32, grads)
      return to_coordinates(step.tree.gradients(weighted_sums(squared, wide)))

    def in_coordinates():
      # (B, k, ., r) and (B, *shape): axis 0 is the batch throughout.
      stacks = to_coordinates(step.tree.gradients(grads, 1, what))
      squared = _per_example.squared_norms(
        jax.tree.leaves(stacks), l2_clip_norm
      )
      return weighted_sums(squared, stacks)

    # Behind a retraction, and from canonical factors on, each example is read
    # twice where it lies and nothing is made of it. In any other gauge sums of
    # gradients would mix columns of different sizes before they are whitened.
    orthogonal = columns_are_orthogonal(step.frames)
    return _linalg.branch(orthogonal, where_they_lie, in_coordinates), state

  return TangentTransformation(
    Stacked('intrinsic_clip', init, update, ('clip',)),
    layout,
    _per_example.sensitivity_of_sum(l2_clip_norm / normalize_by),
  )


# Norms of gradients that are read where they lie. In general the norm of
# X_L = (I - P_L) g_L C_R^-1 is known once X_L is there: written and read again,
# for every example. Between two retractions the columns of the factors are
# orthogonal, C is diagonal, and column norms and one thin product say the same.

# In place of the scale of columns that a zero direction hides: too little to
# matter, and enough to shorten an example whose hidden entries might overflow
# in a sum. Zero times infinity would be a release.
_HIDDEN = 1e-30
# How far a core may be from diagonal. Norms are taken too large by this share.
_ALMOST_DIAGONAL = 1e-5


class _ColumnScales(NamedTuple):
  """What whitening does to columns, where it is almost that alone.

  Attributes:
    left: Diagonal of ``C_R^-1``, (k, r): for the columns of ``g_L``.
    right: Diagonal of ``C_L^-1``, (k, r): for those of ``g_R``.
    slack: (k,), at least one: the true norms are at most ``slack`` times those
      with the diagonals alone.
  """

  left: jax.Array
  right: jax.Array
  slack: jax.Array


def _column_scales(frame: Frame) -> _ColumnScales:
  def side(inverse):
    # inverse = diag (I + F), so ||y inverse|| <= ||y diag|| (1 + ||F||).
    diagonal = jnp.diagonal(inverse, axis1=-2, axis2=-1)
    beside = inverse * (1 - jnp.eye(diagonal.shape[-1], dtype=inverse.dtype))
    alive = diagonal != 0
    ratios = beside / jnp.where(alive, diagonal, 1)[..., None]
    rows = jnp.sum(jnp.square(ratios), -1)
    # Nothing is known of a row whose diagonal is zero, unless all of it is.
    rows = jnp.where(alive | (rows == 0), rows, jnp.inf)
    return diagonal, jnp.sqrt(jnp.sum(rows, -1))

  left, left_excess = side(frame.right_inverse)
  right, right_excess = side(frame.left_inverse)
  return _ColumnScales(left, right, 1 + jnp.maximum(left_excess, right_excess))


def columns_are_orthogonal(frames: Sequence[Frame]) -> jax.Array:
  """Whether whitening is a scaling of columns, in all modules.

  It is behind a retraction and in canonical factors. A boolean scalar: True
  where :func:`squared_norms` takes no norm too large by more than 1e-5 of
  itself, False for NaN.
  """
  slack = [jnp.max(_column_scales(frame).slack) for frame in frames]
  return jnp.max(jnp.stack(slack)) <= 1 + _ALMOST_DIAGONAL


def squared_norms(
  frames: Sequence[Frame],
  groups: Sequence[Sequence[ModuleArrays]],
  *,
  unit: Scalar = 1.0,
) -> jax.Array:
  """Squares of the examples' intrinsic norms, where columns are orthogonal.

  ``sum ||X_L||^2 + ||X_R||^2`` over all modules (PRISM, arXiv:2606.00944,
  Eq. 15) as ``||y_L||^2 - ||Q_L^T y_L||^2 + ||y_R||^2`` with the scaled columns
  ``y`` of the factor gradients: no example's gradient is whitened or copied.

  ==========================  =================================================
  gradients of one matrix     ``||y_R||`` is at least ``||Q_L^T y_L||``: little
                              cancels
  others (one side stopped)   a hundredth of what cancels is added: more than
                              rounding can hide
  hidden by a zero factor     counts only above 1e27
  columns not orthogonal      too large, see :func:`columns_are_orthogonal`
  NaN, Inf, huge entries      not finite
  ==========================  =================================================

  Args:
    frames: One for each group of modules.
    groups: Gradients from ``ModuleTree.per_module``, with one batch axis.
    unit: The norms are divided by it.

  Returns:
    (B,), never too small.
  """
  total: Any = 0.0
  for frame, modules in zip(frames, groups, strict=True):
    scales = _column_scales(frame)
    energies = [_energies(frame.left, scales, x, unit) for x in modules]
    # (B, k) each: what follows is computed once for all of them.
    left, inside, right = (
      jnp.concatenate(x, -1) for x in zip(*energies, strict=True)
    )
    squares = jnp.maximum(left - inside, 0) + right
    squares = squares + 0.01 * jnp.maximum(left - squares, 0)
    total = total + jnp.sum(squares * jnp.square(scales.slack), -1)
  return total


def _energies(
  left_basis: jax.Array, scales: _ColumnScales, x: ModuleArrays, unit: Scalar
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """``||y_L||^2``, ``||Q_L^T y_L||^2`` and ``||y_R||^2`` of one module."""
  share = unit * x.scale**0.5
  left, right = (
    jnp.where(scale == 0, _HIDDEN, scale / share)
    for scale in (scales.left[x.place], scales.right[x.place])
  )
  inside = gram(x.left_axes.to_matrices(x.left), left_basis[x.place])
  return (
    _energy(x.left, x.left_axes, left),
    jnp.sum(jnp.square(inside * left[:, :, None]), (-2, -1)),
    _energy(x.right, x.right_axes, right),
  )


def _energy(
  stacked: jax.Array, matrix: MatrixAxes, scale: jax.Array
) -> jax.Array:
  """Squared norms (*lead, s) of (*lead, s, *shape), columns times (s, r).

  Scaled before it is squared: a square of what is tiny in another unit would
  vanish. In the order of the leaf, because a transposition would be written.
  """
  shape, rank = matrix
  across = [len(scale)] + [1] * len(shape)
  across[1 + rank] = shape[rank]
  axes = tuple(range(-len(shape), 0))
  return jnp.sum(jnp.square(stacked * scale.reshape(across)), axes)
