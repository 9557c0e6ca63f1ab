"""What is clipped, and what of it: the one clip.

A rule says how an example is cut, coordinates say what of it is cut: its
gradient as it is, or its tangent coordinates. The two are chosen independently.
Each pair makes a :class:`prism_optax._clipped_sum.ClippedSum`, and all examples
of all trainings are scaled in one function, :meth:`Clip.contribution`.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from dp_accounting import NeighboringRelation

from prism_optax import _lattice, _validate
from prism_optax._clip_rules import (
  FlatClipping,
  GroupClipping,
  QuantileClipping,
)
from prism_optax._clipped_sum import Aside, ClippedSum, LazyGradients, Pending
from prism_optax._linalg._products import at_least_float32
from prism_optax._randomness import _keys
from prism_optax._types import ArrayTree, PRNGKeyLike, Scalar

ADD_OR_REMOVE_ONE = NeighboringRelation.ADD_OR_REMOVE_ONE


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

  def description(self, params: ArrayTree) -> str:
    """What there is to know of the rule, the same in every process."""
    rule = self.rule
    if isinstance(rule, GroupClipping):  # A function has an address.
      return repr((sorted(rule.shares.items()), rule._known(params, list)))
    return repr(rule)

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
      (vote,) = _lattice.add_noise(key, [clipped.number()], stddev)
      factor = jnp.exp(-rule.learning_rate * (vote + 0.5 - rule.quantile))
      # Far from the start still a number: zero or infinity would stay.
      first = self.l2_clip_norm
      norm = jnp.clip(state.l2_clip_norm * factor, first * 1e-6, first * 1e6)
      return QuantileState(norm, next_key)

    return clipped, Pending(next_norm)


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
