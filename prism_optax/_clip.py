"""The one clip: how an example is cut, and what of it is cut.

A rule says how an example is cut (the flat clip and its quantile stand here,
others in :mod:`prism_optax._clip_rules`), coordinates say what of it is cut:
its gradient as it is, or its tangent coordinates. The two are chosen
independently. Each pair makes a :class:`prism_optax._clipped_sum.ClippedSum`,
and all examples of all trainings are scaled in one function,
:meth:`Clip.contribution`.

This file decides the sensitivity of every mechanism above it. Nothing in it
branches on data: an example whose numbers are not finite gets weight zero.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from dp_accounting import NeighboringRelation

from prism_optax import _lattice, _validate
from prism_optax._clipped_sum import Aside, Bound, ClippedSum, Pending
from prism_optax._exact_sum import LazyGradients
from prism_optax._linalg._products import at_least_float32
from prism_optax._randomness import _keys
from prism_optax._types import ArrayTree, PRNGKeyLike, Scalar

ADD_OR_REMOVE_ONE = NeighboringRelation.ADD_OR_REMOVE_ONE

# XLA on a CPU adds up smaller arrays nearly in turn, and larger ones in blocks.
_SMALL = 2**13


def summed(x: jax.Array, axes: Sequence[int] | None = None) -> jax.Array:
  """The sum of numbers that are not negative.

  Added in turn, a thousand numbers that are each below half a unit in the last
  place of the first one are lost, and the norm comes out too small by 1e-5. So
  numbers are added in pairs, which loses a half of such a unit each time that
  their count is halved. Of large arrays a compiler adds blocks, and loses about
  as little.
  """
  return _summed(x, tuple(range(x.ndim) if axes is None else axes))


# Traced once for each shape: a model has many leaves of few shapes.
@functools.partial(jax.jit, static_argnames='axes', inline=True)
def _summed(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
  count = math.prod(x.shape[a] for a in axes)
  if count > _SMALL or not count:
    return jnp.sum(x, axis=tuple(axes))
  x = jnp.moveaxis(x, tuple(axes), range(-len(axes), 0))
  x = x.reshape(*x.shape[: x.ndim - len(axes)], count)
  missing = (1 << (count - 1).bit_length()) - count
  x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)])
  while (half := x.shape[-1] // 2) > 1:
    x = jax.lax.add(*jax.lax.split(x, (half, half), x.ndim - 1))
  # A reduction is computed once. Slices that are added are computed again in
  # each loop that reads the sum, so that compiling takes a leaf times leaves.
  return jnp.sum(x, -1)


def total(terms: Iterable[jax.Array]) -> jax.Array:
  """The sum of some terms of one shape, added in pairs as well."""
  found = jnp.stack(list(terms), -1)
  return summed(found, [found.ndim - 1])


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
    axes = [a for a in range(x.ndim) if a not in batch_axes]
    return summed(jnp.square(x / l2_clip_norm), axes)

  return total(map(squares, arrays))


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


Leaves: TypeAlias = Sequence[jax.Array]


class Factors(NamedTuple):
  """What a rule makes of one example.

  Attributes:
    leaves: Of the example, in a unit of the rule's choice.
    factors: For each leaf: their products are within the bounds of the rule.
    counts: Whether the example counts; one that does not becomes zeros.
  """

  leaves: Leaves
  factors: Sequence[jax.Array]
  counts: jax.Array


@dataclasses.dataclass(frozen=True)
class FlatClipping:
  """``min(1, C / norm)`` of a record's whole gradient, as DP-SGD has it."""

  def _known(
    self, params: ArrayTree, rows: Callable[..., ArrayTree]
  ) -> ArrayTree:
    """What the rule has to know of the leaves: here nothing."""
    del params, rows

  def _bounds(
    self, bound: Scalar, known: ArrayTree
  ) -> Scalar | Sequence[Bound]:
    """The bounds of one contribution, of ``bound`` in total if it is flat."""
    del known
    return bound

  def _factors(self, leaves: Leaves, norm: Scalar, known: ArrayTree) -> Factors:
    """What one example's leaves are multiplied by."""
    del known
    squared = squared_norm(leaves, norm)
    weight, counts = clip_weight(squared)
    return Factors(leaves, [weight] * len(leaves), counts)


@dataclasses.dataclass(frozen=True)
class QuantileClipping(FlatClipping):
  """A clip norm that follows a quantile of the gradient norms, privately.

  Each step also releases, with noise, which fraction of the batch has a norm of
  at most C, and then ``C <- C exp(-learning_rate (fraction - quantile))``
  (Andrew et al. 2019, arXiv:1905.03871, section 2.1). Gradients come out in
  units of C. The accounting includes this fraction: the noise of the gradients
  is a little larger, so that both together have the noise multiplier of the
  training.

  Attributes:
    quantile: The fraction of records to leave unclipped, in [0, 1].
    learning_rate: Positive.
    fraction_stddev: Standard deviation of the noise of the fraction. The
      default is the paper's: a twentieth of the expected batch, in records.
      Zero is allowed and gives no privacy.
  """

  quantile: float = 0.5
  learning_rate: float = 0.2
  fraction_stddev: float = 0.05

  def __post_init__(self) -> None:
    _validate.known_probability('quantile', self.quantile)
    _validate.known_positive('learning_rate', self.learning_rate)
    _validate.known_non_negative('fraction_stddev', self.fraction_stddev)


class Coordinates(NamedTuple):
  """What of an example is clipped.

  Attributes:
    of_one: From the gradient of one example to a tree of arrays.
    rows: From one label for each leaf of the parameters to the labels along the
      first axis of each array of that tree, or one for all of it.
    sums: The class of the sum, which may offer more.
  """

  of_one: Callable[[ArrayTree], ArrayTree]
  rows: Callable[[list[str]], ArrayTree] = lambda labels: labels
  sums: type[ClippedSum] = ClippedSum


# Gradients as they are, float32 at least.
DENSE = Coordinates(
  lambda grads: jax.tree.map(at_least_float32, grads),
  lambda labels: list(map(np.asarray, labels)),
)


class QuantileState(NamedTuple):
  """State of a clip that follows a quantile.

  Attributes:
    l2_clip_norm: C of the next step, shape (), float32. A release.
    prng_key: Of the noise of the fraction. Secret.
  """

  l2_clip_norm: jax.Array
  prng_key: jax.Array


class Clip(NamedTuple):
  """A rule with its numbers.

  Attributes:
    rule: How an example is cut.
    l2_clip_norm: C, or where it starts.
    normalize_by: A public constant b that divides the sum.
    prng_key: Of the noise of a quantile.
  """

  rule: FlatClipping
  l2_clip_norm: Scalar = 1.0
  normalize_by: Scalar = 1.0
  prng_key: PRNGKeyLike = None

  @property
  def bound(self) -> Scalar:
    """The largest norm of one contribution, times b."""
    follows = isinstance(self.rule, QuantileClipping)
    return 1.0 if follows else self.l2_clip_norm

  def init(self, params: ArrayTree) -> ArrayTree:
    if not isinstance(self.rule, QuantileClipping):
      return optax.EmptyState()
    key = _keys.resolve_key('prng_key', self.prng_key, params, words=4)
    return QuantileState(jnp.asarray(self.l2_clip_norm, jnp.float32), key)

  def contribution(
    self, coordinates: Coordinates, params: ArrayTree
  ) -> Callable[[ArrayTree], ArrayTree]:
    """From one example to what it adds to the sum: cut, and divided by b.

    With a quantile also its vote, which is half a record for or against.
    """
    rule, norm, b, _ = self
    follows = isinstance(rule, QuantileClipping)
    divisor = b * norm if follows else b
    known = rule._known(params, coordinates.rows)

    def contribution(example: ArrayTree) -> ArrayTree:
      leaves, treedef = jax.tree.flatten(coordinates.of_one(example))
      scaled, factors, counts = rule._factors(leaves, norm, known)
      out = [
        jnp.where(counts, x * (factor / divisor), 0)
        for x, factor in zip(scaled, factors, strict=True)
      ]
      tree = jax.tree.unflatten(treedef, out)
      if not follows:
        return tree
      below = counts & (factors[0] >= 1)  # A factor of one: not cut.
      return tree, jnp.where(below, 0.5, -0.5) / b

    return contribution

  def sum(
    self,
    coordinates: Coordinates,
    examples: ArrayTree,
    params: ArrayTree | None = None,
    state: optax.OptState = None,
    *,
    is_padding_example: jax.Array | None = None,
    release_digest: jax.Array | None = None,
    **extra_args: object,
  ) -> tuple[ClippedSum, ArrayTree]:
    """The sum over examples, over b, and the new state.

    Args:
      coordinates: What of an example is clipped.
      examples: Per-example gradients, or ``LazyGradients``.
      params: Of which the rule may know more, such as labels.
      state: From ``init`` or the last call.
      is_padding_example: (B,), or None.
      release_digest: As for the noise of the gradients.
      **extra_args: For other parts of a chain.

    Returns:
      A sum, and a state which may hold ``Pending``.
    """
    del extra_args
    rule, b = self.rule, self.normalize_by
    known = rule._known(params, coordinates.rows)
    bounds = rule._bounds(self.bound / b, known)
    clip, aside = self, None
    if isinstance(rule, QuantileClipping):
      clip = self._replace(l2_clip_norm=state.l2_clip_norm)
      aside = Aside(0.5 / b, rule.fraction_stddev)
    contribution = clip.contribution(coordinates, params)
    clipped = coordinates.sums(
      contribution, examples, is_padding_example, bounds, aside
    )
    if not isinstance(rule, QuantileClipping):
      return clipped, state

    def next_norm() -> QuantileState:
      stddev = rule.fraction_stddev
      next_key, key = _keys.split(state.prng_key)
      key = _keys.for_release(key, release_digest)
      (vote,) = _lattice.add_noise(
        key,
        [clipped.number()],
        stddev,
        with_digest=release_digest is not None,
      )
      factor = jnp.exp(-rule.learning_rate * (vote + 0.5 - rule.quantile))
      # Far from the start still a number: zero or infinity would stay.
      first = self.l2_clip_norm
      norm = jnp.clip(state.l2_clip_norm * factor, first * 1e-6, first * 1e6)
      return QuantileState(norm, next_key)

    return clipped, Pending(next_norm)


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
    some, rest = hidden[:4], hidden[4:]
    more = f' and {len(rest)} more' if rest else ''
    raise ValueError(
      f'{name}: optax.masked or optax.partition hides {", ".join(some)}'
      f'{more} from the clip, so that the per-example gradients of these leaves'
      ' would pass it as they are. Clip and add noise outside of any mask:'
      f' optax.chain({name}(...), <noise>, optax.partition(...)), with'
      ' optax.set_to_zero() for leaves that stay; or differentiate with respect'
      ' to the trainable leaves only.'
    )


def checked_shapes(
  name: str, updates: ArrayTree, params: ArrayTree
) -> ArrayTree:
  """The tree of per-example gradients, or of its shapes, which may be clipped.

  ``optax.MultiSteps`` around a clip passes gradients without a batch axis when
  it starts, and is found by that.

  Raises:
    ValueError: As :func:`check_whole`; if all shapes are those of the
      parameters, which have no batch axis.
  """
  check_whole(name, params)
  tree = updates.shapes if isinstance(updates, LazyGradients) else updates
  shapes = [jnp.shape(x) for x in jax.tree.leaves(tree)]
  if shapes and shapes == [jnp.shape(x) for x in jax.tree.leaves(params)]:
    raise ValueError(
      f'{name}: expected per-example gradients, shaped like params with one'
      f' leading batch axis, got the shapes of params, {shapes[:4]}. They come'
      ' from jax.vmap(jax.grad(loss), (None, 0)). Inside of optax.MultiSteps'
      ' there can be no clip: it averages gradients of different examples'
      ' before they are clipped. Accumulate after it:'
      f' optax.chain({name}(...),'
      ' optax.MultiSteps(<the rest>, k).gradient_transformation()).'
    )
  return tree
