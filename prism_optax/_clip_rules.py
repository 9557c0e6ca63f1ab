"""Other rules than the flat clip: other weights, and groups.

Nothing in it branches on data: an example whose numbers are not finite gets
weight zero.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from prism_optax import _clip, _matrix_axes, _validate
from prism_optax._clip import Factors, FlatClipping, Leaves, QuantileClipping
from prism_optax._types import ArrayTree, Scalar


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
  squared = _clip.total(_clip.summed(jnp.square(x)) for x in scaled)
  counts = jnp.isfinite(squared) & jnp.isfinite(largest)
  # At least one but for an example of zeros, whose weight says nothing.
  norm = jnp.maximum(jnp.sqrt(jnp.where(counts, squared, 1)), 1)
  bound = 1 - 8 * limits.eps  # As for `clip_weight`.
  # Where the quotient overflows, nothing is left, as it should be.
  stability = min(stability, float(limits.max))
  return scaled, bound / (norm + stability / largest), counts


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
          by_row = _clip.squared_norm([x], own, range(mask.ndim))
          terms.append(_clip.summed(jnp.where(mask, by_row, 0)))
      squares.append(_clip.total(terms))
    weights, counts = _clip.clip_weight(jnp.stack(squares))
    by_leaf = [weights[np.argmax(of_leaf, axis=0)] for of_leaf in masks]
    factors = [
      weight.reshape(*weight.shape, *(1,) * (x.ndim - weight.ndim))
      for x, weight in zip(leaves, by_leaf, strict=True)
    ]
    # A record counts everywhere or nowhere: half of one is no gradient.
    return Factors(leaves, factors, jnp.all(counts))


def description(rule: FlatClipping, params: ArrayTree) -> str:
  """What there is to know of a rule, the same in every process."""
  if isinstance(rule, GroupClipping):  # A function has an address.
    return repr((sorted(rule.shares.items()), rule._known(params, list)))
  return repr(rule)


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
