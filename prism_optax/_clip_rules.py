"""How one example is cut: its norm, its weight, and the rules.

This file decides the sensitivity of every mechanism above it. Nothing in it
branches on data: an example whose numbers are not finite gets weight zero.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from prism_optax import _matrix_axes, _validate
from prism_optax._clipped_sum import Bound
from prism_optax._types import ArrayTree, Scalar

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
  axes = range(x.ndim) if axes is None else axes
  count = math.prod(x.shape[a] for a in axes)
  if count > _SMALL or not count:
    return jnp.sum(x, axis=tuple(axes))
  x = jnp.moveaxis(x, tuple(axes), range(-len(axes), 0))
  x = x.reshape(*x.shape[: x.ndim - len(axes)], count)
  while (count := x.shape[-1]) > 1:
    half = count // 2
    # The middle one of an odd number is added to nothing.
    rest = x[..., half : count - half]
    pairs = x[..., :half] + x[..., count - half :]
    x = jnp.concatenate([pairs, rest], -1) if rest.size else pairs
  return x[..., 0]


def _total(terms: Iterable[jax.Array]) -> jax.Array:
  """The sum of some terms, added in pairs, which loses less than in turn."""
  found = list(terms)
  while len(found) > 1:
    pairs = [found[i : i + 2] for i in range(0, len(found), 2)]
    found = [functools.reduce(jnp.add, pair) for pair in pairs]
  return found[0]


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

  return _total(map(squares, arrays))


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
  squared = _total(summed(jnp.square(x)) for x in scaled)
  counts = jnp.isfinite(squared) & jnp.isfinite(largest)
  # At least one but for an example of zeros, whose weight says nothing.
  norm = jnp.maximum(jnp.sqrt(jnp.where(counts, squared, 1)), 1)
  bound = 1 - 8 * limits.eps  # As for `clip_weight`.
  # Where the quotient overflows, nothing is left, as it should be.
  stability = min(stability, float(limits.max))
  return scaled, bound / (norm + stability / largest), counts


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
class AutomaticClipping(FlatClipping):
  """``C g / (norm + stability)``: nearly all gradients get the norm C.

  The clip norm then only scales the updates, and optimizers like Adam do not
  depend on this scale, so there is one number less to tune (Bu et al. 2022,
  arXiv:2206.07136, AUTO-S). Small gradients are scaled up, which a flat clip
  never does.

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
    short, weight, counts = shortened(leaves, self.stability)
    return Factors(short, [weight * norm] * len(leaves), counts)


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
      terms = [jnp.zeros(())]
      for x, of_leaf in zip(leaves, masks, strict=True):
        if (mask := of_leaf[g]).any():
          by_row = squared_norm([x], own, range(mask.ndim))
          terms.append(summed(jnp.where(mask, by_row, 0)))
      squares.append(_total(terms))
    weights, counts = clip_weight(jnp.stack(squares))
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
