"""How the contribution of one record is bounded, beyond the flat clip."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from prism_optax import (
  _lattice,
  _matrix_axes,
  _per_example,
  _randomness,
  _validate,
)
from prism_optax._types import ArrayTree, PRNGKeyLike, Scalar

# Group names along the first axis of each leaf, or () for a whole leaf.
Rows: TypeAlias = Sequence[np.ndarray] | None


class _Factors(NamedTuple):
  """What a rule makes of one record.

  Attributes:
    leaves: Of the record, in a unit of the rule's choice.
    factors: For each leaf: their products have a joint norm of at most C.
    counts: Whether the record counts; one that does not becomes zeros.
  """

  leaves: Sequence[jax.Array]
  factors: list[jax.Array]
  counts: jax.Array


@dataclasses.dataclass(frozen=True)
class FlatClipping:
  """``min(1, C / norm)`` of a record's whole gradient, as DP-SGD has it."""

  def _factors(
    self, leaves: Sequence[jax.Array], l2_clip_norm: Scalar, rows: Rows
  ) -> _Factors:
    """What one record's leaves are multiplied by."""
    del rows
    squared = _per_example.squared_norm(leaves, l2_clip_norm)
    weight, counts = _per_example.clip_weight(squared)
    return _Factors(leaves, [weight] * len(leaves), counts)


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

  def _factors(
    self, leaves: Sequence[jax.Array], l2_clip_norm: Scalar, rows: Rows
  ) -> _Factors:
    del rows
    shortened, weight, counts = _per_example.shortened(leaves, self.stability)
    return _Factors(shortened, [weight * l2_clip_norm] * len(leaves), counts)


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

  labels: Any
  shares: Mapping[str, float]

  def __post_init__(self) -> None:
    if not self.shares:
      raise ValueError('Expected shares of one group or more, got {}.')
    for name, share in self.shares.items():
      _validate.known_positive(f'shares[{name!r}]', share)

  def _of_leaves(self, params: ArrayTree) -> list[str]:
    """The group name of each leaf.

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
    return found

  def _factors(
    self, leaves: Sequence[jax.Array], l2_clip_norm: Scalar, rows: Rows
  ) -> _Factors:
    names = sorted(self.shares)
    whole = math.hypot(*self.shares.values())  # No square underflows.
    masks = [[np.asarray(row) == name for name in names] for row in rows or ()]
    squares = []
    for g, name in enumerate(names):
      norm = l2_clip_norm * self.shares[name] / whole
      total = jnp.zeros(())
      for x, of_leaf in zip(leaves, masks, strict=True):
        if (mask := of_leaf[g]).any():
          by_row = _per_example.squared_norm([x], norm, range(mask.ndim))
          total = total + jnp.sum(jnp.where(mask, by_row, 0))
      squares.append(total)
    weights, counts = _per_example.clip_weight(jnp.stack(squares))
    by_leaf = [weights[np.argmax(of_leaf, axis=0)] for of_leaf in masks]
    factors = [
      weight.reshape(*weight.shape, *(1,) * (x.ndim - weight.ndim))
      for x, weight in zip(leaves, by_leaf, strict=True)
    ]
    # A record counts everywhere or nowhere: half of one is no gradient.
    return _Factors(leaves, factors, jnp.all(counts))


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
    fraction_stddev: Standard deviation of the noise of the fraction, positive.
      The default is the paper's: a twentieth of the expected batch, in records.
  """

  quantile: float = 0.5
  learning_rate: float = 0.2
  fraction_stddev: float = 0.05

  def __post_init__(self) -> None:
    _validate.known_probability('quantile', self.quantile)
    _validate.known_positive('learning_rate', self.learning_rate)
    _validate.known_positive('fraction_stddev', self.fraction_stddev)


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


class QuantileState(NamedTuple):
  """State of a clip that follows a quantile.

  Attributes:
    l2_clip_norm: C of the next step, shape (), float32. A release.
    prng_key: Of the noise of the fraction. Secret.
  """

  l2_clip_norm: jax.Array
  prng_key: jax.Array


class BoundedSum(NamedTuple):
  """The sum of bounded contributions, by one rule, on the noise's lattice.

  Attributes:
    clipping: The rule.
    l2_clip_norm: C, or where it starts.
    normalize_by: The expected batch size b, which divides the sum.
    stddev: Of the noise that follows, in the unit of what comes out.
    prng_key: Of the noise of a quantile.
  """

  clipping: FlatClipping
  l2_clip_norm: float
  normalize_by: float
  stddev: float
  prng_key: PRNGKeyLike = None

  @property
  def bound(self) -> float:
    """The largest norm of one contribution, times b."""
    follows = isinstance(self.clipping, QuantileClipping)
    return 1.0 if follows else self.l2_clip_norm

  def init(self, params: ArrayTree) -> Any:
    if not isinstance(self.clipping, QuantileClipping):
      return ()
    key = _randomness.resolve_key('prng_key', self.prng_key, params, words=4)
    return QuantileState(jnp.asarray(self.l2_clip_norm, jnp.float32), key)

  def labels(self, params: ArrayTree) -> list[str] | None:
    """The group name of each leaf, if there are groups."""
    rule = self.clipping
    return rule._of_leaves(params) if isinstance(rule, GroupClipping) else None

  def description(self, params: ArrayTree) -> str:
    """What there is to know of the clip, the same in every process."""
    rule: Any = self.clipping
    if isinstance(rule, GroupClipping):  # A function has an address.
      rule = sorted(rule.shares.items()), self.labels(params)
    return repr(rule)

  def __call__(
    self,
    coordinates: Callable[[Any], Any],
    updates: Any,
    is_padding_example: jax.Array | None,
    like: Any,
    state: Any,
    rows: Rows = None,
    release_digest: jax.Array | None = None,
  ) -> tuple[Any, Any]:
    """The sum over b, and the new state.

    Args:
      coordinates: From the gradient of one record to what is clipped.
      updates: Per-example gradients, or ``LazyGradients``.
      is_padding_example: (B,), or None.
      like: A tree of shapes and types like the coordinates.
      state: From ``init`` or the last call.
      rows: With groups: for each leaf of ``like`` the group names along its
        first axis, or one for all of it.
      release_digest: As for the noise of the gradients.

    Returns:
      A tree of ``LatticeSum`` like the coordinates, and the state.
    """
    rule, b, bound = self.clipping, self.normalize_by, self.bound
    follows = isinstance(rule, QuantileClipping)
    norm = state.l2_clip_norm if follows else self.l2_clip_norm

    def contribution(example: Any) -> Any:
      leaves, treedef = jax.tree.flatten(coordinates(example))
      scaled, factors, counts = rule._factors(leaves, norm, rows)
      unit = b * (norm / bound)
      out = [
        jnp.where(counts, x * (factor / unit), 0)
        for x, factor in zip(scaled, factors, strict=True)
      ]
      if not follows:
        return jax.tree.unflatten(treedef, out), ()
      below = counts & (factors[0] >= 1)  # A factor of one: not cut.
      return jax.tree.unflatten(treedef, out), jnp.where(below, 0.5, -0.5) / b

    units = jax.tree.map(
      lambda x: _lattice.unit_of(self.stddev, bound / b, x.dtype), like
    )
    if not isinstance(rule, QuantileClipping):
      sums, _ = _per_example.sum_of_examples(
        contribution, updates, is_padding_example, (units, ())
      )
      return _per_example.mark_flat_clip(sums, bound / b, self.stddev), state
    stddev = rule.fraction_stddev if self.stddev else 0.0
    unit = _lattice.unit_of(stddev, 0.5 / b, jnp.float32)
    sums, votes = _per_example.sum_of_examples(
      contribution, updates, is_padding_example, (units, unit)
    )
    sums = _per_example.mark_flat_clip(sums, bound / b, self.stddev)
    votes = _per_example.mark_flat_clip(votes, 0.5 / b, stddev)
    next_key, key = _randomness.split(state.prng_key)
    key = _randomness.for_release(key, release_digest)
    (vote,) = _lattice.add_noise(key, [votes], stddev)
    factor = jnp.exp(-rule.learning_rate * (vote + 0.5 - rule.quantile))
    # Far from the start still a number, not zero or infinity, which would stay.
    first = self.l2_clip_norm
    norm = jnp.clip(norm * factor, first * 1e-6, first * 1e6)
    return sums, QuantileState(norm, next_key)
