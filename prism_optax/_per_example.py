"""Clipping of per-example arrays with a bounded sum, shared by the transforms.

This file decides the sensitivity of every mechanism above it. Nothing in it
branches on data: an example whose numbers are not finite gets weight zero.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from dp_accounting import NeighboringRelation

from prism_optax._types import ArrayTree, Scalar

ADD_OR_REMOVE_ONE = NeighboringRelation.ADD_OR_REMOVE_ONE
REPLACE_ONE = NeighboringRelation.REPLACE_ONE
REPLACE_SPECIAL = NeighboringRelation.REPLACE_SPECIAL


class BoundedSensitivityTransformation(optax.GradientTransformationExtraArgs):
  """A transformation whose output moves by at most ``sensitivity()``.

  It unpacks into ``init`` and ``update`` like any other, so ``optax.chain``
  takes it.

  Attributes:
    sensitivity: ``sensitivity(neighboring_relation=ADD_OR_REMOVE_ONE)``, the
      largest Euclidean distance between the outputs for neighbouring batches.
      It is for tests and for direct calibration. An accountant that knows the
      relation already accounts for it: doing both counts it twice.
  """

  sensitivity: Callable[..., float]

  def __new__(cls, init, update, sensitivity):
    self = super().__new__(cls, init, update)
    self.sensitivity = sensitivity
    return self


def sensitivity_of_sum(bound: Scalar) -> Callable[..., Any]:
  """``sensitivity`` of a sum of terms of norm at most ``bound``."""

  def sensitivity(
    neighboring_relation: NeighboringRelation = ADD_OR_REMOVE_ONE,
  ) -> Any:
    # The special replacement of an example is zero.
    if neighboring_relation in (ADD_OR_REMOVE_ONE, REPLACE_SPECIAL):
      return bound
    if neighboring_relation is REPLACE_ONE:
      return 2 * bound
    raise ValueError(
      'Expected a dp_accounting.NeighboringRelation, got'
      f' {neighboring_relation=}.'
    )

  return sensitivity


def check_whole(name: str, tree: ArrayTree) -> None:
  """Refuses a tree in which a mask of optax hides leaves.

  Leaves that a mask hides bypass the transformation inside of it: their
  per-example gradients would be neither clipped nor, further on, get noise.

  Raises:
    ValueError: Naming the leaves.
  """

  def is_masked(x: object) -> bool:
    return isinstance(x, optax.MaskedNode)

  hidden = [
    jax.tree_util.keystr(path)
    for path, leaf in jax.tree.leaves_with_path(tree, is_leaf=is_masked)
    if is_masked(leaf)
  ]
  if hidden:
    more = f' and {len(hidden) - 4} more' if len(hidden) > 4 else ''
    raise ValueError(
      f'{name}: optax.masked or optax.partition hides {", ".join(hidden[:4])}'
      f'{more} from the clip, so that the per-example gradients of these leaves'
      ' would pass it as they are. Clip and add noise outside of any mask:'
      f' optax.chain({name}(...), <noise>, optax.partition(...)), with'
      ' optax.set_to_zero() for leaves that stay; or differentiate with respect'
      ' to the trainable leaves only.'
    )


def check_batched(name: str, updates: ArrayTree, params: ArrayTree) -> None:
  """Refuses gradients that have the shapes of the parameters.

  Such gradients have no batch axis. ``optax.MultiSteps`` around a clip also
  passes them on, so this check finds it when it starts.

  Raises:
    ValueError: If all shapes are those of the parameters.
  """
  shapes = [jnp.shape(x) for x in jax.tree.leaves(updates)]
  if shapes and shapes == [jnp.shape(x) for x in jax.tree.leaves(params)]:
    raise ValueError(
      f'{name}: expected per-example gradients, shaped like params with one'
      f' leading batch axis, got the shapes of params, {shapes[:4]}. They come'
      ' from jax.vmap(jax.grad(loss), (None, 0)). Inside of optax.MultiSteps'
      ' there can be no clip: it averages gradients of different examples'
      ' before they are clipped. Accumulate behind it:'
      f' optax.chain({name}(...),'
      ' optax.MultiSteps(<the rest>, k).gradient_transformation()).'
    )


def squared_norms(
  arrays: Iterable[jax.Array],
  l2_clip_norm: Scalar,
  batch_axes: Sequence[int] = (),
) -> jax.Array:
  """Squares of each example's norm in units of the clip norm, shape (B,).

  In these units neither underflow (entries that do not matter) nor overflow
  (then the example counts as zero) can hide a norm above one. Further batch
  axes stay: the norms have the shape (B, *sizes of these axes).
  """

  def squares(x: jax.Array) -> jax.Array:
    axes = tuple(a for a in range(1, x.ndim) if a not in batch_axes)
    return jnp.sum(jnp.square(x / l2_clip_norm), axis=axes)

  return functools.reduce(jnp.add, map(squares, arrays))


def clip_weights(
  squared_norms: jax.Array, is_padding_example: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
  """Weights ``min(1, 1/norm)`` of the examples, and which ones count.

  Args:
    squared_norms: (B,), in units of the clip norm.
    is_padding_example: (B,), True for examples that are not there; or None.

  Returns:
    Weights (B,), and booleans (B,): False for padding and for examples whose
    norm is not finite, hence for those with any coordinate that is not finite.

  Raises:
    ValueError: If ``is_padding_example`` has another shape.
  """
  counts = jnp.isfinite(squared_norms)
  if is_padding_example is not None:
    if jnp.shape(is_padding_example) != squared_norms.shape:
      raise ValueError(
        'Expected is_padding_example to have one entry per example,'
        f' {squared_norms.shape}, got {jnp.shape(is_padding_example)}.'
      )
    counts &= ~jnp.asarray(is_padding_example, bool)
  # A little below one, so that rounding of the norm, of the product and of the
  # sum stays inside of the bound (8 eps is 1e-6 in float32).
  bound = 1 - 8 * jnp.finfo(squared_norms.dtype).eps
  norms = jnp.sqrt(jnp.where(counts, squared_norms, 1))
  return jnp.where(counts, bound / jnp.maximum(norms, bound), 0), counts


def weighted_sum(
  x: jax.Array, weights: jax.Array, counts: jax.Array
) -> jax.Array:
  """``sum_i weights[i] x[i]`` over axis 0, without the examples left out.

  XLA reads ``x`` once for the product and the sum. The product is replaced by
  zero where an example does not count, because zero times infinity is NaN.

  Args:
    x: (B, *shape).
    weights: (B,), or an array that broadcasts against ``x``.
    counts: (B,), False for the examples left out.
  """
  shape = -1, *(1,) * (x.ndim - 1)
  if weights.ndim == 1:
    weights = weights.reshape(shape)
  weighted = x * weights.astype(x.dtype)
  return jnp.sum(jnp.where(counts.reshape(shape), weighted, 0), 0)


@jax.jit  # Outside of jit a choice of platforms is compiled at every call.
def weighted_sums(
  tree: ArrayTree, weights: jax.Array, counts: jax.Array
) -> Any:
  """:func:`weighted_sum` of every leaf, with the same weights (B,)."""

  def at_once(tree, weights, counts):
    return jax.tree.map(lambda x: weighted_sum(x, weights, counts), tree)

  # Where several devices may share the batch, XLA decides how to sum.
  in_turn = _sums_in_turn if jax.device_count() == 1 else at_once
  return jax.lax.platform_dependent(
    tree, weights, counts, cpu=in_turn, default=at_once
  )


def _sums_in_turn(
  tree: ArrayTree, weights: jax.Array, counts: jax.Array
) -> Any:
  """The sums as products of matrices, one leaf after the other.

  XLA's CPU runtime does not fuse the sum with its summands: it would write
  every example's weighted gradients, all leaves at once, and then sum them up
  with two threads in ten times the time of one. Here each leaf waits for the
  sum before it and reuses its memory.
  """
  leaves, treedef = jax.tree.flatten(tree)
  sums: list[jax.Array] = []
  for x in leaves:
    if sums and sums[-1].size:
      # Only a dependency on data makes XLA wait. The comparison is always true:
      # no sum is NaN, because only finite examples count, with small weights.
      last = sums[-1].ravel()[0]
      counts = counts & (last == last)
    counted = jnp.where(counts.reshape(-1, *(1,) * (x.ndim - 1)), x, 0)
    sums.append(
      jnp.tensordot(weights.astype(x.dtype), counted, 1, precision='highest')
    )
  return jax.tree.unflatten(treedef, sums)
