"""What clip and noise do to one batch (not private), and what a batch mixes."""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from prism_optax import _per_example, _validate, fixed_rank
from prism_optax._modules import LayoutLike, ModuleTree

ArrayTree: TypeAlias = optax.Params  # Any tree of arrays, not parameters alone.


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

  The norm is that of PRISM's Eq. 16 (arXiv:2606.00944) or, for its issue I,
  that of Eq. 4. Not private: the result must not leave the trusted side unless
  the data is public.

  Args:
    per_example_grads: Leaves ``(B, *shape)``, gradients of the factors.
    params: Tree of trainable arrays.
    l2_clip_norm: C, positive, in the unit of one example's gradient.
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
    tree = ModuleTree(params, layout)
    gradients = tree.gradients(per_example_grads, 1, 'per_example_grads')
    stacks = gradients.map_pairs(
      lambda pair, frame: fixed_rank.tangent_from_gradients(frame, pair),
      tree.frames(params),
    )
    leaves = jax.tree.leaves(stacks)
  norms = jnp.sqrt(
    jax.vmap(_per_example.squared_norm, (0, None))(leaves, l2_clip_norm)
  )
  return ClipStatistics(
    norms * l2_clip_norm,
    jnp.mean(norms > 1, dtype=jnp.float32),
    jnp.mean(1 / jnp.maximum(norms, 1)),
  )


def nonprivate_signal_to_noise(
  coordinates: optax.Updates,
  params: optax.Params,
  stddev: float | jax.Array,
  *,
  layout: LayoutLike = None,
) -> jax.Array:
  """Returns the norm of a clipped mean over the norm of its noise.

  The noise counts with its root mean square: the ratio is ``||X|| / (s
  sqrt(d))``. The dimension d is that of the tangent space, ``sum r (m + n -
  r)`` by PRISM's Theorem 3.1 (arXiv:2606.00944), full rank assumed, plus that
  of the other leaves. Not private: it reads the mean before the noise.

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
  tree = ModuleTree(params, layout)
  stacks = tree.coordinates(coordinates, 'coordinates')
  square = sum(jnp.sum(jnp.square(x)) for x in jax.tree.leaves(stacks))
  dimension = sum(x.size for x in stacks.others) + sum(
    int(np.prod(x.stack)) * x.rank * (x.m + x.n - x.rank) for x in tree.modules
  )
  ratio: jax.Array = jnp.sqrt(square / dimension) / stddev
  return ratio


def depends_on_other_examples(
  per_example_grads: Callable[[ArrayTree, ArrayTree], ArrayTree],
  params: ArrayTree,
  batch: ArrayTree,
  *,
  tolerance: float = 1e-4,
) -> bool:
  """Returns whether an example's gradient depends on the rest of its batch.

  Clipping bounds what one record does to its own gradient only: with batch
  normalisation, in-batch negatives or a loss normalised over the batch the
  sensitivity is not what the clip says, and no epsilon holds. Try it on made-up
  data before training. The test is ours, and a False is no proof. An entry that
  is finite among some examples and not among others has changed.

  Args:
    per_example_grads: ``f(params, batch)``, a tree of leaves (B, ...).
    params: First argument of ``per_example_grads``.
    batch: Tree of arrays (B, ...), B at least 2, not all examples equal.
    tolerance: Relative change that counts as rounding.

  Returns:
    True if the gradient of any example moves when the others are exchanged.

  Raises:
    ValueError: If the batch has fewer than two examples.

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> from prism_optax import diagnostics
    >>> loss = lambda p, x: jnp.mean((p * x) ** 2)
    >>> alone = lambda p, xs: jax.vmap(jax.grad(loss), (None, 0))(p, xs)
    >>> centred = lambda p, xs: alone(p, xs - xs.mean(0))
    >>> batch = jnp.arange(6.0).reshape(3, 2)
    >>> diagnostics.depends_on_other_examples(alone, jnp.ones(2), batch)
    False
    >>> diagnostics.depends_on_other_examples(centred, jnp.ones(2), batch)
    True
  """
  size = jax.tree.leaves(batch)[0].shape[0]
  if size < 2:
    raise ValueError(f'Expected a batch of at least 2 examples, got {size}.')
  together = per_example_grads(params, batch)
  for i in range(size):
    # The same example in the same place, in the company of its copies.
    copies = jax.tree.map(lambda x, i=i: jnp.broadcast_to(x[i], x.shape), batch)
    alone = per_example_grads(params, copies)
    pairs = zip(*map(jax.tree.leaves, (together, alone)), strict=True)
    if any(_differ(x[i], y[i], tolerance) for x, y in pairs):
      return True
  return False


def _differ(x: jax.Array, y: jax.Array, tolerance: float) -> bool:
  """Whether y is another array than x, or not finite in other places."""
  a, b = np.asarray(x, np.float64), np.asarray(y, np.float64)
  size = np.max(np.abs(a), where=np.isfinite(a), initial=0.0)
  # NaN is equal to NaN alone, an infinity to itself.
  return not np.allclose(b, a, rtol=0, atol=tolerance * size, equal_nan=True)
