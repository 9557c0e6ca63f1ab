"""One release of a sum over all records, which are read in batches."""

import functools
import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from prism_optax import _clip, _exact_sum, _identity, _lattice, _validate
from prism_optax._randomness import _keys
from prism_optax._types import ArrayTree, PRNGKeyLike

Arrays = dict[str, jax.Array]


class Released(NamedTuple):
  """What was released, and what tells it from other releases.

  Attributes:
    arrays: Noisy sums, float32.
    digest: Of the arrays.
    key_digest: Of the key of the noise.
  """

  arrays: Arrays
  digest: str
  key_digest: str


def release(
  batches: Iterable[ArrayTree],
  terms: Callable[[ArrayTree], Arrays],
  *,
  noise_multiplier: float,
  dataset_size: int,
  prng_key: PRNGKeyLike,
  purpose: int,
) -> Released:
  """The sum of what all records add, with noise on every entry.

  A record adds at most 1 in Euclidean norm, over all arrays together, whatever
  ``terms`` makes of it; one whose terms are not finite adds zero. Sums are
  integers: neither the order nor the size of batches counts.

  Args:
    batches: Trees of arrays (B, ...), checked: one entry is one record.
    terms: From one record to arrays of joint norm at most 1, compiled once for
      one and the same function.
    noise_multiplier: Standard deviation of the noise.
    dataset_size: Number of records, public.
    prng_key: As for :func:`prism_optax.tangent_privatizer`.
    purpose: Folded into a key that was given, 32 bits: one key for releases of
      several kinds gives each noise of its own.

  Returns:
    What was released.

  Raises:
    ValueError: If there is no batch, or more records than ``dataset_size``, or
      an argument is out of its range.
  """
  sigma = _validate.known_non_negative('noise_multiplier', noise_multiplier)
  _validate.integer('dataset_size', dataset_size, 1)
  key = _keys.resolve_key('prng_key', prng_key, (), words=4)
  unit = np.asarray(_exact_sum.unit_of(sigma, 1.0, jnp.float32))
  totals: dict[str, np.ndarray] = {}
  rows = 0
  for batch in batches:
    rows += len(jax.tree.leaves(batch)[0])
    for name, x in sum_of_batch(batch, unit, terms).items():
      totals[name] = totals.get(name, 0) + _exact_sum.integers_of(x)
  if not totals:
    raise ValueError('Expected batches to hold at least one, got none.')
  # The declared size bounds the data sets that the guarantee is about, so that
  # no two of them are told apart here; and more rows are mostly a mistake that
  # would void it: two passes, or records where users were declared.
  if rows > dataset_size:
    raise ValueError(
      'Expected batches in which every record (or user) stands once, got'
      f' {rows} records for {dataset_size=}: one that stands in them twice'
      ' moves the sum twice as far as is accounted for. (Padding counts: leave'
      ' it out.)'
    )
  if _keys.is_given(prng_key):
    key = jax.random.fold_in(key, purpose)
  sums = {name: _exact_sum.from_integers(x, unit) for name, x in totals.items()}
  arrays: Arrays = _lattice.add_noise(key, sums, sigma)
  digest = _identity.digest_of_values(arrays)
  return Released(arrays, digest, _identity.digest_of_key(key))


def as_rows(name: str, array: object) -> jax.Array:
  """An array of numbers, one record an entry of the first axis.

  Its type is that of the whole batch, and public. In a list every record would
  have a type and a length of its own, and what a list becomes would depend on
  each of them.

  Raises:
    ValueError: For anything else, by the type of the whole.
  """
  if not hasattr(array, 'shape'):
    raise ValueError(
      f'Expected {name} to be an array, one record a row, got'
      f' {type(array).__name__}.'
    )
  if not isinstance(array, jax.Array):
    array = np.asarray(array)
  kinds = jnp.floating, jnp.integer, jnp.bool_
  if not any(jnp.issubdtype(array.dtype, kind) for kind in kinds):
    raise ValueError(
      f'Expected {name} to be real numbers, got an array of {array.dtype}.'
    )
  if isinstance(array, np.ndarray):
    # Too large a number becomes infinite, not another one; and no warning
    # tells that there is one.
    with np.errstate(all='ignore'):
      array = array.astype(np.float32)
  return jnp.asarray(array)


@functools.partial(jax.jit, static_argnums=2)
def sum_of_batch(
  batch: ArrayTree, unit: jax.Array, terms: Callable[[ArrayTree], Arrays]
) -> dict[str, _exact_sum.LatticeSum]:
  """The sum over the records of a batch, of arrays on the lattice."""
  # Cuts what is longer than one by rounding, and whatever is not finite.
  clipped, _ = _clip.Clip(_clip.FlatClipping()).sum(
    _clip.Coordinates(terms), batch
  )
  sums: dict[str, _exact_sum.LatticeSum] = clipped.in_units(
    lambda leaves: [unit] * len(leaves)
  )
  return sums


def to_vector(square: jax.Array) -> jax.Array:
  """A symmetric matrix as n (n + 1) / 2 numbers, of the same norm."""
  rows, columns = np.triu_indices(len(square))
  weights = np.where(rows == columns, 1, math.sqrt(2)).astype(np.float32)
  return square[rows, columns] * weights


def to_square(vector: jax.typing.ArrayLike) -> tuple[np.ndarray, float]:
  """The matrix of :func:`to_vector`, float64, and the edge of its noise.

  The largest eigenvalue of noise of standard deviation 1 on the vector, about:
  entries off the diagonal have half the variance (Wigner).
  """
  vector = np.asarray(vector, np.float64)
  n = math.isqrt(2 * vector.size)
  rows, columns = np.triu_indices(n)
  square = np.zeros((n, n))
  square[rows, columns] = vector * np.where(rows == columns, 1, math.sqrt(0.5))
  square[columns, rows] = square[rows, columns]
  return square, math.sqrt(2 * n)
