"""What clip and noise do to one batch: not private."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from prism_optax import _per_example, _validate, lora


class ClipStatistics(NamedTuple):
  """How a clip acts on one batch. Not private.

  Attributes:
    norms: Of each example, (B,).
    clipped_fraction: Share of the examples with a norm above the clip norm.
    mean_coefficient: Mean of ``min(1, C / norm)``.
  """

  norms: jax.Array
  clipped_fraction: jax.Array
  mean_coefficient: jax.Array


def nonprivate_clip_statistics(
  per_example_grads: Any,
  params: Any,
  l2_clip_norm: Any,
  *,
  space: str = 'tangent',
  layout: Any = None,
) -> ClipStatistics:
  """How a clip acts on a batch: norms, clip fraction, mean coefficient.

  The norm of PRISM's Eq. 16 (arXiv:2606.00944) or, for its issue I, that of
  Eq. 4. Not private: for public data, or for nobody's eyes.

  Args:
    per_example_grads: Leaves ``(B, *shape)``, gradients of the factors.
    params: Tree of trainable arrays.
    l2_clip_norm: C, in the unit of one example's gradient.
    space: ``'tangent'`` for the intrinsic norm, the same in every gauge;
      ``'factor'`` for the norm that DP-SGD on the factors takes.
    layout: See :func:`prism_optax.lora.describe_pairs`.

  Returns:
    The statistics. Examples with a NaN or Inf have norms that are not finite.

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
    adapters = lora.Adapters(params, layout)
    gradients = adapters.gradients(per_example_grads, 1, 'per_example_grads')
    blocks = lora.to_coordinates(adapters.frames(params), gradients)
    leaves = jax.tree.leaves(blocks)
  norms = jnp.sqrt(_per_example.squared_norms(leaves, l2_clip_norm))
  return ClipStatistics(
    norms * l2_clip_norm,
    jnp.mean(norms > 1, dtype=jnp.float32),
    jnp.mean(1 / jnp.maximum(norms, 1)),
  )


def nonprivate_signal_to_noise(
  coordinates: Any, params: Any, stddev: Any, *, layout: Any = None
) -> jax.Array:
  """Norm of a clipped mean over the root mean square norm of its noise.

  ``||X|| / (s sqrt(d))``, d the dimension of the tangent space and of the other
  leaves: ``sum r (m + n - r)`` by PRISM's Theorem 3.1 (arXiv:2606.00944), full
  rank assumed. Not private: it reads the mean before the noise.

  Args:
    coordinates: The clipped mean before noise, tangent coordinates.
    params: Tree of trainable arrays.
    stddev: s, per coordinate, in the unit of ``coordinates``.
    layout: See :func:`prism_optax.lora.describe_pairs`.

  Returns:
    The ratio, shape (); ``inf`` or NaN for s = 0.

  Raises:
    ValueError: If pairs cannot be found, or the trees do not fit each other.

  Example:
    >>> import jax.numpy as jnp
    >>> from prism_optax import diagnostics
    >>> params = {'lora_a': jnp.eye(3, 1), 'lora_b': jnp.eye(1, 2)}
    >>> mean = {'lora_a': jnp.zeros((3, 1)), 'lora_b': jnp.full((1, 2), 2.0)}
    >>> ratio = diagnostics.nonprivate_signal_to_noise(mean, params, 0.5)
    >>> round(ratio.item(), 4)
    2.8284
  """
  adapters = lora.Adapters(params, layout)
  blocks = adapters.coordinates(coordinates, 'coordinates')
  square = sum(jnp.sum(jnp.square(x)) for x in jax.tree.leaves(blocks))
  dimension = sum(x.size for x in blocks.others) + sum(
    int(np.prod(x.stack)) * x.rank * (x.m + x.n - x.rank)
    for x in adapters.modules
  )
  return jnp.sqrt(square / dimension) / stddev
