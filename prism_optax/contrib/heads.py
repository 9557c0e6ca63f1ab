"""A classifier's head from one private release, before any training.

A linear head needs only sums over all records. So it takes one release, no
steps and no learning rate. It is a classifier already, and adapters can be
trained from it.
"""

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any, SupportsIndex

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np

from prism_optax import _identity, _validate
from prism_optax._randomness import _keys
from prism_optax._types import ArrayTree, PRNGKeyLike
from prism_optax.contrib import _one_shot_release

__all__ = ['LinearHead', 'class_means', 'ridge']

# A class counts as at least so many records: noise alone makes no long column.
_FEWEST = 20.0
# Of a record's own class, for columns of mean length one. Sentence vectors have
# 0.07 to 0.26, digits 0.16 to 0.24.
_LEAST_LOGIT = 0.1
# With so many classes half of the budget is for the second moment. On sentence
# vectors of 10 classes half was best, of 77 and 150 a fifth; two classes took
# what they got.
_EVEN = 10
# This much of a column's length is signal, however large the noise. With a
# fifth of the classes empty it was no worse than a floor from the noise.
_LEAST_LENGTH = 0.5
# Folded into a key that was given.
_PURPOSES = {
  'means': int.from_bytes(b'HEAD'),
  'ridge': int.from_bytes(b'RIDG'),
}
# Of fields that a program is compiled for.
_STATIC = {'static': True}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LinearHead:
  """A linear head for features of norm one.

  Public, once it is released. A pytree.

  **How it is recognised.** The entries of ``kernel`` have sizes on a geometric
  grid, 1.83 % apart: rounding to it moves them by at most 0.91 %, far less than
  the noise does. By this grid :func:`prism_optax.training.make_private`
  recognises a released kernel in parameters, in frozen weights and among the
  constants of a loss, and refuses it unless the release is among
  ``prior_releases``.

  ==================================  =========================================
  the array on another device         known
  saved and loaded                    known
  cast to bfloat16, float16           known, from some thirty sizes on
  transposed, a column, a row         known
  times any number                    known; a number for each column as well
  sums with other arrays, products    NOT known: declare the release
  trained since                       NOT known, nor is that training
  kernels of less than five sizes     NOT known
  cast to 8 bits, integers, complex   NOT known
  ==================================  =========================================

  Attributes:
    kernel: (d, K), float32: a column for each class, less the mean of all
      columns, which changes no probability.
    noise_multiplier: Of the release, a float.
    entries: Number of entries that got noise.
    dataset_size: Number of records that were declared.
    seeded: Whether the key of the noise was given. Whoever has that key can
      compute the noise.
    digest: Public digest of the released values: two releases with one digest
      are the same.
    key_digest: Of the key of the noise: two releases with one key have the same
      noise, and their difference has none. It is public for a fresh key, which
      has 128 bits. A key that you gave may be found by trying, from its digest
      or from the kernel, so publish neither.
  """

  kernel: jax.Array
  noise_multiplier: float = dataclasses.field(metadata=_STATIC)
  entries: int = dataclasses.field(metadata=_STATIC)
  dataset_size: int = dataclasses.field(metadata=_STATIC)
  seeded: bool = dataclasses.field(metadata=_STATIC)
  digest: str = dataclasses.field(metadata=_STATIC)
  key_digest: str = dataclasses.field(metadata=_STATIC, repr=False)

  @property
  def event(self) -> dp_accounting.DpEvent:
    """The event of the release, to be composed with the training's."""
    return dp_accounting.GaussianDpEvent(self.noise_multiplier)

  def kernel_for_other_records(self) -> jax.Array:
    """The kernel, for a training on records that this release has not seen.

    Of such a training the release is no part: to it the kernel is public. The
    entries are moved off the grid, so that it is not taken for a release that
    was forgotten. For a training on any record of this release give ``kernel``,
    and the release as one of ``prior_releases``.

    Returns:
      (d, K), float32, at most 0.91 % from ``kernel``.
    """
    return jnp.asarray(_identity.unmarked(np.asarray(self.kernel)))


def class_means(
  batches: Iterable[tuple[ArrayTree, ArrayTree]],
  *,
  num_classes: int,
  noise_multiplier: float,
  dataset_size: int,
  prng_key: PRNGKeyLike = None,
) -> LinearHead:
  """Releases the mean feature of each class, privately.

  One pass over all records with the frozen model; a feature may depend on its
  own record and on public weights alone (no batch statistics). A record with
  feature f and label y adds ``f / |f|`` to column y; a column of the noisy sum
  is divided by its length, less the noise's share of the length. As a
  classifier of normalised features it is nearest class mean; as a start of the
  head it lets adapters learn from the first step::

    means = heads.class_means(
      ((features(x), y) for x, y in batches), num_classes=77,
      noise_multiplier=4.0, dataset_size=len(data))
    training = make_private(loss, params, prior_releases=[means], ...)

  **Privacy.** A record adds at most 1 to the sum in Euclidean norm, whatever is
  in it: one Gaussian mechanism of ``noise_multiplier`` for add-or-remove-one
  neighbours, whose ``.event`` has to be composed with the training's. Sums are
  integers and the release is exact, as in
  :func:`prism_optax.tangent_privatizer`. The names and the number of classes
  are public. Every record must be in one batch once, and for privacy of users
  all data of a user are one record here.

  ============================  ===============================================
  NaN or Inf in a feature       the record adds nothing
  a label that is no class      the record adds nothing (so -1 may fill up):
                                negative, K or more (also 2^31), and in a list
                                a float, a text, None, a list
  a feature of zeros            the record adds nothing
  a class of few records        a short column: it counts as 20 records
  ``noise_multiplier=0.0``      no privacy, for tests
  ============================  ===============================================

  Args:
    batches: An iterable of pairs: features, an array (B, d), which are
      normalised here, and labels from 0, an array (B,) of integers or a list.
      Shapes and types of arrays describe the whole batch and are public: other
      ones are refused.
    num_classes: K, the number of classes.
    noise_multiplier: Standard deviation of the noise of every entry. A column
      is good where a class has several times ``noise_multiplier`` records, the
      better the more classes differ.
    dataset_size: Number of records, public; more of them are refused, padding
      included.
    prng_key: As for :func:`prism_optax.tangent_privatizer`; a key that you give
      is for one such release.

  Returns:
    The head.

  Raises:
    ValueError: If there is no batch, a batch has other shapes or types, there
      are more records than ``dataset_size``, or an argument is out of its
      range.

  Example:
    >>> import numpy as np
    >>> from prism_optax.contrib import heads
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
  released = _released(
    batches,
    _class_term_of,
    num_classes=num_classes,
    noise_multiplier=noise_multiplier,
    dataset_size=dataset_size,
    prng_key=prng_key,
    purpose=_PURPOSES['means'],
  )
  sums = np.asarray(released.arrays['sums'], np.float64)
  squares = np.sum(sums**2, 0) - noise_multiplier**2 * len(sums)
  columns = sums / np.sqrt(np.maximum(squares, _FEWEST**2))
  return _head(columns, released, noise_multiplier, dataset_size, prng_key)


def ridge(
  batches: Iterable[tuple[ArrayTree, ArrayTree]],
  *,
  num_classes: int,
  noise_multiplier: float,
  dataset_size: int,
  logit_scale: float = 1.0,
  prng_key: PRNGKeyLike = None,
) -> LinearHead:
  """Releases the head of ridge regression on the classes, privately.

  Like :func:`class_means`, but a record with the normalised feature f also adds
  to the second moment of all features, ``M = sum f f^T``. The head is ``(M + l
  I)^-1 C`` with the class sums C, with columns of one length. So directions
  that all features share no longer count, nor do the sizes of the classes. With
  a thousand records in each class it was better than class means at every noise
  multiplier that we tried. With about ninety the means were better at 2 and 3,
  and worse without noise, at 5 and at 8::

    head = heads.ridge(
      ((features(x), y) for x, y in batches), num_classes=10,
      noise_multiplier=8.0, dataset_size=len(data), logit_scale=10.0)
    training = make_private(loss, params, prior_releases=[head], ...)

  The noise of M alone has eigenvalues up to e (Wigner). An eigenvalue v of the
  noisy M counts as ``sqrt(v^2 - e^2)``, or as zero below e (Gavish and Donoho,
  arXiv:1405.7511), and the ridge l is ``1 + e``. A column's length is measured
  without the known share of the noise. The one length is as long as a softmax
  wants: the logit of a record's own class is ``2 log K`` on average. A training
  from shorter columns learns to lengthen them first, and loses what the second
  moment gave. Ridge regression from noisy sums comes from Foulds et al.
  (arXiv:1603.07294) and Wang (arXiv:1803.02596). The ridge, the shares of the
  budget and the lengths are ours.

  **Privacy.** As in :func:`class_means`, a record adds ``f f^T`` times sqrt(q),
  and to column y f times ``sqrt(1 - q)``, and so 1 in Euclidean norm; ``q = 1 /
  (1 + sqrt(K / 10))``. Of the symmetric matrix its diagonal and sqrt(2) times
  the entries above are noised.

  Args:
    batches: As for :func:`class_means`.
    num_classes: K, the number of classes.
    noise_multiplier: Standard deviation of the noise of every entry.
    dataset_size: Number of records, public; more of them are refused.
    logit_scale: Factor of the logits in your loss, public, which are
      ``logit_scale * f @ kernel`` for f of norm one. The larger it is, the
      shorter the columns, and the more a step of a training changes the
      logits. Our measurements have 10.
    prng_key: As for :func:`class_means`.

  Returns:
    The head. ``entries`` is ``d (d + 1) / 2 + d K``. Where noise hides the
    classes, the mean length of its columns, times ``logit_scale``, is
    ``20 log K`` at most.

  Raises:
    ValueError: In the cases of :func:`class_means`, and if ``logit_scale`` is
      not positive.

  Example:
    >>> import numpy as np
    >>> from prism_optax.contrib import heads
    >>> rng = np.random.default_rng(0)
    >>> labels = rng.integers(2, size=500)
    >>> features = rng.normal(size=(500, 8)) + 3 * np.eye(8)[labels] + 5
    >>> head = heads.ridge(
    ...   [(features, labels)], num_classes=2, noise_multiplier=2.0,
    ...   dataset_size=500)
    >>> right = (features @ head.kernel).argmax(1) == labels
    >>> bool(right.mean() > 0.8), head.entries
    (True, 52)
  """
  _validate.positive('logit_scale', logit_scale)
  released = _released(
    batches,
    _ridge_term_of,
    num_classes=num_classes,
    noise_multiplier=noise_multiplier,
    dataset_size=dataset_size,
    prng_key=prng_key,
    purpose=_PURPOSES['ridge'],
  )
  of_moment, of_sums = _norms(num_classes)
  sums = np.asarray(released.arrays['sums'], np.float64) / of_sums
  moment, edge = _one_shot_release.to_square(released.arrays['moment'])
  values, vectors = np.linalg.eigh(moment / of_moment)
  edge *= noise_multiplier / of_moment
  # Eigenvalues that noise alone may have count as zero. The others shrink so
  # that the matrix is as near to M as can be (Frobenius norm).
  values = np.sqrt(np.maximum(values, edge) ** 2 - edge**2) + 1 + edge
  columns = vectors @ ((vectors.T @ sums) / values[:, None])
  columns -= columns.mean(1, keepdims=True)
  # Of the noise of one class less the mean of all.
  variance = (noise_multiplier / of_sums) ** 2 * (1 - 1 / num_classes)
  measured = np.sum(columns**2, 0)
  squares = measured - variance * np.sum(values**-2)
  lengths = np.sqrt(np.maximum(squares, _LEAST_LENGTH**2 * measured))
  inverse_lengths = 1 / np.where(lengths > 0, lengths, 1)
  columns *= inverse_lengths
  columns -= columns.mean(1, keepdims=True)
  # The sum of all records' logits of their own classes. The noise of a class is
  # in its column and in its sum.
  noise = variance * np.sum(1 / values) * np.sum(inverse_lengths)
  logits = np.sum(columns * sums) - noise
  least = _LEAST_LOGIT * np.linalg.norm(columns, axis=0).mean()
  mean_logit = max(logits / dataset_size, least)
  columns *= 2 * math.log(num_classes) / (mean_logit or 1) / logit_scale
  return _head(columns, released, noise_multiplier, dataset_size, prng_key)


def _released(
  batches: Iterable[tuple[ArrayTree, ArrayTree]],
  term_of: Callable[[int], Callable[[ArrayTree], _one_shot_release.Arrays]],
  *,
  num_classes: int,
  **options: Any,
) -> _one_shot_release.Released:
  """The noisy sums over all records, whose batches are checked."""
  _validate.integer('num_classes', num_classes, 1)
  shapes: set[tuple[int, ...]] = set()

  def checked() -> Iterator[tuple[jax.Array, jax.Array]]:
    for features, labels in batches:
      f = _one_shot_release.as_rows('features', features)
      y = _classes(labels, num_classes)
      shapes.add(f.shape[1:])
      if f.ndim != 2 or y.shape != f.shape[:1] or len(shapes) != 1:
        raise ValueError(
          'Expected features (B, d), d the same in all batches, and labels'
          f' (B,), got {f.shape} and {y.shape}.'
        )
      yield f, y

  return _one_shot_release.release(checked(), term_of(num_classes), **options)


def _classes(labels: ArrayTree, num_classes: int) -> jax.Array:
  """Labels as int32, -1 for all that are no class, whatever they are.

  Raises:
    ValueError: For an array of another type than integers, which the whole
      batch has. Nothing is raised for an entry of a list.
  """
  if isinstance(labels, list | tuple) or (
    getattr(labels, 'dtype', None) == np.dtype(object) and labels.ndim == 1
  ):
    labels = np.array([_class(x, num_classes) for x in labels], np.int32)
  if not isinstance(labels, jax.Array):
    labels = np.asarray(labels)
  if not jnp.issubdtype(labels.dtype, jnp.integer):
    raise ValueError(
      f'Expected labels to be integers, got an array of {labels.dtype}.'
    )
  most = np.iinfo(labels.dtype).max
  # In their own type: a narrower one could make a class of what is none.
  is_class = (labels >= 0) & (labels <= min(num_classes - 1, most))
  return jnp.where(is_class, labels.astype(np.int32), -1)


def _class(label: SupportsIndex, num_classes: int) -> int:
  """The class that an entry of a list is, -1 for anything else."""
  try:
    number = operator.index(label)
  except Exception:  # Whatever it is, it is one record's, and reveals nothing.
    return -1
  return number if 0 <= number < num_classes else -1


def _head(
  columns: np.ndarray,
  released: _one_shot_release.Released,
  noise_multiplier: float,
  dataset_size: int,
  prng_key: PRNGKeyLike,
) -> LinearHead:
  kernel = _identity.marked(columns - columns.mean(1, keepdims=True))
  return LinearHead(
    jnp.asarray(kernel),
    float(noise_multiplier),
    sum(x.size for x in released.arrays.values()),
    int(dataset_size),
    _keys.is_given(prng_key),
    released.digest,
    released.key_digest,
  )


@functools.cache
def _class_term_of(
  num_classes: int,
) -> Callable[[ArrayTree], _one_shot_release.Arrays]:
  """What one record adds: one function for each number of classes."""

  def term(record: tuple[jax.Array, jax.Array]) -> dict[str, jax.Array]:
    feature, label = record
    feature = _direction(feature)
    # Zeros for a label that is no class.
    return {'sums': jnp.outer(feature, jax.nn.one_hot(label, num_classes))}

  return term


@functools.cache
def _ridge_term_of(
  num_classes: int,
) -> Callable[[ArrayTree], _one_shot_release.Arrays]:
  """As :func:`_class_term_of`, with the second moment beside it."""
  of_moment, of_sums = _norms(num_classes)

  def term(record: tuple[jax.Array, jax.Array]) -> dict[str, jax.Array]:
    feature, label = record
    chosen = jax.nn.one_hot(label, num_classes)
    feature = _direction(feature) * jnp.sum(chosen)
    moment = _one_shot_release.to_vector(jnp.outer(feature, feature))
    return {
      'moment': moment * of_moment,
      'sums': jnp.outer(feature, chosen) * of_sums,
    }

  return term


def _norms(num_classes: int) -> tuple[float, float]:
  """Of the two parts that a record adds: their squares are 1 together.

  The more classes there are, the fewer records has the sum of each.
  """
  share = 1 / (1 + math.sqrt(num_classes / _EVEN))
  return math.sqrt(share), math.sqrt(1 - share)


def _direction(feature: jax.Array) -> jax.Array:
  """Of length one; NaN for zeros, which the clip takes for nothing."""
  feature = feature.astype(jnp.float32)
  # No square over- or underflows: of the largest entry one is left.
  feature = feature / jnp.max(jnp.abs(feature))
  direction: jax.Array = feature / jnp.linalg.norm(feature)
  return direction
