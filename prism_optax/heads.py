"""A classifier's head from one private release, before any training.

The mean of each class is what a few thousand records can say about a linear
head at a small epsilon: one release, no steps, no learning rate. Adapters and
head are then trained from there.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np

from prism_optax import _randomness, _sums_of_records, _validate
from prism_optax._types import PRNGKeyLike

__all__ = ['ClassMeans', 'class_means']

# A class counts as at least so many records: noise alone makes no long column.
_FEWEST = 20.0
_PURPOSE = 0x48454144  # In a key that is given.
# Of fields that a program is compiled for.
_STATIC = {'static': True}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ClassMeans:
  """A linear head for features of norm one.

  Public, once it is released. A pytree.

  Attributes:
    kernel: (d, K), float32: a column is the direction of the mean feature of a
      class, less the mean of all columns, which changes no probability.
    noise_multiplier: Of the release, a float.
    entries: Number of entries that got noise.
    dataset_size: Number of records that were declared.
    seeded: Whether the key of the noise was given: then whoever knows it knows
      the noise.
  """

  kernel: jax.Array
  noise_multiplier: float = dataclasses.field(metadata=_STATIC)
  entries: int = dataclasses.field(metadata=_STATIC)
  dataset_size: int = dataclasses.field(metadata=_STATIC)
  seeded: bool = dataclasses.field(default=False, metadata=_STATIC)

  @property
  def event(self) -> dp_accounting.DpEvent:
    """The event of the release, to be composed with the training's."""
    return dp_accounting.GaussianDpEvent(self.noise_multiplier)


def class_means(
  batches: Iterable[tuple[Any, Any]],
  *,
  num_classes: int,
  noise_multiplier: float,
  dataset_size: int,
  prng_key: PRNGKeyLike = None,
) -> ClassMeans:
  """Releases the mean feature of each class, privately.

  One pass over all records with the frozen model; a feature may depend on its
  own record and on public weights alone (no batch statistics). A record with
  feature f and label y adds ``f / |f|`` to column y; a column of the noisy sum
  is divided by its length without what the noise adds to it. As a classifier of
  normalised features it is nearest class mean; as a start of the head it lets
  adapters learn from the first step::

    means = heads.class_means(
      ((features(x), y) for x, y in batches), num_classes=77,
      noise_multiplier=4.0, dataset_size=len(data))
    training = make_private(loss, params, also=[means], ...)

  **Privacy.** A record adds at most 1 to the sum in Euclidean norm, whatever is
  in it: one Gaussian mechanism of ``noise_multiplier`` for add-or-remove-one
  neighbours, whose ``.event`` has to be composed with the training's. Sums are
  integers and the release is exact, as
  :func:`prism_optax.tangent_privatizer`'s. The names and the number of
  classes are public. Every record must stand in one batch once, and for privacy
  of users all that a user has is one record here.

  ============================  ===============================================
  NaN or Inf in a feature       the record adds nothing
  a label that is no class      the record adds nothing (so -1 may fill up)
  a feature of zeros            the record adds nothing
  a class of few records        a short column: it counts as 20 records
  ``noise_multiplier=0.0``      no privacy, for tests
  ============================  ===============================================

  Args:
    batches: An iterable of pairs: features (B, d), which are normalised here,
      and integer labels (B,) from 0.
    num_classes: K.
    noise_multiplier: Standard deviation of the noise of every entry. A column
      is good where a class has several times ``noise_multiplier`` records, the
      better the more classes differ.
    dataset_size: Number of records, public; more of them are refused, padding
      included.
    prng_key: As for :func:`prism_optax.tangent_privatizer`; a key that is given
      is for one such release.

  Returns:
    The head.

  Raises:
    ValueError: If there is no batch, batches have other shapes or labels are no
      integers, there are more records than ``dataset_size``, or an argument is
      out of its range.

  Example:
    >>> import numpy as np
    >>> from prism_optax import heads
    >>> rng = np.random.default_rng(0)
    >>> labels = rng.integers(2, size=500)
    >>> features = rng.normal(size=(500, 8)) + 3 * np.eye(8)[labels]
    >>> means = heads.class_means(
    ...   [(features, labels)], num_classes=2, noise_multiplier=3.0,
    ...   dataset_size=500)
    >>> right = (features @ means.kernel).argmax(1) == labels
    >>> bool(right.mean() > 0.9), means.entries
    (True, 16)
  """
  _validate.integer('num_classes', num_classes, 1)
  shapes: set[tuple[int, ...]] = set()

  def checked() -> Iterator[tuple[jax.Array, jax.Array]]:
    for features, labels in batches:
      f, y = jnp.asarray(features), jnp.asarray(labels)
      shapes.add(f.shape[1:])
      fits = f.ndim == 2 and y.shape == f.shape[:1] and len(shapes) == 1
      if not fits or not jnp.issubdtype(y.dtype, jnp.integer):
        raise ValueError(
          'Expected features (B, d), d the same in all batches, and integer'
          f' labels (B,), got {f.shape} and {y.dtype} {y.shape}.'
        )
      yield f, y

  released = _sums_of_records.release(
    checked(),
    _term_of(num_classes),
    noise_multiplier=noise_multiplier,
    dataset_size=dataset_size,
    prng_key=prng_key,
    purpose=_PURPOSE,
  )['sums']
  sums = np.asarray(released, np.float64)
  squares = np.sum(sums**2, 0) - noise_multiplier**2 * len(sums)
  columns = sums / np.sqrt(np.maximum(squares, _FEWEST**2))
  kernel = columns - columns.mean(1, keepdims=True)
  return ClassMeans(
    jnp.asarray(kernel, jnp.float32),
    float(noise_multiplier),
    sums.size,
    int(dataset_size),
    _randomness.is_given(prng_key),
  )


@functools.cache
def _term_of(num_classes: int) -> Callable[[Any], dict[str, jax.Array]]:
  """What one record adds: one function for each number of classes."""

  def term(record: tuple[jax.Array, jax.Array]) -> dict[str, jax.Array]:
    feature, label = record
    feature = feature.astype(jnp.float32)
    # No square over- or underflows: of the largest entry one is left.
    largest = jnp.max(jnp.abs(feature), initial=0.0)
    feature = feature / jnp.where(largest > 0, largest, 1)
    size = jnp.linalg.norm(feature)
    feature = feature / jnp.where(size > 0, size, 1)
    # Zeros for a label that is no class.
    return {'sums': jnp.outer(feature, jax.nn.one_hot(label, num_classes))}

  return term
