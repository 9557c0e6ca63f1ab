"""Per-example gradients in tangent coordinates, ready for any clip."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from prism_optax._linalg import matmul
from prism_optax._modules import LayoutLike, Stacks, StepContext, map_pairs
from prism_optax._types import ArrayTree
from prism_optax.fixed_rank import _tangents


def tangent_coordinates(
  params: ArrayTree, *, layout: LayoutLike = None
) -> Callable[[ArrayTree], ArrayTree]:
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

  **Privacy.** Nothing is clipped here and nothing is private yet. Clipped to C
  and added up, the coordinates have the sensitivity C for add-or-remove-one
  neighbours.

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
  step = StepContext(params, layout)
  coordinates = stacked_coordinates(step)

  def transform(grads: ArrayTree) -> ArrayTree:
    return step.tree.tree(coordinates(step.tree.gradients(grads)))

  return transform


def stacked_coordinates(step: StepContext) -> Callable[[Stacks], Stacks]:
  """:func:`tangent_coordinates` of the stacked gradients of one example.

  Half of its products are with the inverses of cores. Where these are diagonal,
  in the gauge that a retraction leaves, a CPU multiplies columns.
  """
  frames = step.frames  # Computed here, not once for each example.
  diagonal = functools.reduce(
    jnp.logical_and, map(_tangents.has_diagonal_inverses, frames)
  )

  def coordinates(gradients: Stacks) -> Stacks:
    def by(times: Callable[..., jax.Array]) -> Callable[..., ArrayTree]:
      return lambda pairs: map_pairs(
        lambda pair, frame: _tangents.whitened(frame, pair, times),
        pairs,
        frames,
      )

    pairs = gradients.pairs
    usual, by_columns = by(matmul), by(_tangents.times_diagonal)
    if isinstance(diagonal, jax.core.Tracer):
      pairs = jax.lax.platform_dependent(
        pairs,
        cpu=lambda x: jax.lax.cond(diagonal, by_columns, usual, x),
        default=usual,
      )
    else:
      pairs = (by_columns if diagonal else usual)(pairs)
    return gradients._replace(pairs=pairs)

  return coordinates
