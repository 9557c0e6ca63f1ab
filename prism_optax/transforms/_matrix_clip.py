"""Clipping of per-example gradients matrix by matrix.

Groups that are clipped and get their noise one by one on the same batch are
ONE Gaussian mechanism: with noise ``sigma_W C_W`` on group W the whole has the
noise multiplier ``(sum_W sigma_W^-2)^(-1/2)``.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax
from dp_accounting import NeighboringRelation

from prism_optax import _clip, _matrix_axes, _validate
from prism_optax._clip import Factors, FlatClipping, Leaves
from prism_optax._clipped_sum import Bound, ClippedSum
from prism_optax._matrix_axes import DimensionNumbersLike
from prism_optax._types import ArrayTree, Scalar

# A number, or a prefix tree of numbers.
NormsLike: TypeAlias = Scalar | ArrayTree

NOISE_SPLITS = ('equal', 'least_energy')


class ClipGroup(NamedTuple):
  """Leaves that are clipped together, or a stack of matrices one by one.

  Attributes:
    leaves: Positions in ``jax.tree.leaves``.
    batch_axes: Axes that stack matrices; a group that has some has one leaf.
    matrices: Number of matrices that are clipped one by one, the product of
      the sizes of those axes; 1 for leaves that are clipped together.
    size: Number of entries of one matrix, or of the leaves together.
    l2_clip_norm: C_W, the largest norm of one example's contribution.
  """

  leaves: tuple[int, ...]
  batch_axes: tuple[int, ...]
  matrices: int
  size: int
  l2_clip_norm: Scalar


def clip_groups(
  l2_clip_norms: NormsLike,
  params: ArrayTree,
  weight_dimension_numbers: DimensionNumbersLike = None,
) -> list[ClipGroup]:
  """The clip groups of a tree of parameters.

  Args:
    l2_clip_norms: C_W, a number or a prefix tree of numbers.
    params: A tree of arrays or shapes, without any per-example axis.
    weight_dimension_numbers: Which leaves are matrices, see
      :func:`per_matrix_clip`. Every matrix is a group, those stacked along
      batch axes one by one, and all other leaves together are one.

  Returns:
    The groups; every leaf is in exactly one.

  Raises:
    ValueError: If a prefix does not fit, axes do not exist, or the leaves that
      are no matrices have several thresholds.

  Example:
    >>> import jax.numpy as jnp
    >>> from prism_optax.transforms import _matrix_clip
    >>> params = {
    ...   'b': jnp.zeros(4), 'scale': jnp.zeros(3), 'w': jnp.zeros((3, 4))}
    >>> groups = _matrix_clip.clip_groups(0.5, params)
    >>> [(g.leaves, g.size, g.l2_clip_norm) for g in groups]
    [((2,), 12, 0.5), ((0, 1), 7, 0.5)]
  """
  sizes = [math.prod(x.shape) for x in jax.tree.leaves(params)]
  norms = _matrix_axes.broadcast('l2_clip_norms', l2_clip_norms, params)
  stacks = _matrix_axes.resolve(weight_dimension_numbers, params)
  groups = [
    ClipGroup(
      (i,), stack.batch, stack.matrices, math.prod(stack.sides), norms[i]
    )
    for i, stack in enumerate(stacks)
    if stack is not None
  ]
  others = tuple(i for i, stack in enumerate(stacks) if stack is None)
  if others:
    first, *more = (norms[i] for i in others)
    if any(norm is not first and norm != first for norm in more):
      raise ValueError(
        'Expected one threshold for all leaves that are no matrices, because'
        ' they are clipped together, got l2_clip_norms='
        f'{[first, *more]} for them.'
      )
    size = sum(sizes[i] for i in others)
    groups.append(ClipGroup(others, (), 1, size, first))
  return groups


def sensitivity(groups: Sequence[ClipGroup]) -> Scalar:
  """Norm of the largest contribution to all groups, ``sqrt(sum_W C_W^2)``.

  Adding or removing one example moves the clipped sum, all groups together, by
  no more than this.
  """
  return sum(g.matrices * g.l2_clip_norm**2 for g in groups) ** 0.5


def split_noise_multiplier(
  noise_multiplier: Scalar,
  l2_clip_norms: Sequence[Scalar],
  sizes: Sequence[int],
  *,
  noise_split: str = 'equal',
) -> list[Scalar]:
  r"""Noise multipliers of clip groups that together have a given one.

  K groups of sensitivity C_W on the same batch, with noise ``sigma_W C_W``, are
  one Gaussian mechanism with ``sigma^-2 = sum_W sigma_W^-2``. The split of
  least energy is ours: of all splits of the budget ``w_W = sigma_W^-2`` with
  ``sum_W w_W = sigma^-2``, the one of least expected energy ``sum_W d_W
  sigma_W^2 C_W^2 = sum_W d_W C_W^2 / w_W`` has ``d_W C_W^2 / w_W^2`` equal for
  all W (Lagrange), that is ``w_W`` proportional to ``C_W sqrt(d_W)``. Its
  energy is ``sigma^2 (sum_W C_W sqrt(d_W))^2``. The equal split has ``sigma^2 K
  sum_W C_W^2 d_W``, which is never less (Cauchy and Schwarz). A group without
  entries has no noise; it counts as one entry.

  Args:
    noise_multiplier: sigma, of all groups together.
    l2_clip_norms: C_W of every group.
    sizes: d_W, number of entries of every group.
    noise_split: ``'equal'``, or ``'least_energy'`` as above.

  Returns:
    sigma_W for every group, never below sigma.

  Raises:
    ValueError: If ``noise_split`` is none of these, or there is no group.

  Example:
    >>> from prism_optax import transforms
    >>> transforms.split_noise_multiplier(1.0, [1.0] * 4, [6] * 4)
    [2.0, 2.0, 2.0, 2.0]
  """
  _validate.one_of('noise_split', noise_split, NOISE_SPLITS)
  if len(l2_clip_norms) != len(sizes) or not sizes:
    raise ValueError(
      'Expected one clip norm and one size for each of one group or more, got'
      f' {l2_clip_norms=} and {sizes=}.'
    )
  if noise_split == 'equal':
    return [noise_multiplier * math.sqrt(len(sizes))] * len(sizes)
  # A group without entries has no noise, but must not divide by zero.
  roots = [math.sqrt(max(size, 1)) for size in sizes]
  budgets = [c * root for c, root in zip(l2_clip_norms, roots, strict=True)]
  return [noise_multiplier * (sum(budgets) / w) ** 0.5 for w in budgets]


def noise_units(
  groups: Sequence[ClipGroup], num_leaves: int, *, noise_split: str = 'equal'
) -> list[Scalar]:
  """Each leaf's ``sigma_W C_W / sigma``, its noise in units of the joint noise.

  Leaves that are clipped to C_W and then divided by these units have the joint
  sensitivity one, and noise of one standard deviation sigma on all of them is
  the split that was asked for.
  """
  matrices = [g for g in groups for _ in range(g.matrices)]
  ratios = split_noise_multiplier(
    1.0,
    [g.l2_clip_norm for g in matrices],
    [g.size for g in matrices],
    noise_split=noise_split,
  )
  units = {
    leaf: ratio * group.l2_clip_norm
    for group, ratio in zip(matrices, ratios, strict=True)
    for leaf in group.leaves
  }
  # A stack of no matrices is in no group and gets no noise: any unit will do.
  return [units.get(leaf, 1.0) for leaf in range(num_leaves)]


class BoundedSensitivityTransformation(optax.GradientTransformationExtraArgs):
  """A transformation whose output moves by at most ``sensitivity()``.

  It unpacks into ``init`` and ``update`` like any other, so ``optax.chain``
  takes it.

  Attributes:
    sensitivity: ``sensitivity(neighboring_relation=ADD_OR_REMOVE_ONE)``, the
      largest Euclidean distance between the outputs for neighbouring batches.
      It is for tests and for direct calibration. An accountant that knows the
      relation already accounts for it: doing both counts it twice.
    pre_clipping_transform: The contribution of one example to the output before
      any noise, from its gradient: clipped, and divided by the constant.
  """

  sensitivity: Callable[..., float]
  pre_clipping_transform: Callable[[ArrayTree], ArrayTree]

  def __new__(cls, init, update, sensitivity, pre_clipping_transform):
    self = super().__new__(cls, init, update)
    self.sensitivity = sensitivity
    self.pre_clipping_transform = pre_clipping_transform
    return self


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
    return clip_groups(
      self.l2_clip_norms, params, self.weight_dimension_numbers
    )

  def _bounds(self, bound: Scalar, known: list[ClipGroup]) -> list[Bound]:
    return [Bound(x.leaves, bound * x.l2_clip_norm, x.matrices) for x in known]

  def _factors(
    self, leaves: Leaves, norm: Scalar, known: list[ClipGroup]
  ) -> Factors:
    factors, finite = list(leaves), []
    for group in known:
      squared = _clip.squared_norm(
        [leaves[i] for i in group.leaves], group.l2_clip_norm, group.batch_axes
      )
      weight, counts = _clip.clip_weight(squared)
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
    _clip.check_whole(name, params)
    # What does not fit shall fail here, not in training.
    clip.rule._known(params, _clip.DENSE.rows)
    return clip.init(params)

  def update(updates, state, params=None, **extra_args):
    _validate.params_given(name, params)
    gradients = _clip.checked_shapes(name, updates, params)
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
) -> BoundedSensitivityTransformation:
  """Clips every matrix of every per-example gradient, and adds them up.

  ``sum_i g_i / max(1, ||g_i||_F / C_W) / normalize_by`` for every weight
  matrix W with a threshold of its own (DP-Muon, arXiv:2605.12994).

  **Privacy.** When one example is added or removed, the output moves by at most
  ``sqrt(sum_W C_W^2) / normalize_by`` in the Euclidean norm of all its entries,
  whatever the example is; by at most twice that when one is replaced. All
  matrices come from the same batch, so with noise they are ONE mechanism of
  this sensitivity: noise ``sigma C_W`` on each of K matrices has the noise
  multiplier ``sigma / sqrt(K)``, not sigma. The result is not private yet,
  because the clip adds no noise. The shapes of the batch and ``normalize_by``
  are not protected.

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
    is_padding_example=None)`` takes leaves ``(B, *shape)`` and returns leaves
    ``(*shape)``, float32 at least. ``.sensitivity(neighboring_relation,
    params=params)`` is the sensitivity of all groups together; it needs
    ``params`` (arrays or shapes), because a number or a prefix does not show
    the number of groups. ``.pre_clipping_transform`` maps the gradient of one
    example to its term of that sum: with it ``jax_privacy.clipped_grad`` clips
    matrix by matrix in micro-batches. As its clip norm, give it the sensitivity
    of all groups together, which no example exceeds::

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
    if isinstance(clipped, ClippedSum):  # Not a tree without leaves.
      clipped = clipped.to_floats()
    return clipped, state

  def sensitivity_of_all(
    neighboring_relation: NeighboringRelation = _clip.ADD_OR_REMOVE_ONE,
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
    bound = sensitivity(groups) / normalize_by
    return _clip.sensitivity_of_sum(bound)(neighboring_relation)

  return BoundedSensitivityTransformation(
    inner.init, update, sensitivity_of_all, contribution
  )
