"""Clipping of per-example gradients matrix by matrix."""

import dataclasses

import jax
import jax.numpy as jnp
import optax
from dp_accounting import NeighboringRelation

from prism_optax import _clip, _per_example, _validate
from prism_optax._clip import Factors, FlatClipping, Leaves
from prism_optax._clipped_sum import Bound, to_floats
from prism_optax._matrix_axes import DimensionNumbersLike
from prism_optax._types import ArrayTree, Scalar
from prism_optax.transforms import _clip_groups
from prism_optax.transforms._clip_groups import ClipGroup, NormsLike


@dataclasses.dataclass(frozen=True)
class EachMatrix(FlatClipping):
  """Cuts every matrix by itself, to a norm of its own.

  Attributes:
    l2_clip_norms: As for :func:`per_matrix_clip`.
    weight_dimension_numbers: Likewise.
  """

  l2_clip_norms: NormsLike
  weight_dimension_numbers: DimensionNumbersLike = None

  def _known(self, params: ArrayTree, rows: ArrayTree) -> list[ClipGroup]:
    del rows
    return _clip_groups.clip_groups(
      self.l2_clip_norms, params, self.weight_dimension_numbers
    )

  def _bounds(self, bound: Scalar, known: list[ClipGroup]) -> list[Bound]:
    return [Bound(x.leaves, bound * x.l2_clip_norm, x.matrices) for x in known]

  def _factors(
    self, leaves: Leaves, norm: Scalar, known: list[ClipGroup]
  ) -> Factors:
    factors, finite = list(leaves), []
    for group in known:
      squared = _per_example.squared_norm(
        [leaves[i] for i in group.leaves], group.l2_clip_norm, group.batch_axes
      )
      weight, counts = _per_example.clip_weight(squared)
      finite.append(jnp.all(counts))
      for i in group.leaves:
        axes = [a for a in range(leaves[i].ndim) if a not in group.batch_axes]
        factors[i] = jnp.expand_dims(weight, axes if group.batch_axes else ())
    # An example counts everywhere or nowhere: half an example is no gradient.
    return Factors(leaves, factors, jnp.all(jnp.stack(finite)))


def dense_clip(
  name: str, clip: _clip.Clip
) -> optax.GradientTransformationExtraArgs:
  """Clips gradients as they are, and hands the sum on as a ``ClippedSum``."""

  def init(params):
    _per_example.check_whole(name, params)
    # What does not fit shall fail here, not in training.
    clip.rule._known(params, _clip.DENSE.rows)
    return clip.init(params)

  def update(updates, state, params=None, **extra_args):
    _validate.params_given(name, params)
    gradients = _per_example.checked_shapes(name, updates, params)
    leaves, structure = jax.tree.flatten(gradients)
    expected: object = jax.tree.structure(params)
    shapes = [x.shape for x in leaves]
    wanted = [x.shape for x in jax.tree.leaves(params)]
    batch = shapes[0][:1] if shapes else ()
    if structure != expected or shapes != [batch + shape for shape in wanted]:
      raise ValueError(
        'Expected per-example gradients, shaped like params with one leading'
        f' batch axis, got shapes {shapes} for params of shapes {wanted}.'
      )
    if not leaves:
      return updates, state
    return clip.sum(_clip.DENSE, updates, params, state, **extra_args)

  return optax.GradientTransformationExtraArgs(init, update)


def per_matrix_clip(
  l2_clip_norms: NormsLike,
  *,
  normalize_by: Scalar = 1.0,
  weight_dimension_numbers: DimensionNumbersLike = None,
) -> _per_example.BoundedSensitivityTransformation:
  """Clips every matrix of every per-example gradient, and adds them up.

  ``sum_i g_i / max(1, ||g_i||_F / C_W) / normalize_by`` for every weight
  matrix W with a threshold of its own (DP-Muon, arXiv:2605.12994).

  **Privacy.** When one example is added or removed, the output moves by at most
  ``sqrt(sum_W C_W^2) / normalize_by`` in the Euclidean norm of all its entries,
  whatever the example is; by at most twice that when one is replaced. All
  matrices see the same batch, so with noise they are ONE mechanism of this
  sensitivity: noise ``sigma C_W`` on each of K matrices has the noise
  multiplier ``sigma / sqrt(K)``, not sigma. Nothing is private yet: the clip
  adds no noise. The shapes of the batch and ``normalize_by`` are not protected.

  ===================================  ========================================
  NaN or Inf anywhere in an example    the example counts as zero everywhere
  squared norm that overflows          likewise
  padding example                      counts as zero
  batch of padding only, or of size 0  zeros
  tree without leaves                  passes
  bfloat16 gradients                   norm, clip and sum in float32
  norm below ``C_W (1 - 1e-6)``        the matrix is unchanged
  ===================================  ========================================

  Args:
    l2_clip_norms: C_W, a number or a prefix tree of numbers; a number in it is
      the threshold of each group below it.
    normalize_by: A public constant that divides the sum: the EXPECTED batch
      size, never the realised one.
    weight_dimension_numbers: Defines the clip groups: every matrix is one,
      those stacked along batch axes one by one, and all other leaves together
      are one more and must have one threshold. ``None``, here as in
      :func:`prism_optax.dp_muon`: leaves of two axes are matrices. Otherwise a
      tree of ``optax.contrib.MuonDimensionNumbers`` and ``None`` (no matrix), a
      prefix of the parameters, or a callable that makes one of them.

  Returns:
    A transformation whose ``update(per_example_grads, state, params,
    is_padding_example=None)`` takes leaves ``(B, *shape)`` and returns
    leaves ``(*shape)``, float32 at least. ``.sensitivity(neighboring_relation,
    params=params)`` is the sensitivity of all groups together; it needs
    ``params`` (arrays or shapes) because a number or a prefix does not tell how
    many groups there are. ``.pre_clipping_transform`` maps the gradient of one
    example to its term of that sum: with it ``jax_privacy.clipped_grad`` clips
    matrix by matrix in micro-batches. Give it the sensitivity of all groups
    together, which no example exceeds, as its clip norm::

      clip = per_matrix_clip(norms)
      jax_privacy.clipped_grad(
        loss, l2_clip_norm=clip.sensitivity(params=params),
        normalize_by=expected_batch_size,
        pre_clipping_transform=clip.pre_clipping_transform)

  Raises:
    ValueError: If a threshold or ``normalize_by`` is not a positive finite
      number (a traced one is not checked); if a prefix does not fit; if
      ``optax.masked`` or ``optax.partition`` hides leaves, whose gradients
      would pass unclipped; in ``update`` if ``params`` is missing or the
      gradients do not have one leading batch axis, as inside of
      ``optax.MultiSteps``.

  Example:
    >>> import jax.numpy as jnp
    >>> import prism_optax
    >>> clip = prism_optax.per_matrix_clip({'w': 3.0, 'v': 4.0})
    >>> params = {'w': jnp.zeros((2, 2)), 'v': jnp.zeros((1, 3))}
    >>> clip.sensitivity(params=params)
    5.0
    >>> grads = {'w': jnp.full((1, 2, 2), 9.0), 'v': jnp.full((1, 1, 3), 0.5)}
    >>> clipped, _ = clip.update(grads, clip.init(params), params)
    >>> print(jnp.linalg.norm(clipped['w']).round(4), clipped['v'])
    3.0 [[0.5 0.5 0.5]]
  """
  for norm in jax.tree.leaves(l2_clip_norms, is_leaf=lambda x: x is None):
    _validate.positive('l2_clip_norms', norm)
  _validate.positive('normalize_by', normalize_by)

  rule = EachMatrix(l2_clip_norms, weight_dimension_numbers)
  clip = _clip.Clip(rule, normalize_by=normalize_by)
  inner = dense_clip('per_matrix_clip', clip)

  def contribution(grads):
    if not jax.tree.leaves(grads):
      return grads
    return clip.contribution(_clip.DENSE, grads)(grads)

  def update(updates, state, params=None, **extra_args):
    clipped, state = inner.update(updates, state, params, **extra_args)
    return to_floats(clipped), state

  def sensitivity_of_all(
    neighboring_relation: NeighboringRelation = _per_example.ADD_OR_REMOVE_ONE,
    *,
    params: ArrayTree | None = None,
  ) -> Scalar:
    if params is None:
      raise ValueError(
        'The sensitivity depends on the number of matrices, which'
        ' l2_clip_norms alone does not tell: call'
        ' `sensitivity(relation, params=params)`, got params=None.'
      )
    groups = rule._known(params, _clip.DENSE.rows)
    bound = _clip_groups.sensitivity(groups) / normalize_by
    return _per_example.sensitivity_of_sum(bound)(neighboring_relation)

  return _per_example.BoundedSensitivityTransformation(
    inner.init, update, sensitivity_of_all, contribution
  )
