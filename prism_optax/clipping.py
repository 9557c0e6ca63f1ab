"""Clipping of per-example gradients in the intrinsic norm."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from prism_optax import _linalg, _per_example, _validate, lora


def tangent_coordinates(
  params: Any, *, layout: Any = None
) -> Callable[[Any], Any]:
  """The map from one example's factor gradients to tangent coordinates.

  For each LoRA pair ``X_L = (I - P_L) g_L C_R^-1`` and ``X_R = g_R C_L^-1``,
  in the leaves of ``left`` and ``right``: orthonormal coordinates of the
  tangent projection of the gradient in ``Z = scale * left @ right.mT`` (PRISM,
  arXiv:2606.00944, Eq. 13), whose Euclidean norm is the intrinsic norm
  (Eq. 15). Other leaves count as they are. So any clipping by the global norm
  of the result is intrinsic clipping, for instance::

    jax_privacy.clipped_grad(
      loss, l2_clip_norm=1.0, normalize_by=expected_batch_size,
      pre_clipping_transform=prism_optax.tangent_coordinates(params))

  Frames are computed here, once, not for each example. Pass ``params`` of the
  same step: coordinates and the transforms that read them must agree on the
  point.

  Nothing is clipped here and nothing is private yet. Clipped to C and added up,
  the coordinates have the sensitivity C for add-or-remove-one neighbours.

  ========================  ===================================================
  one factor zero           what its gradients do not show is zero (``C^-1`` is
                            the pseudo-inverse)
  factor of lower rank      likewise, in the directions that it has lost
  both factors zero         zeros; the ``init`` of a chain refuses them
  NaN or Inf in a gradient  passes: the clip behind decides (for
                            ``clipped_grad`` the example counts as zero)
  ========================  ===================================================

  Args:
    params: Tree of trainable arrays with LoRA pairs.
    layout: See :func:`prism_optax.lora.describe_pairs`.

  Returns:
    A function from a tree like ``params`` (gradients of one example) to a tree
    of the same shapes, float32 at least, in the unit of the gradient in Z.

  Raises:
    ValueError: If pairs cannot be found, a rank is above min(m, n), or the
      gradients do not fit.

  Example:
    >>> import jax.numpy as jnp
    >>> import prism_optax
    >>> a, b = jnp.array([[2.0], [0.0]]), jnp.array([[4.0]])
    >>> params = {'lora_a': a, 'lora_b': b}
    >>> grads = {'lora_a': jnp.array([[4.0], [8.0]]), 'lora_b': b}
    >>> transform = prism_optax.tangent_coordinates(params)
    >>> transform(grads)['lora_a'].ravel().tolist()
    [1.0, 2.0]
  """
  adapters = lora.Adapters(params, layout)
  frames = adapters.frames(params)

  def transform(grads: Any) -> Any:
    blocks = lora.to_coordinates(frames, adapters.gradients(grads))
    return adapters.tree(blocks)

  return transform


def intrinsic_clip(
  l2_clip_norm: Any, *, normalize_by: Any = 1.0, layout: Any = None
) -> _per_example.BoundedSensitivityTransformation:
  """Clips per-example gradients in the intrinsic norm and adds them up.

  ``sum_i min(1, C / s_i) X_i / normalize_by`` with tangent coordinates ``X_i``
  (see :func:`tangent_coordinates`) and one norm ``s_i`` for each example over
  all modules and all other leaves (PRISM, arXiv:2606.00944, Eq. 16). What comes
  out moves by at most ``C / normalize_by`` in the Euclidean norm of all its
  entries when one example is added or removed; the noise is up to
  :func:`tangent_privatizer`.

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
  part = intrinsic_clip_part(l2_clip_norm, normalize_by)
  init, update = lora.chain_parts(part, layout=layout)
  return _per_example.BoundedSensitivityTransformation(
    init,
    update,
    _per_example.sensitivity_of_sum(l2_clip_norm / normalize_by),
  )


def intrinsic_clip_part(l2_clip_norm: Any, normalize_by: Any) -> lora.Part:
  """:func:`intrinsic_clip` on blocks."""
  _validate.positive('l2_clip_norm', l2_clip_norm)
  _validate.positive('normalize_by', normalize_by)

  def init(adapters, params):
    del adapters
    _per_example.check_whole('intrinsic_clip', params)
    return optax.EmptyState()

  def read(adapters, updates, params):
    del adapters
    _per_example.check_whole('intrinsic_clip', params)
    _per_example.check_batched('intrinsic_clip', updates, params)
    return updates

  def update(grads, state, point, *, is_padding_example=None, **extra_args):
    del extra_args
    adapters, frames = point.adapters, point.frames
    what = 'per-example gradients'

    def weighted_sums(squared, arrays):
      weights, counts = _per_example.clip_weights(squared, is_padding_example)
      weights = weights / normalize_by
      return _per_example.weighted_sums(arrays, weights, counts)

    def in_place():
      groups, others = adapters.in_place(grads, 1, what)
      squared = lora.squared_gradient_norms(frames, groups, unit=l2_clip_norm)
      if others:
        squared += _per_example.squared_norms(others, l2_clip_norm)
      wide = jax.tree.map(
        lambda x: x.astype(jnp.promote_types(x.dtype, jnp.float32)), grads
      )
      summed = weighted_sums(squared, wide)
      return lora.to_coordinates(frames, adapters.gradients(summed))

    def in_coordinates():
      # (B, k, ., r) and (B, *shape): axis 0 is the batch throughout.
      blocks = lora.to_coordinates(frames, adapters.gradients(grads, 1, what))
      squared = _per_example.squared_norms(
        jax.tree.leaves(blocks), l2_clip_norm
      )
      return weighted_sums(squared, blocks)

    # Behind a retraction, and from canonical factors on, each example is read
    # twice where it lies and nothing is made of it. In any other gauge sums of
    # gradients would mix columns of different sizes before they are whitened.
    orthogonal = lora.columns_are_orthogonal(frames)
    return _linalg.branch(orthogonal, in_place, in_coordinates), state

  return lora.Part('intrinsic_clip', init, update, read=read)
