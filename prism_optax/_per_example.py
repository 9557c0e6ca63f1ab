"""Clipping of per-example arrays with a bounded sum, shared by the transforms.

This file decides the sensitivity of every mechanism above it. Nothing in it
branches on data: an example whose numbers are not finite gets weight zero.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax
from dp_accounting import NeighboringRelation

from prism_optax import _lattice, _validate
from prism_optax._types import ArrayTree, Scalar

ADD_OR_REMOVE_ONE = NeighboringRelation.ADD_OR_REMOVE_ONE


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


class LazyGradients(NamedTuple):
  """Per-example gradients that a clip computes itself, part by part.

  A clip takes it in place of a tree of gradients.

  Attributes:
    examples: Tree of arrays (B, ...).
    gradients: From examples (b, ...) to their gradients, leaves (b, *shape).
    microbatch_size: b, a divisor of B; None for all at once.
    skip_padding: Whether parts of padding alone are passed over. How long it
      takes then tells how many examples there are.
  """

  examples: ArrayTree
  gradients: Callable[[ArrayTree], ArrayTree]
  microbatch_size: int | None = None
  skip_padding: bool = False

  @property
  def shapes(self) -> ArrayTree:
    """The shapes of all gradients, (B, *shape)."""
    return jax.eval_shape(self.gradients, self.examples)


def sensitivity_of_sum(bound: Scalar) -> Callable[..., ArrayTree]:
  """``sensitivity`` of a sum of terms of norm at most ``bound``."""

  def sensitivity(
    neighboring_relation: NeighboringRelation = ADD_OR_REMOVE_ONE,
  ) -> ArrayTree:
    _validate.neighboring_relation(neighboring_relation)
    if neighboring_relation is NeighboringRelation.REPLACE_ONE:
      return 2 * bound
    return bound  # The special replacement of an example is zero.

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


def checked_shapes(
  name: str, updates: ArrayTree, params: ArrayTree
) -> ArrayTree:
  """The tree of per-example gradients, or of its shapes, which may be clipped.

  Raises:
    ValueError: As :func:`check_whole` and :func:`check_batched`.
  """
  check_whole(name, params)
  shapes = updates.shapes if isinstance(updates, LazyGradients) else updates
  check_batched(name, shapes, params)
  return shapes


def squared_norm(
  arrays: Iterable[jax.Array],
  l2_clip_norm: Scalar,
  batch_axes: Sequence[int] = (),
) -> jax.Array:
  """Square of one example's norm in units of the clip norm, a scalar.

  In these units neither underflow (entries that do not matter) nor overflow
  (then the example counts as zero) can hide a norm above one. Batch axes stay:
  the norms have the shape of these axes.
  """

  def squares(x: jax.Array) -> jax.Array:
    axes = tuple(a for a in range(x.ndim) if a not in batch_axes)
    return jnp.sum(jnp.square(x / l2_clip_norm), axis=axes)

  return functools.reduce(jnp.add, map(squares, arrays))


def clip_weight(squared_norm: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Weight ``min(1, 1/norm)`` of an example, and whether it counts.

  Args:
    squared_norm: In units of the clip norm, of any shape.

  Returns:
    The weight, and False where the norm is not finite, hence for an example
    with any coordinate that is not finite. Such a one must be replaced by zero,
    because zero times infinity is NaN.
  """
  counts = jnp.isfinite(squared_norm)
  # A little below one, so that rounding of the norm and of the products stays
  # inside of the bound (8 eps is 1e-6 in float32).
  bound = 1 - 8 * jnp.finfo(squared_norm.dtype).eps
  norm = jnp.sqrt(jnp.where(counts, squared_norm, 1))
  return bound / jnp.maximum(norm, bound), counts


def shortened(
  arrays: Sequence[jax.Array], stability: float
) -> tuple[list[jax.Array], jax.Array, jax.Array]:
  """One example over its norm: ``x / (norm + stability)``, of norm at most 1.

  A weight above one, which a clip never has, must not come from a norm that is
  too small. So the norm is in units of the largest entry, where it is at least
  one and no square that matters vanishes, for any size of the example and any
  stability, also one that is zero in the type of the arrays.

  ========================================  ====================================
  NaN or Inf in an array                    the example does not count
  entries that are all denormal, or zeros   a CPU takes them for zeros: zeros
  ========================================  ====================================

  Args:
    arrays: Of one example.
    stability: Positive, in the unit of the arrays.

  Returns:
    The arrays in units of their largest entry; the factor that they are to be
    multiplied by; and whether the example counts. One that does not must be
    replaced by zero.
  """
  entries = [jnp.max(jnp.abs(x), initial=0) for x in arrays]
  largest: jax.Array = functools.reduce(jnp.maximum, entries)
  limits = jnp.finfo(largest.dtype)
  # Of zeros and of denormal numbers, by which a CPU cannot divide.
  largest = jnp.where(largest < limits.tiny, 1, largest)
  # A compiler may multiply by the inverse in place of a division, and that of
  # a huge number is denormal. Powers of two are exact.
  shift = jnp.where(largest > 1, 2.0**-40, 2.0**40).astype(largest.dtype)
  scaled = [(x * shift) / (largest * shift) for x in arrays]
  squared = functools.reduce(
    jnp.add, [jnp.sum(jnp.square(x)) for x in scaled], jnp.zeros(())
  )
  counts = jnp.isfinite(squared) & jnp.isfinite(largest)
  # At least one but for an example of zeros, whose weight says nothing.
  norm = jnp.maximum(jnp.sqrt(jnp.where(counts, squared, 1)), 1)
  bound = 1 - 8 * limits.eps  # As for `clip_weight`.
  # Where the quotient overflows, nothing is left, as it should be.
  stability = min(stability, float(limits.max))
  return scaled, bound / (norm + stability / largest), counts


_TwoParts: TypeAlias = tuple[jax.Array, jax.Array]


def _add_float(total: _TwoParts, more: _TwoParts) -> _TwoParts:
  """Adds to a sum and to what rounding has lost of it (Knuth 1969)."""
  (old, lost), (x, _) = total, more
  new = old + x
  part = new - old
  return new, lost + ((old - (new - part)) + (x - part))


def _add_integers(total: _TwoParts, more: _TwoParts) -> _TwoParts:
  return total[0] + more[0], total[1] + more[1]


def sum_of_examples(
  contribution: Callable[[ArrayTree], ArrayTree],
  examples: 'ArrayTree | LazyGradients',
  is_padding_example: jax.Array | None,
  units: Callable[[ArrayTree], Sequence[jax.Array | None]] | None = None,
) -> ArrayTree:
  """The sum over examples of what each of them contributes.

  With a unit each contribution is brought to a lattice first, towards zero, and
  integers are added: the sum does not depend on the order of the examples, and
  no contribution gets longer. Without, floats are added, on a CPU with
  compensation, so that the sum is rounded once.

  Under ``jit`` on one CPU the contributions are computed one after the other:
  what one of them is cannot depend on the others, and no array holds what is
  computed of all of them. Elsewhere they are computed side by side.

  Args:
    contribution: From one example to a tree of finite arrays.
    examples: Tree of arrays (B, *shape); or gradients that are computed here.
    is_padding_example: (B,), True for examples that are not there; or None.
    units: From the shapes of a contribution to the units of the lattice: for
      each of its arrays, in their order, a scalar of its type, or None. None
      for floats alone.

  Returns:
    A tree like a contribution, of arrays or of ``LatticeSum``.

  Raises:
    ValueError: If ``is_padding_example`` has another shape, or the size of the
      micro-batches does not divide that of the batch.
  """
  if not isinstance(examples, LazyGradients):
    examples = LazyGradients(examples, lambda gradients: gradients)
  examples, gradients, microbatch_size, skip_padding = examples
  batch = len(jax.tree.leaves(examples)[0])
  if is_padding_example is not None:
    is_padding_example = jnp.asarray(is_padding_example, bool)
    if is_padding_example.shape != (batch,):
      raise ValueError(
        'Expected is_padding_example to have one entry per example,'
        f' {(batch,)}, got {is_padding_example.shape}.'
      )
  inputs = examples, is_padding_example
  all_of_them = jax.eval_shape(gradients, examples), inputs[1]
  one = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), all_of_them
  )
  shapes: ArrayTree = jax.eval_shape(contribution, one[0])
  treedef: jax.tree_util.PyTreeDef = jax.tree.structure(shapes)
  unit_of = [None] * treedef.num_leaves if units is None else units(shapes)

  def add(totals, more):
    return [
      (_add_float if unit is None else _add_integers)(x, y)
      for x, y, unit in zip(totals, more, unit_of, strict=True)
    ]

  def terms(inputs):
    example, is_padding = inputs
    leaves: list[jax.Array] = jax.tree.leaves(contribution(example))
    if is_padding is not None:
      leaves = [jnp.where(is_padding, 0, x) for x in leaves]
    return [
      (x, jnp.zeros_like(x))
      if unit is None
      else tuple(_lattice.term(x, unit, batch)[:2])
      for x, unit in zip(leaves, unit_of, strict=True)
    ]

  zeros = jax.tree.map(
    lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(terms, one)
  )

  def in_turn(inputs):
    def add_one(totals, inputs):
      return add(totals, terms(inputs)), None

    return jax.lax.scan(add_one, zeros, inputs)[0]

  def at_once(inputs):
    return jax.tree.map(
      lambda x: jnp.sum(x, 0, dtype=x.dtype), jax.vmap(terms)(inputs)
    )

  # Where several devices may share the batch, XLA decides how to sum. Outside
  # of jit a loop would be compiled at every call, and no loop goes along an
  # explicit axis of a mesh.
  leaves: list[ArrayTree] = jax.tree.leaves(inputs)
  traced = any(isinstance(x, jax.core.Tracer) for x in leaves)
  explicit = any(any(jax.typeof(x).sharding.spec[:1]) for x in leaves)
  alone = jax.device_count() == 1 and not explicit

  def sums_of(inputs):
    examples, is_padding = inputs
    inputs = gradients(examples), is_padding
    if not traced:
      return at_once(inputs)
    one_by_one = in_turn if alone else at_once
    return jax.lax.platform_dependent(inputs, cpu=one_by_one, default=at_once)

  def add_part(totals, part):
    def added():
      return add(totals, sums_of(part))

    if not skip_padding or part[1] is None:
      return added(), None
    return jax.lax.cond(jnp.all(part[1]), lambda: totals, added), None

  if microbatch_size is None or microbatch_size >= batch:
    sums = sums_of(inputs)
  else:
    sums = jax.lax.scan(add_part, zeros, _parts(inputs, microbatch_size))[0]
  out = [
    high + low if unit is None else _lattice.LatticeSum(high, low, unit)
    for (high, low), unit in zip(sums, unit_of, strict=True)
  ]
  return jax.tree.unflatten(treedef, out)


def _parts(inputs: ArrayTree, size: int) -> ArrayTree:
  """Leaves (B, ...) as (B / size, size, ...), part k every so-many-th row.

  So each device of a sharded batch has its share of every part.
  """

  def split(x: jax.Array) -> jax.Array:
    if len(x) % size:
      raise ValueError(
        'Expected microbatch_size to divide the size of the padded batch,'
        f' {len(x)}, got microbatch_size={size}.'
      )
    return jnp.moveaxis(x.reshape(size, -1, *x.shape[1:]), 0, 1)

  return jax.tree.map(split, inputs)
