"""Per-example gradients in tangent coordinates, and their clip.

The coordinates alone are ready for any clip.
"""

from collections.abc import Callable
from typing import cast

import jax

from prism_optax import _clip, _validate
from prism_optax._clip import FlatClipping
from prism_optax._clipped_sum import ClippedSum
from prism_optax._modules import LayoutLike, Stacks, StepContext
from prism_optax._randomness import _keys
from prism_optax._types import ArrayTree, PRNGKeyLike, Scalar
from prism_optax.transforms._chain import Stacked, TangentTransformation


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
  NaN or Inf in a gradient  passes: the clip after it decides (for
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
  coordinates = step.coordinates_of_gradients()
  return lambda grads: step.tree.tree(coordinates(grads))


class StackedSum(ClippedSum):
  """The sum of a clip as stacks: whoever reads their pairs gets floats.

  So noise of your own may read them, or hand the whole to the privatizer, which
  takes the sum exactly.
  """

  pairs = property(lambda self: self.to_floats().pairs)
  others = property(lambda self: self.to_floats().others)

  def map_pairs(self, *args: ArrayTree) -> Stacks:
    return self.to_floats().map_pairs(*args)

  def _replace(self, **fields: object) -> Stacks:
    return self.to_floats()._replace(**fields)


jax.tree_util.register_pytree_node(
  StackedSum,
  lambda x: (tuple(x.to_floats()), None),
  lambda _, children: cast(StackedSum, Stacks(*children)),
)


def intrinsic_clip(
  l2_clip_norm: Scalar,
  *,
  rule: FlatClipping | None = None,
  normalize_by: Scalar = 1.0,
  prng_key: PRNGKeyLike = None,
  layout: LayoutLike = None,
) -> TangentTransformation:
  """Clips per-example gradients in the intrinsic norm and adds them up.

  ``sum_i min(1, C / s_i) X_i / normalize_by`` with tangent coordinates ``X_i``
  (see :func:`tangent_coordinates`) and one norm ``s_i`` for each example over
  all modules and all other leaves (PRISM, arXiv:2606.00944, Eq. 16).

  **Privacy.** When one example is added or removed, the result moves by at most
  ``C / normalize_by`` in the Euclidean norm of all its entries, whatever the
  example holds and whatever the rule. It is not private yet:
  :func:`tangent_privatizer`, directly after it, adds the noise. A rule that
  follows a quantile also releases, in each step, the noisy fraction of examples
  that were not cut, with noise multiplier ``2 normalize_by fraction_stddev``.
  You must account for it (:func:`prism_optax.training.make_private` does). Its
  result is in units of its C, so it moves by ``1 / normalize_by``.

  All per-example gradients are held at once, unless they come from
  :func:`prism_optax.lora.in_microbatches`. ``jax_privacy.clipped_grad`` with
  :func:`tangent_coordinates` gives the same. ``optax.MultiSteps`` can
  accumulate after the clip: with ``normalize_by=expected_batch_size / k`` the
  mean over k micro-batches of one Poisson batch equals the mean of the whole
  batch, and needs the same noise. Do not use its ``should_skip_update_fn``,
  which would decide by values that are not private yet.

  ===================================  ========================================
  NaN or Inf in an example             it counts as zero
  squared norm that overflows          the example counts as zero
  padding example                      counts as zero
  batch of padding only, or of size 0  zeros
  bfloat16 gradients                   norm, clip and sum in float32
  norm below ``C (1 - 1e-6)``          the example stays as it is; longer ones
                                       are cut to this: room for rounding
  ===================================  ========================================

  Args:
    l2_clip_norm: C, the largest norm of an example's contribution to the sum.
    rule: How an example is cut to C. None is the flat clip, as above. Others
      are ``AutomaticClipping``, ``GroupClipping`` and ``QuantileClipping`` of
      :mod:`prism_optax.training`; the last one begins with C.
    normalize_by: A public constant that divides the sum: the EXPECTED batch
      size, never the realised one.
    prng_key: Key of the noise of the fraction, for a rule that follows a
      quantile, as for :func:`tangent_privatizer`. It must not be the key of
      another noise.
    layout: See :func:`prism_optax.lora.describe_pairs`.

  Returns:
    A transformation whose ``update(per_example_grads, state, params,
    is_padding_example=None)`` takes leaves ``(B, *shape)`` and returns
    leaves ``(*shape)`` in tangent coordinates, float32 at least.
    ``.sensitivity(neighboring_relation)`` is C / normalize_by (with a quantile
    1 / normalize_by), twice that for REPLACE_ONE.

  Raises:
    ValueError: If C or ``normalize_by`` is not a positive finite number (a
      traced one is not checked); if ``prng_key`` is no key; in ``init`` if
      labels of groups do not fit; if ``optax.masked`` or ``optax.partition``
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
  _keys.check_key('prng_key', prng_key, words=4)
  rule = FlatClipping() if rule is None else rule
  clip = _clip.Clip(rule, l2_clip_norm, normalize_by, prng_key)
  return tangent_clip(clip, layout)


def tangent_clip(clip: _clip.Clip, layout: LayoutLike) -> TangentTransformation:
  """:func:`intrinsic_clip` of a rule with its numbers."""
  name = 'intrinsic_clip'

  def init(step):
    _clip.check_whole(name, step.params)
    # Labels that do not fit shall fail here, not in training.
    clip.rule._known(step.params, step.tree.rows)
    return clip.init(step.params)

  def update(grads, state, step, **extra_args):
    shapes = _clip.checked_shapes(name, grads, step.params)
    # Of shapes alone: refuses gradients that do not fit.
    jax.eval_shape(
      lambda x: step.tree.gradients(x, 1, 'per-example gradients'), shapes
    )
    tangent = _clip.Coordinates(
      step.coordinates_of_gradients(), step.tree.rows, StackedSum
    )
    return clip.sum(tangent, grads, step.params, state, **extra_args)

  return TangentTransformation(
    Stacked(name, init, update, ('clip',)),
    layout,
    _clip.sensitivity_of_sum(clip.bound / clip.normalize_by),
  )
