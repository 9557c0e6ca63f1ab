"""How the contribution of one example is bounded: the one clip.

A rule says how an example is cut, coordinates say what of it is cut: its
gradient as it is, or its tangent coordinates. The two are chosen independently.
Each pair makes a :class:`prism_optax._clipped_sum.ClippedSum`, and all examples
of all trainings are scaled in one function, :meth:`Clip.contribution`.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from prism_optax import (
  _lattice,
  _matrix_axes,
  _per_example,
  _randomness,
  _validate,
)
from prism_optax._clipped_sum import Aside, Bound, ClippedSum, Pending
from prism_optax._linalg import at_least_float32
from prism_optax._types import ArrayTree, PRNGKeyLike, Scalar

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
    squared = _per_example.squared_norm(leaves, norm)
    weight, counts = _per_example.clip_weight(squared)
    return Factors(leaves, [weight] * len(leaves), counts)


@dataclasses.dataclass(frozen=True)
class AutomaticClipping(FlatClipping):
  """``C g / (norm + stability)``: nearly all gradients get the norm C.

  The clip norm then only scales the updates, which optimizers like Adam do not
  notice: there is one number less to tune (Bu et al. 2022, arXiv:2206.07136,
  AUTO-S). Small gradients are scaled up, which a flat clip never does.

  Attributes:
    stability: gamma, positive, in the unit of one record's gradient: gradients
      much shorter than it stay short. However small it is, none becomes longer
      than C; below 1e-38 it counts as zero.
  """

  stability: float = 0.01

  def __post_init__(self) -> None:
    _validate.known_positive('stability', self.stability)

  def _factors(self, leaves: Leaves, norm: Scalar, known: ArrayTree) -> Factors:
    del known
    shortened, weight, counts = _per_example.shortened(leaves, self.stability)
    return Factors(shortened, [weight * norm] * len(leaves), counts)


@dataclasses.dataclass(frozen=True)
class GroupClipping(FlatClipping):
  """Clips groups of leaves one by one, each to its share of the clip norm.

  Group g of a record's gradient is clipped to ``C_g = C share_g / sqrt(sum
  share^2)``, so that the groups together have the norm C at most, and the noise
  is the same on all of them (McMahan et al. 2018, arXiv:1710.06963, section 3).

  Attributes:
    labels: A tree of group names like the parameters, or a prefix of it; or a
      function that makes one of them. Both factors of a LoRA module are in one
      group.
    shares: A positive number for each group name.
  """

  labels: ArrayTree
  shares: Mapping[str, float]

  def __post_init__(self) -> None:
    if not self.shares:
      raise ValueError('Expected shares of one group or more, got {}.')
    for name, share in self.shares.items():
      _validate.known_positive(f'shares[{name!r}]', share)

  def _known(
    self, params: ArrayTree, rows: Callable[..., ArrayTree]
  ) -> ArrayTree:
    """The group name of each leaf, or of what is along its first axis.

    Raises:
      ValueError: If the labels do not fit, or are not among the shares.
    """
    labels = self.labels(params) if callable(self.labels) else self.labels
    found: list[str] = _matrix_axes.broadcast('labels', labels, params)
    for name in found:
      if name not in self.shares:
        raise ValueError(
          f'Expected labels among those of shares, {sorted(self.shares)}, got'
          f' {name!r}.'
        )
    return rows(found)

  def _factors(self, leaves: Leaves, norm: Scalar, known: ArrayTree) -> Factors:
    names = sorted(self.shares)
    whole = math.hypot(*self.shares.values())  # No square underflows.
    masks = [[np.asarray(row) == name for name in names] for row in known]
    squares = []
    for g, name in enumerate(names):
      own = norm * self.shares[name] / whole
      total = jnp.zeros(())
      for x, of_leaf in zip(leaves, masks, strict=True):
        if (mask := of_leaf[g]).any():
          by_row = _per_example.squared_norm([x], own, range(mask.ndim))
          total = total + jnp.sum(jnp.where(mask, by_row, 0))
      squares.append(total)
    weights, counts = _per_example.clip_weight(jnp.stack(squares))
    by_leaf = [weights[np.argmax(of_leaf, axis=0)] for of_leaf in masks]
    factors = [
      weight.reshape(*weight.shape, *(1,) * (x.ndim - weight.ndim))
      for x, weight in zip(leaves, by_leaf, strict=True)
    ]
    # A record counts everywhere or nowhere: half of one is no gradient.
    return Factors(leaves, factors, jnp.all(counts))


@dataclasses.dataclass(frozen=True)
class QuantileClipping(FlatClipping):
  """A clip norm that follows a quantile of the gradient norms, privately.

  Each step also releases, with noise, which fraction of the batch has a norm of
  at most C, and then ``C <- C exp(-learning_rate (fraction - quantile))``
  (Andrew et al. 2019, arXiv:1905.03871, section 2.1). Gradients come out in
  units of C. That fraction is part of what is accounted: the noise of the
  gradients is a little larger for it, so that both together have the noise
  multiplier of the training.

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


def gradients_noise_multiplier(
  clipping: FlatClipping, joint: float, expected_batch_size: int
) -> float:
  """The noise multiplier of the gradients, for one of all that a step releases.

  One record moves the mean of the centred votes for a quantile by ``1 / (2 b)``
  at most, so their multiplier is ``2 b fraction_stddev``; the squares of the
  inverses add up (Andrew et al. 2019, Theorem 1).

  Raises:
    ValueError: If the noise of the fraction alone is too little.
  """
  if not isinstance(clipping, QuantileClipping) or joint == 0:
    return joint
  votes = 2 * expected_batch_size * clipping.fraction_stddev
  if votes <= joint:
    raise ValueError(
      'The fraction alone would be less private than the whole training:'
      f' expected fraction_stddev > {joint / (2 * expected_batch_size):.4g},'
      f' the noise multiplier over twice {expected_batch_size=}, got'
      f' fraction_stddev={clipping.fraction_stddev}.'
    )
  return 1 / math.sqrt(joint**-2 - votes**-2)


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
    key = _randomness.resolve_key('prng_key', self.prng_key, params, words=4)
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
      next_key, key = _randomness.split(state.prng_key)
      key = _randomness.for_release(key, release_digest)
      (vote,) = _lattice.add_noise(key, [clipped.number()], stddev)
      factor = jnp.exp(-rule.learning_rate * (vote + 0.5 - rule.quantile))
      # Far from the start still a number: zero or infinity would stay.
      first = self.l2_clip_norm
      norm = jnp.clip(state.l2_clip_norm * factor, first * 1e-6, first * 1e6)
      return QuantileState(norm, next_key)

    return clipped, Pending(next_norm)
