"""What is clipped together, and how several groups share one noise multiplier.

Groups that are clipped and get their noise one by one on the same batch are
ONE Gaussian mechanism: with noise ``sigma_W C_W`` on group W the whole has the
noise multiplier ``(sum_W sigma_W^-2)^(-1/2)``.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import jax

from prism_optax import _matrix_axes, _validate
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
    >>> from prism_optax.transforms import _clip_groups
    >>> params = {
    ...   'b': jnp.zeros(4), 'scale': jnp.zeros(3), 'w': jnp.zeros((3, 4))}
    >>> groups = _clip_groups.clip_groups(0.5, params)
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
  energy is ``sigma^2 (sum_W C_W sqrt(d_W))^2``; that of the equal split
  ``sigma^2 K sum_W C_W^2 d_W``, never less (Cauchy and Schwarz). A group
  without entries has no noise; it counts as one entry.

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
