"""How releases are told apart, and known again wherever they turn up.

A release carries two digests: of the values that were released, and of the key
of their noise. Digests tell that two releases are one, or have one noise. They
do not tell that an array of numbers, from anywhere, was a release: nothing but
the numbers comes along. So the numbers of a released head are rounded to a
grid that no other array has, which is post-processing of the release and moves
them by less than 1 %, and the grid is recognised in copies. Compared with what
else could be done:

- A list in this process of all that was released forgets what another process
  has released, and knows no copy, cast or file.
- A ledger that is handed to every release and training is forgotten as easily
  as ``prior_releases``.
- A check sum in the low bits is lost by a cast to bfloat16, or by a factor 10.
- A grid of logarithms survives all of these, and transposition, slices and
  files as well, since a factor only shifts it.
"""

import hashlib
from collections.abc import Iterator, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from prism_optax._randomness import _keys

# Points of the grid in an octave: neighbours are 1.83 % apart. They are many
# enough to cost no accuracy that was measured, and few enough for a cast to
# bfloat16, of 0.4 %, to leave its trace. Irrational (100 over the square of the
# golden ratio): powers of two and of ten do not lie on the grid.
_POINTS = 38.196601125
# Minus the logarithm of the chance that an array passes for one on the grid.
_EVIDENCE = 18.0
# Entries that are looked at along each axis.
_SIDE = 128
# Two casts to bfloat16 move the ratio of two numbers by so much at most.
_SAME = 1 + 2.0**-6


def digest_of_values(arrays: Mapping[str, jax.typing.ArrayLike]) -> str:
  """A digest of released arrays, by name, shape, type and bits."""
  digest = hashlib.sha256(b'prism_optax: values of a release\0')
  for name, array in sorted(arrays.items()):
    x = np.asarray(array)
    digest.update(f'{name} {x.shape} {x.dtype}\0'.encode() + x.tobytes())
  return digest.hexdigest()


def digest_of_key(prng_key: jax.Array) -> str:
  """A digest of the key of a noise: equal keys are seen, none is told.

  A fresh key has 128 bits, which nobody finds by trying: its digest is public.
  A key that was given may be a small integer, which its digest then tells to
  whoever tries some. It cannot be otherwise for a digest that shows, without a
  secret, that two keys are one; and who can try the key can also subtract its
  noise from what was released and look whether records are left. A release of
  a given key says so (``seeded``), and its statements are no guarantee against
  anyone who can find the key.
  """
  words = np.asarray(_keys.key_words(prng_key), np.uint32)
  domain = b'prism_optax: key of a release\0'
  return hashlib.sha256(domain + words.tobytes()).hexdigest()


def marked(values: np.ndarray) -> np.ndarray:
  """The values with sizes on the grid, float32: 0.91 % from them at most.

  Zeros stay.
  """
  sizes = np.abs(np.asarray(values, np.float64))
  logs = np.log2(np.where(sizes > 0, sizes, 1))
  on_grid = np.exp2(np.round(logs * _POINTS) / _POINTS)
  return np.asarray(np.sign(values) * on_grid, np.float32)


def unmarked(values: np.ndarray) -> np.ndarray:
  """The values between the points of the grid, where chance has put them."""
  seed = [*digest_of_values({'marked': values}).encode()]
  steps = np.random.default_rng(seed).uniform(-0.5, 0.5, values.shape)
  return np.asarray(values * np.exp2(steps / _POINTS), np.float32)


def is_marked(array: object) -> bool:
  """Whether the sizes of an array lie on the grid, or on a multiple of it.

  Seen are copies on any device and from any file, transposed, cast to bfloat16
  or float16, times any number, with columns or rows times numbers of their own,
  and arrays of which some hundred entries are such a copy. It takes some five
  different sizes in float32, about thirty after a cast to bfloat16. Not seen is
  what was computed with several entries: sums with other arrays, products,
  changes by training.
  """
  block = _block(array)
  if block is None:
    return False
  parts = [block]
  if block.ndim == 2:
    parts += [block[:, 0], block[0]]
  return any(map(_on_grid, parts))


def _block(array: object) -> np.ndarray | None:
  """Some entries of an array of floats, on the host; None of anything else."""
  dtype = getattr(array, 'dtype', None)
  if isinstance(array, jax.core.Tracer | jax.ShapeDtypeStruct):
    return None
  if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
    return None
  # The basis of a metric may have no column.
  if 0 in getattr(array, 'shape', ()):
    return None
  array = _local(array)
  # All of it, where that costs nothing; else what is needed leaves the device.
  if not isinstance(array, jax.Array) or array.size <= 2**20 or _on_host(array):
    array = np.asarray(array)
  if array.ndim > 2:
    array = array[(0,) * (array.ndim - 2)]
  ends = {0: (), 1: (slice(_SIDE**2),)}.get(array.ndim, 2 * (slice(_SIDE),))
  return np.asarray(array[ends]).astype(np.float64)


def _local(array: object) -> object:
  """The array, or the part of it that this process has."""
  if not isinstance(array, jax.Array) or array.is_fully_addressable:
    return array
  return array.addressable_shards[0].data


def _on_host(array: jax.Array) -> bool:
  return all(device.platform == 'cpu' for device in array.devices())


def _on_grid(values: np.ndarray) -> bool:
  """Whether sizes have one remainder by the grid, beyond chance."""
  sizes = np.abs(values[np.isfinite(values)])
  # Of what is much smaller, float16 may have kept little.
  sizes = sizes[sizes > 2.0**-13 * np.max(sizes, initial=0)]
  sizes = np.unique(sizes)  # Equal numbers say nothing more.
  if sizes.size < 3:
    return False
  phasors = _phasors(sizes)
  mean = np.mean(phasors)
  farthest = np.max(np.abs(np.angle(phasors * np.conj(mean)))) / np.pi
  # Minus the logarithms of the chance that phases which say nothing have so
  # long a mean (Rayleigh), or lie so close to it.
  long = sizes.size * abs(mean) ** 2
  close = (sizes.size - 1) * -np.log(farthest + 1e-4)
  is_sure = abs(mean) >= 0.5 and max(long, close) >= _EVIDENCE
  return bool(is_sure and not _is_geometric(sizes))


def _is_geometric(sizes: np.ndarray) -> bool:
  """Whether sorted sizes are a sequence of equal ratios, as rounded.

  Such are the frequencies of positions, whose ratio may be whole steps.
  """
  logs = np.log2(sizes)
  index = np.arange(sizes.size)
  slope, start = np.polyfit(index, logs, 1)
  rest = logs - (start + slope * index)
  return bool(np.sqrt(np.mean(rest**2)) < 0.2 * slope)


def _phasors(sizes: np.ndarray) -> np.ndarray:
  phasors: np.ndarray = np.exp(2j * np.pi * _POINTS * np.log2(sizes))
  return phasors


def is_copy(array: object, original: object) -> bool:
  """Whether an array is another one, cast, transposed or times numbers.

  One number for all, or for each column, or for each row; a vector may be one
  column or one row of the other.
  """
  x, y = (
    np.squeeze(np.asarray(_local(z), np.float64)) for z in (array, original)
  )
  return any(
    x.shape == z.shape and _same_up_to_factors(x, z) for z in _views(y, x.ndim)
  )


def _views(original: np.ndarray, ndim: int) -> Iterator[np.ndarray]:
  yield original
  if original.ndim == 2:
    yield original.T
    if ndim == 1:
      yield from original
      yield from original.T


def _same_up_to_factors(x: np.ndarray, y: np.ndarray) -> bool:
  x, y = np.abs(x), np.atleast_1d(np.abs(y))
  # Of what is much smaller, a narrow type may have kept little.
  large = y > 1e-3 * np.max(y)
  ratios = np.where(large, x / np.where(large, y, 1), np.nan)

  def alike(axis: int | None) -> bool:
    low = np.min(np.where(large, ratios, np.inf), axis)
    high = np.max(np.where(large, ratios, 0), axis)
    # Where nothing is large, nothing is compared.
    return bool(np.all((high <= low * _SAME) & ((low > 0) | ~large.any(axis))))

  return any(map(alike, (None, *range(y.ndim)))) and bool(large.any())
