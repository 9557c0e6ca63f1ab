"""Poisson batches of one shape, drawn from a secret seed and the step.

The guarantee rests on batches that are random and unseen. Each one is a
function of the seed and of the step, so that a resumed run draws what the
interrupted one would have drawn, and no generator has to be saved.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import numpy as np

from prism_optax import _validate
from prism_optax._randomness import _keys
from prism_optax._types import ArrayTree, PRNGKeyLike

# Folded into a key that was given. `split` uses the numbers 0 and 1.
_BATCHES = int.from_bytes(b'BATC')


@dataclasses.dataclass(frozen=True)
class Execution:
  """How a training is run, for ``execution=`` of :func:`make_private`.

  Every choice gives the same sum of the same records, up to the rounding of
  their gradients, so the guarantee is the same, with two exceptions: a smaller
  padded batch is cut more often, which epsilon counts, and with
  ``skip_padding`` the time of a step reveals the size of a batch.

  Attributes:
    microbatch_size: Records whose gradients are held at once; None is all.
    padded_batch_size: Rows of every batch. The default is six standard
      deviations above ``expected_batch_size``, in whole micro-batches.
    batch_sharding: How batches are laid out, split along the first axis, on a
      mesh with automatic or explicit axes (with ``batched_loss`` automatic).
    skip_padding: Skip micro-batches that hold only padding. This saves their
      time, but the time of a step then reveals how many records were drawn.

  Example:
    >>> from prism_optax import training
    >>> training.Execution(microbatch_size=16).skip_padding
    False
  """

  microbatch_size: int | None = None
  padded_batch_size: int | None = None
  batch_sharding: jax.sharding.Sharding | None = None
  skip_padding: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class Batch:
  """One padded batch. Only :meth:`PrivateTraining.batches` makes one.

  Attributes:
    examples: Tree of arrays (padded size, ...); with users (padded size,
      examples per user, ...).
    is_padding_example: (padded size,), True where there is no record: nothing
      was drawn, the place is empty, or its record has not the declared form.
    is_present: None, or with users (padded size, examples per user), True for
      records that count.
    step: The number of the step that it was drawn for.
    run: Says which run it belongs to.
    data: A digest of the data that it was drawn from, (8,) uint32.
  """

  examples: ArrayTree
  is_padding_example: jax.Array
  is_present: jax.Array | None
  step: int
  run: bytes
  data: np.ndarray


class Sampling(NamedTuple):
  """How batches are drawn.

  Attributes:
    expected_batch_size: b.
    dataset_size: N, of places for records, or for users.
    padded_batch_size: More than that is cut, by chance.
    microbatch_size: Padding fills whole micro-batches.
    examples_per_user: None, or the most that a user contributes to one batch.
  """

  expected_batch_size: int
  dataset_size: int
  padded_batch_size: int
  microbatch_size: int | None
  examples_per_user: int | None

  @classmethod
  def of(
    cls,
    expected_batch_size: int,
    dataset_size: int,
    execution: Execution,
    examples_per_user: int | None,
  ) -> 'Sampling':
    """Sizes that fit; a batch is padded to six deviations above the expected.

    Fewer rows would be cheaper to compute and cost more epsilon: in a batch
    that is cut one record can push out another. They are whole micro-batches,
    or the same number on each device.

    Raises:
      ValueError: Naming sizes that do not fit.
    """
    _validate.integer('dataset_size', dataset_size, 1)
    _validate.integer('expected_batch_size', expected_batch_size, 1)
    if expected_batch_size > dataset_size:
      raise ValueError(
        'Expected expected_batch_size <= dataset_size, got'
        f' {expected_batch_size} and {dataset_size}.'
      )
    part, padded = execution.microbatch_size, execution.padded_batch_size
    for name, value in (
      ('microbatch_size', part),
      ('padded_batch_size', padded),
      ('examples_per_user', examples_per_user),
    ):
      if value is not None:
        _validate.integer(name, value, 1)
    sampling = cls(
      expected_batch_size, dataset_size, 0, part, examples_per_user
    )
    if padded is None:
      variance = expected_batch_size * (1 - sampling.probability)
      most = math.ceil(expected_batch_size + 6 * math.sqrt(variance))
      sharding = execution.batch_sharding
      unit = part or (1 if sharding is None else len(sharding.device_set))
      padded = -(-min(dataset_size, most) // unit) * unit
    if padded % (part or 1):
      raise ValueError(
        'Expected padded_batch_size to be a multiple of microbatch_size, got'
        f' {padded} and {part}.'
      )
    return sampling._replace(padded_batch_size=padded)

  @property
  def probability(self) -> float:
    return self.expected_batch_size / self.dataset_size

  @property
  def truncated_batch_size(self) -> int | None:
    """The size of a full batch, if a batch can be cut to it."""
    fits = self.padded_batch_size >= self.dataset_size
    return None if fits else self.padded_batch_size

  def draw(self, seed: np.ndarray, step: int) -> np.ndarray:
    """Places of one batch, (padded size,), -1 where there is none.

    Args:
      seed: Words of 32 bits, secret.
      step: The number of the step, from 0.

    Returns:
      The places, each of ``dataset_size`` once at most.
    """
    rng = np.random.default_rng(
      np.random.SeedSequence(seed.tolist(), spawn_key=(step,))
    )
    # So many of N independent places; which ones is uniform given how many.
    drawn = rng.binomial(self.dataset_size, self.probability)
    size = min(drawn, self.padded_batch_size)  # Cut by chance.
    places = np.full(self.padded_batch_size, -1, np.int64)
    places[:size] = rng.choice(
      self.dataset_size, size, replace=False, shuffle=False
    )
    # A micro-batch takes every so-many-th row.
    parts = self.microbatch_size or self.padded_batch_size
    return places.reshape(-1, parts).T.ravel()

  def choose(
    self, seed: np.ndarray, step: int, place: int, count: int
  ) -> np.ndarray:
    """Which of a user's records are in a batch, so many at most, by chance.

    A function of the place alone: one user's number of records does not change
    which records of others are chosen.

    Args:
      seed: As for :meth:`draw`.
      step: As for :meth:`draw`.
      place: Of the user.
      count: How many records the user has.

    Returns:
      Numbers below ``count``, each once at most.
    """
    rng = np.random.default_rng(
      np.random.SeedSequence(seed.tolist(), spawn_key=(step, place))
    )
    most = min(count, self.examples_per_user or 1)
    return rng.choice(count, most, replace=False, shuffle=False)


class Batches:
  """The batches of a run, from a state's step to the last one.

  Iterating again gives the same batches again. ``len`` is their number.

  Attributes:
    steps: The numbers of their steps.
    draw: From the number of a step to its batch.
  """

  def __init__(self, steps: range, draw: Callable[[int], Batch]) -> None:
    self.steps = steps
    self.draw = draw

  def __len__(self) -> int:
    return len(self.steps)

  def __iter__(self) -> Iterator[Batch]:
    return map(self.draw, self.steps)


def new_seed(prng_key: PRNGKeyLike) -> np.ndarray:
  """A secret seed of batches, four words: fresh, or of a key that was given."""
  if _keys.is_given(prng_key):
    key = derived(prng_key, _BATCHES)
  else:
    key = _keys.resolve_key('prng_key', None, (), words=4)
  return np.asarray(jax.random.key_data(key), np.uint32)


def derived(prng_key: PRNGKeyLike, number: int) -> jax.Array:
  """A key that is independent of the noise's."""
  key = _keys.resolve_key('prng_key', prng_key, (), words=4)
  return jax.random.fold_in(key, number)
