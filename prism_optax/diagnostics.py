"""Proofs about programs, and how a clip acts on a batch.

A proof reads a program, and no values. Functions of raw per-example values are
named ``nonprivate_*``. No guarantee covers their results, so compute them on
public data, or keep them on the trusted side.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from prism_optax import _clip, _validate, fixed_rank
from prism_optax._modules import LayoutLike, ModuleTree
from prism_optax._proofs._independence import prove_independent
from prism_optax._proofs._release import prove_released

# fmt: off
__all__ = [
  'nonprivate_clip_statistics', 'prove_independent', 'prove_released',
]
# fmt: on


class ClipStatistics(NamedTuple):
  """How a clip acts on one batch. Not private.

  Attributes:
    norms: Norm of each example, shape (B,).
    clipped_fraction: Share of the examples with a norm above the clip norm.
    mean_coefficient: Mean of ``min(1, C / norm)`` over the examples.
  """

  norms: jax.Array
  clipped_fraction: jax.Array
  mean_coefficient: jax.Array


def nonprivate_clip_statistics(
  per_example_grads: optax.Updates,
  params: optax.Params,
  l2_clip_norm: float | jax.Array,
  *,
  space: str = 'tangent',
  layout: LayoutLike = None,
) -> ClipStatistics:
  """Returns how a clip acts on a batch: norms, clip fraction, coefficient.

  The norm is defined in PRISM's Eq. 16 (arXiv:2606.00944) or, on the factors,
  in Eq. 4. The result is not private: keep it on the trusted side unless the
  data is public.

  Args:
    per_example_grads: Leaves ``(B, *shape)``, gradients of the factors.
    params: Tree of trainable arrays.
    l2_clip_norm: C, positive, in the unit of one example's gradient.
    space: ``'tangent'`` for the intrinsic norm, the same in every gauge;
      ``'factor'`` for the norm that DP-SGD on the factors takes.
    layout: See :func:`prism_optax.lora.describe_pairs`.

  Returns:
    ``norms`` (B,) of the examples, not finite where one has a NaN or Inf;
    ``clipped_fraction``, the share of the examples with a norm above the clip
    norm; ``mean_coefficient``, the mean of ``min(1, C / norm)``.

  Raises:
    ValueError: For another space, or a clip norm that is not positive.

  Example:
    >>> import jax.numpy as jnp
    >>> from prism_optax import diagnostics
    >>> params = {'lora_a': jnp.eye(3, 1), 'lora_b': 4 * jnp.eye(1, 2)}
    >>> grads = {'lora_a': jnp.zeros((2, 3, 1)),
    ...          'lora_b': jnp.array([[[0.0, 5.0]], [[0.0, 0.5]]])}
    >>> found = diagnostics.nonprivate_clip_statistics(grads, params, 2.0)
    >>> found.norms.tolist(), found.clipped_fraction.item()
    ([5.0, 0.5], 0.5)
  """
  _validate.one_of('space', space, ('tangent', 'factor'))
  _validate.positive('l2_clip_norm', l2_clip_norm)
  leaves = jax.tree.leaves(per_example_grads)
  if space == 'tangent':
    tree = ModuleTree(params, layout)
    gradients = tree.gradients(per_example_grads, 1, 'per_example_grads')
    stacks = gradients.map_pairs(
      lambda pair, frame: fixed_rank.tangent_from_gradients(frame, pair),
      tree.frames(params),
    )
    leaves = jax.tree.leaves(stacks)
  norms = jnp.sqrt(
    jax.vmap(_clip.squared_norm, (0, None))(leaves, l2_clip_norm)
  )
  return ClipStatistics(
    norms * l2_clip_norm,
    jnp.mean(norms > 1, dtype=jnp.float32),
    jnp.mean(1 / jnp.maximum(norms, 1)),
  )
