"""What adapters add to the weights, and adding it to them.

Everything here reads adapters and weights and no data: post-processing of what
they are.
"""

import itertools
import math
import operator
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax

from prism_optax import _modules
from prism_optax._linalg._products import at_least_float32, matmul
from prism_optax._matrix_axes import with_leaves
from prism_optax._modules import LayoutLike, Module, ModuleTree
from prism_optax._types import Array, ArrayTree
from prism_optax.fixed_rank import Factors

# The path of a weight, '/' between keys, alone or with its axes in the order
# (*stack, *in, *out).
Kernel: TypeAlias = str | tuple[str, Sequence[int]]
KernelsLike: TypeAlias = Mapping[str, Kernel] | None


def deltas(
  params: optax.Params, *, layout: LayoutLike = None, dense: bool = False
) -> dict[str, ArrayTree]:
  """``Z = scale * left @ right.mT`` of each module, by name.

  The matrices that the adapters add to the weights. They are the same in all
  gauges of the factors, and clip, noise and learning rate act on them. This
  reads parameters and no data, so it is post-processing.

  Args:
    params: Tree of trainable arrays with LoRA pairs.
    layout: See :func:`describe_pairs`. Without it the scale is 1.
    dense: Multiply the factors out: arrays ``(*stack, m, n)`` in place of
      ``fixed_rank.Factors`` of ``(*stack, m, r)`` and ``(*stack, n, r)``.

  Returns:
    Outputs m come first and inputs n last, whatever the library's orientation
    is; several output or input axes are flattened in their order. The scale is
    shared out as its square root on either factor. In float32 at least.

  Raises:
    ValueError: If pairs cannot be found.

  Example:
    >>> import jax.numpy as jnp
    >>> from prism_optax import lora
    >>> params = {'dense': {'lora_a': jnp.ones((6, 2)),
    ...                     'lora_b': jnp.ones((2, 5))}}
    >>> lora.deltas(params)['dense'].left.shape
    (5, 2)
    >>> layout = {'dense': lora.Layout(scale=4.0)}
    >>> z = lora.deltas(params, layout=layout, dense=True)
    >>> z['dense'].shape, float(z['dense'][0, 0])
    ((5, 6), 8.0)
  """
  tree = ModuleTree(params, layout)
  pairs = tree.factors(params).pairs
  left, right = (tree.by_module(x) for x in zip(*pairs, strict=True))
  if dense:
    return {name: matmul(left[name], right[name].mT) for name in left}
  return {name: Factors(left[name], right[name]) for name in left}


class Place(NamedTuple):
  """A module and the weight that it changes.

  Attributes:
    module: The module.
    leaf: Position of the weight in the flattened tree of weights.
    axes: Axes of the weight in the order ``(*stack, *in, *out)``.
  """

  module: Module
  leaf: int
  axes: tuple[int, ...]

  def read(self, leaves: Sequence[Array]) -> jax.Array:
    """The weight as matrices (k, m, n), float32 at least."""
    x = at_least_float32(leaves[self.leaf]).transpose(self.axes)
    return x.reshape(-1, self.module.n, self.module.m).mT

  def write(self, leaves: list[Array], matrices: jax.Array) -> None:
    """Puts matrices (k, m, n) into ``leaves``, in the type of the weight."""
    old = leaves[self.leaf]
    x = matrices.mT.reshape([old.shape[axis] for axis in self.axes])
    x = x.transpose(_modules.inverse(self.axes))
    leaves[self.leaf] = x.astype(old.dtype)


def merge(
  params: optax.Params,
  weights: optax.Params,
  *,
  kernels: KernelsLike = None,
  layout: LayoutLike = None,
) -> optax.Params:
  """Adds the matrices Z of the adapters to the frozen weights.

  A model that computes ``W + scale * left @ right.mT`` gives the same with the
  merged weights and no adapters. Sums are made in float32 at least and rounded
  once to the type of the weight. Adapters with one negated factor subtract Z
  from the weights. This reads adapters and weights and no data, so it is
  post-processing.

  =========================  ==================================================
  adapters of Z = 0          the weights as they are
  bfloat16 weights           summed in float32, rounded once
  integer weights            ValueError: a quantised weight cannot take Z
  two modules, one weight    ValueError
  no or several candidates   ValueError that lists them; ``kernels`` decides
  =========================  ==================================================

  Args:
    params: Tree of trainable arrays with LoRA pairs.
    weights: Tree with the frozen weights; its other leaves pass, of whatever
      type. Nested dicts, an ``nnx.State``, or any tree of arrays.
    kernels: For each module (its name, see :func:`describe_pairs`) the path of
      its weight in the tree, '/' between keys; or the path and the axes of the
      weight in the order ``(*stack, *in, *out)``, where they are in another
      one: ``('q/weight', (1, 0))`` for a matrix (out, in). Modules that are not
      named get the one leaf that has the shape
      ``(*stack, *in, *out)``, features split as they may be, and stands where
      their library puts it: at ``name`` itself, beside the factors
      (``dense/kernel`` for ``dense/lora_a`` or ``dense/lora/lora_a``) or in
      ``base_module``.
    layout: See :func:`describe_pairs`. Its scale counts.

  Returns:
    A tree like ``weights``.

  Raises:
    ValueError: If a weight is not found, is not the only candidate, or does not
      fit.

  Example:
    >>> import jax.numpy as jnp
    >>> from prism_optax import lora
    >>> params = {'q': {'lora_a': jnp.ones((3, 1)), 'lora_b': jnp.ones((1, 2))}}
    >>> merged = lora.merge(params, {'q': {'kernel': jnp.zeros((3, 2))}})
    >>> float(merged['q']['kernel'].sum())
    6.0
  """
  modules = _modules.find_modules(params, layout)
  adapters, leaves = jax.tree.leaves(params), jax.tree.leaves(weights)
  for place in find_kernels(modules, weights, kernels):
    left, right = place.module.read(adapters, at_least_float32)
    z = place.module.scale * matmul(left, right.mT)
    place.write(leaves, place.read(leaves) + z)
  return with_leaves(weights, leaves)


def find_kernels(
  modules: Sequence[Module], weights: optax.Params, kernels: KernelsLike
) -> list[Place]:
  """The weight of every module; see :func:`merge`."""
  names, leaves = _modules.named_leaves(weights)
  kernels = kernels or {}
  unknown = set(kernels) - {x.name for x in modules}
  if unknown:
    raise ValueError(
      f'kernels names {sorted(unknown)}, which are no modules; these are'
      f' {[x.name for x in modules]}.'
    )
  places = []
  for x in modules:
    kernel = kernels.get(x.name) or _one_candidate(x, names, leaves)
    places.append(_placed(x, kernel, names, leaves))
  taken = [place.leaf for place in places]
  for place in places:
    if taken.count(place.leaf) > 1:
      raise ValueError(
        f'Expected one module for each weight, got {names[place.leaf]!r} for'
        f' {[x.module.name for x in places if x.leaf == place.leaf]}.'
      )
  return places


def _shape_of(module: Module) -> tuple[int, ...]:
  """``(*stack, *in, *out)``."""
  a, b = module.a_axes.matrix, module.b_axes.matrix
  return (*module.stack, *a.features, *b.features)


def _is_float(leaf: object) -> bool:
  dtype = getattr(leaf, 'dtype', None)
  return dtype is not None and jnp.issubdtype(dtype, jnp.floating)


def _one_candidate(
  module: Module, names: Sequence[str], leaves: Sequence[Array]
) -> str:
  near = {
    name: jnp.shape(leaf)
    for name, leaf in zip(names, leaves, strict=True)
    if module.is_near(name)
    and 'lora' not in name.rpartition('/')[2]
    and _is_float(leaf)
  }
  found = [name for name in near if near[name] == _shape_of(module)]
  found = found or [name for name in near if _splits(module, near[name])]
  if len(found) != 1:
    listed = {name: near[name] for name in found or near}
    raise ValueError(
      f'Expected one weight of shape {_shape_of(module)} for {module.name!r},'
      f' found {listed or "none near it"}. Say which:'
      f" kernels={{{module.name!r}: ('path/of/weight', (...))}}, with its axes"
      ' in the order (*stack, *in, *out).'
    )
  return found[0]


def _splits(module: Module, shape: Sequence[int]) -> bool:
  """Whether this is ``(*stack, *in, *out)``, whatever the single axes are.

  A weight may split its inputs and outputs into other axes than the factors.
  """
  count = len(module.stack)
  stack, own = tuple(shape[:count]), shape[count:]
  fits = stack == module.stack and math.prod(own) == module.n * module.m
  return fits and module.n in itertools.accumulate(own, operator.mul)


def _placed(
  module: Module,
  kernel: Kernel,
  names: Sequence[str],
  leaves: Sequence[Array],
) -> Place:
  path, given = (kernel, None) if isinstance(kernel, str) else kernel
  if names.count(path) != 1:
    raise ValueError(
      f'No single leaf at {path!r} for {module.name!r}; weights has'
      f' {list(names)[:8]}.'
    )
  index = names.index(path)
  leaf = leaves[index]
  shape = jnp.shape(leaf)
  axes = range(len(shape)) if given is None else given
  axes = tuple(int(axis) % max(len(shape), 1) for axis in axes)
  if (
    sorted(axes) != list(range(len(shape)))
    or not _splits(module, [shape[axis] for axis in axes])
    or not _is_float(leaf)
  ):
    raise ValueError(
      f'The weight {path!r} of shape {shape} and type'
      f' {getattr(leaf, "dtype", type(leaf))} does not fit {module.name!r}:'
      f' expected (*stack, *in, *out) = {_shape_of(module)}, floating-point, in'
      f' the order of axes={tuple(axes)}.'
    )
  return Place(module, index, axes)
