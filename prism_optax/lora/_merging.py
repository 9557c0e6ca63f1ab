"""Adapters into frozen weights and out of them.

Everything here reads adapters and weights and no data: post-processing of what
they are.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from prism_optax import _modules
from prism_optax._linalg import matmul
from prism_optax.lora import _ranks


class Kernel(NamedTuple):
  """The frozen weight that an adapter changes.

  Attributes:
    path: Path of the leaf in the tree of weights, '/' between keys.
    axes: Its axes in the order ``(*stack, *in, *out)``; None if that is their
      order. A matrix (out, in) has ``axes=(1, 0)``.
  """

  path: str
  axes: Sequence[int] | None = None


KernelsLike = Mapping[str, str | Kernel] | None


class Place(NamedTuple):
  """A module and its weight: position in the flattened tree, and axes."""

  module: _modules.Module
  leaf: int
  axes: tuple[int, ...]  # In the order (*stack, *in, *out).


def merge(
  params: Any,
  weights: Any,
  *,
  kernels: KernelsLike = None,
  layout: _modules.LayoutLike = None,
) -> Any:
  """Adds the matrices Z of the adapters to the frozen weights.

  A model that computes ``W + scale * left @ right.mT`` gives the same with the
  merged weights and no adapters. Sums are made in float32 at least and rounded
  once to the type of the weight. It reads adapters and weights and no data:
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
      its weight, or a :class:`Kernel` where axes are in another order. Modules
      that are not named get the one leaf that has the shape
      ``(*stack, *in, *out)`` and stands where their library puts it: at
      ``name`` itself, beside the factors (``dense/kernel`` for
      ``dense/lora_a`` or ``dense/lora/lora_a``) or in ``base_module``.
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
  return _added(params, weights, 1.0, kernels, layout)


def unmerge(
  params: Any,
  weights: Any,
  *,
  kernels: KernelsLike = None,
  layout: _modules.LayoutLike = None,
) -> Any:
  """Subtracts the matrices Z of the adapters from the weights.

  So a model with adapters that are not zero at the start begins as the model
  without. The inverse of :func:`merge`, but for rounding; post-processing
  likewise.

  Args:
    params: As in :func:`merge`.
    weights: As there.
    kernels: As there.
    layout: As there.

  Returns:
    A tree like ``weights``.

  Raises:
    ValueError: As in :func:`merge`.

  Example:
    >>> import jax.numpy as jnp
    >>> from prism_optax import lora
    >>> params = {'q': {'lora_a': jnp.ones((3, 1)), 'lora_b': jnp.ones((1, 2))}}
    >>> weights = lora.unmerge(params, {'q': {'kernel': jnp.ones((3, 2))}})
    >>> float(weights['q']['kernel'].sum())
    0.0
  """
  return _added(params, weights, -1.0, kernels, layout)


def _added(params, weights, factor, kernels, layout):
  modules = _modules.find_modules(params, layout)
  adapters = jax.tree.leaves(params)
  leaves, treedef = jax.tree.flatten(weights)
  for place in find_kernels(modules, weights, kernels):
    left, right = _ranks.read_factors(place.module, adapters)
    old = to_matrices(place, leaves[place.leaf])
    new = old + factor * place.module.scale * matmul(left, right.mT)
    leaves[place.leaf] = from_matrices(place, new, leaves[place.leaf])
  return jax.tree.unflatten(treedef, leaves)


# Between a weight and the matrices (k, m, n) of its adapter.


def to_matrices(place: Place, leaf: Any) -> jax.Array:
  """(k, m, n), float32 at least."""
  x, module = jnp.asarray(leaf), place.module
  x = jnp.transpose(x, place.axes).reshape(-1, module.n, module.m)
  return x.mT.astype(jnp.promote_types(x.dtype, jnp.float32))


def from_matrices(place: Place, matrices: jax.Array, like: Any) -> jax.Array:
  """The inverse of :func:`to_matrices`, in the type of ``like``."""
  sizes = [jnp.shape(like)[axis] for axis in place.axes]
  inverse = sorted(range(len(sizes)), key=place.axes.__getitem__)
  return jnp.transpose(matrices.mT.reshape(sizes), inverse).astype(like.dtype)


def find_kernels(
  modules: Sequence[_modules.Module], weights: Any, kernels: KernelsLike
) -> list[Place]:
  """The weight of every module; see :func:`merge`."""
  flat, _ = jax.tree_util.tree_flatten_with_path(weights)
  names = [_modules.path_name(path) for path, _ in flat]
  leaves = [leaf for _, leaf in flat]
  kernels = dict(kernels or {})
  unknown = set(kernels) - {x.name for x in modules}
  if unknown:
    raise ValueError(
      f'kernels names {sorted(unknown)}, which are no modules; these are'
      f' {[x.name for x in modules]}.'
    )
  places = []
  for module in modules:
    given = kernels.get(module.name)
    if given is None:
      given = Kernel(_one_candidate(module, names, leaves))
    elif isinstance(given, str):
      given = Kernel(given)
    places.append(_placed(module, given, names, leaves))
  taken = [place.leaf for place in places]
  for place in places:
    if taken.count(place.leaf) > 1:
      raise ValueError(
        f'Expected one module for each weight, got {names[place.leaf]!r} for'
        f' {[x.module.name for x in places if x.leaf == place.leaf]}.'
      )
  return places


def _shape_of(module: _modules.Module) -> tuple[int, ...]:
  """``(*stack, *in, *out)``."""
  a, b = module.a_axes, module.b_axes
  return (*module.stack, *a.sizes(a.features), *b.sizes(b.features))


def _is_float(leaf: Any) -> bool:
  dtype = getattr(leaf, 'dtype', None)
  return dtype is not None and jnp.issubdtype(dtype, jnp.floating)


def _one_candidate(
  module: _modules.Module, names: Sequence[str], leaves: Sequence[Any]
) -> str:
  parents = [module.name, f'{module.name}/base_module']
  above, _, last = module.name.rpartition('/')
  if last == 'lora':
    parents.append(above)
  if module.name.startswith('lora_'):  # The tree is a single pair.
    parents.append('')
  near = [
    i
    for i, name in enumerate(names)
    if (name == module.name or name.rpartition('/')[0] in parents)
    and _is_float(leaves[i])
    and 'lora' not in name.rpartition('/')[2]
  ]
  found = [i for i in near if jnp.shape(leaves[i]) == _shape_of(module)]
  if len(found) != 1:
    listed = {names[i]: jnp.shape(leaves[i]) for i in (found or near)}
    raise ValueError(
      f'Expected one weight of shape {_shape_of(module)} for {module.name!r},'
      f' found {listed or "none near it"}. Say which:'
      f" kernels={{{module.name!r}: lora.Kernel('path/of/weight',"
      ' axes=(...))}, axes in the order (*stack, *in, *out).'
    )
  return names[found[0]]


def _placed(
  module: _modules.Module,
  kernel: Kernel,
  names: Sequence[str],
  leaves: Sequence[Any],
) -> Place:
  if names.count(kernel.path) != 1:
    raise ValueError(
      f'No single leaf at {kernel.path!r} for {module.name!r}; weights has'
      f' {list(names)[:8]}.'
    )
  index = names.index(kernel.path)
  leaf = leaves[index]
  shape = jnp.shape(leaf)
  axes = range(len(shape)) if kernel.axes is None else kernel.axes
  axes = tuple(int(axis) % max(len(shape), 1) for axis in axes)
  # Sizes of stack, input and output: a weight may split its axes otherwise.
  sizes = [shape[axis] for axis in axes]
  stack = len(module.stack)
  inputs = 0
  while math.prod(sizes[stack : stack + inputs]) < module.n and (
    stack + inputs < len(sizes)
  ):
    inputs += 1
  if (
    sorted(axes) != list(range(len(shape)))
    or tuple(sizes[:stack]) != module.stack
    or math.prod(sizes[stack : stack + inputs]) != module.n
    or math.prod(sizes[stack + inputs :]) != module.m
    or not _is_float(leaf)
  ):
    raise ValueError(
      f'The weight {kernel.path!r} of shape {shape} and type'
      f' {getattr(leaf, "dtype", type(leaf))} does not fit {module.name!r}:'
      f' expected (*stack, *in, *out) = {_shape_of(module)}, floating-point, in'
      f' the order of axes={tuple(axes)}.'
    )
  return Place(module, index, axes)
