"""Gaussian noise on a lattice: releases whose low bits say nothing.

A floating-point sum ``x + s n`` shows in its low bits which x it came from: for
most outputs no float n leads there from another x (Mironov 2012). Here x and
the noise are integers in the same unit ``s / STEPS`` and are added as integers,
so that every output can come from every x, with the probability that the law of
the noise says, and nothing else reaches what leaves: the conversion to a float
is a function of the integer sum.

The noise is an integer drawn in integer arithmetic of 32 bits: a cell of 4096
steps from the discrete Gaussian, by an alias table, and four uniform positions
within it, which smooth the cells to a spline. How far its law is from that of a
rounded Gaussian is derived in docs/explanation/exact_release.md and measured in
tests/core/lattice_test.py.
"""

import functools
import math
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from prism_optax._exact_sum import (
  LIMB,
  LIMB_BITS,
  STEPS,
  LatticeSum,
  is_sum,
  parts,
  towards_zero,
  unit_of,
  with_parts,
)
from prism_optax._proofs import _marks
from prism_optax._randomness import _generators, _keys
from prism_optax._types import ArrayTree, Scalar

_CELL_BITS = 12
_CELL = 1 << _CELL_BITS  # Steps.
_COLUMNS = 1 << 12  # Cells that the noise reaches, half of them on either side.
_STDDEV = STEPS // _CELL  # Of the noise, in cells.
_THRESHOLD_BITS = 52
_BLOCK = 2**12  # Entries whose words a CPU has at a time.
# A standard deviation below it has a lattice that float32 cannot hold.
_LEAST_STDDEV = float(np.finfo(np.float32).tiny) * STEPS


def cell_weights() -> list[int]:
  """The law of the cells -2048 to 2047, in units of 2^-64.

  Four uniform positions add ``(1 - 4096^-2) / 3`` to the variance in cells.
  """
  variance = _STDDEV**2 - (1 - 1 / _CELL**2) / 3
  half = _COLUMNS // 2
  cells = range(-half + 1, half)
  law = [math.exp(-(j**2) / (2 * variance)) for j in cells]
  total = math.fsum(law)
  # Up: far out no cell is less likely than it should be, which would count by
  # exp(epsilon). The cell in the middle pays for it, 2^12 of its 2^55 units.
  weights = [0, *(math.ceil(p / total * 2**64) for p in law)]
  weights[half] += 2**64 - sum(weights)
  return weights


@functools.cache
def _alias_table() -> tuple[np.ndarray, np.ndarray]:
  """Walker's table (1977; Vose 1991): a column and 52 bits say the cell.

  Returns:
    For each column the high 32 bits of its threshold; and the low 20 bits,
    followed by the 12 of its alias.
  """
  capacity = 1 << _THRESHOLD_BITS
  thresholds, aliases = cell_weights(), list(range(_COLUMNS))
  small = [i for i, x in enumerate(thresholds) if x < capacity]
  large = [i for i, x in enumerate(thresholds) if x > capacity]
  while small:
    i, j = small.pop(), large[-1]
    aliases[i] = j
    thresholds[j] -= capacity - thresholds[i]
    if thresholds[j] <= capacity:
      large.pop()
      if thresholds[j] < capacity:
        small.append(j)
  # A full column is its own alias, so its threshold does not matter.
  words = [
    (min(x, capacity - 1), y) for x, y in zip(thresholds, aliases, strict=True)
  ]
  return (
    np.array([x >> 20 for x, _ in words], np.uint32),
    np.array([(x & 0xFFFFF) << 12 | y for x, y in words], np.uint32),
  )


def integers(words: Sequence[jax.Array]) -> jax.Array:
  """The noise, in steps, of blocks of four random words.

  Args:
    words: Four arrays of unsigned 32-bit integers.

  Returns:
    An array of int32 below 2^24 in size, of standard deviation ``STEPS``.
  """
  a, b, c, d = words
  high, low = (
    jnp.asarray(x).at[a >> jnp.uint32(20)].get(mode='promise_in_bounds')
    for x in _alias_table()
  )
  twelve, inside = jnp.uint32(12), jnp.uint32(_CELL - 1)
  stays = (b < high) | ((b == high) & (d >> twelve < low >> twelve))
  cell = jnp.where(stays, a >> jnp.uint32(20), low & inside).astype(jnp.int32)
  within = (a & inside) + (c & inside) + ((c >> twelve) & inside) + (d & inside)
  # The mean of four positions is 4 (4096 - 1) / 2, an integer.
  noise: jax.Array = (cell - _COLUMNS // 2) * _CELL + within.astype(jnp.int32)
  return noise - 8190


class _Alike(NamedTuple):
  """Leaves of one shape, by their numbers in the tree."""

  numbers: tuple[int, ...]
  shape: tuple[int, ...]


def _drawn(
  key: Sequence[jax.Array], leaves: Sequence[_Alike]
) -> list[jax.Array]:
  """The noise, in steps: for leaves of one shape an array of int32, stacked."""

  def of_a_shape(alike: _Alike) -> jax.Array:
    numbers = jnp.array(alike.numbers, jnp.uint32)
    words = _generators.words(key, alike.shape, numbers)
    # As arrays of their own on a TPU: its compiler would copy the generator
    # into all that reads a word, and take six times as long.
    words = jax.lax.platform_dependent(
      words, tpu=jax.lax.optimization_barrier, default=lambda x: x
    )
    return integers(words)

  return list(map(of_a_shape, leaves))


def _drawn_in_blocks(
  key: Sequence[jax.Array], leaves: Sequence[_Alike]
) -> list[jax.Array]:
  """The same on a CPU, in one loop over the parts of all leaves.

  XLA would copy the generator into each loop that reads a word, among them
  loops that look into the tables, which have no vector instructions. It drops a
  barrier there before it fuses loops, but it never fuses a reduction of several
  arrays with what reads them. Blocks of parts, because words are four times as
  large as the noise.
  """
  counts = [len(x.numbers) for x in leaves]
  sizes = [math.prod(x.shape) for x in leaves]
  # The last part of each leaf is filled up, which adds a quarter at most.
  quarter = int(np.dot(counts, sizes)) // (4 * sum(counts))
  length = max(1, min(_BLOCK, quarter))
  parts = [-(-size // length) for size in sizes]
  places = [
    np.meshgrid(x.numbers, np.arange(n) * length, indexing='ij')
    for x, n in zip(leaves, parts, strict=True)
  ]
  numbers, starts = np.hstack([np.reshape(x, (2, -1)) for x in places])
  blocks = max(1, -(-len(starts) * length // _BLOCK))

  def in_blocks(x: np.ndarray) -> np.ndarray:
    padded = np.pad(x, (0, -len(x) % blocks))
    return padded.astype(np.uint32).reshape(blocks, -1)

  def block(place: tuple[jax.Array, jax.Array]) -> jax.Array:
    words = _generators.words(key, (length,), *place)
    twice = [jnp.broadcast_to(x, (2, *x.shape)) for x in words]
    stored = jax.lax.reduce(
      twice,
      [np.uint32(0)] * 4,
      lambda left, right: [x | y for x, y in zip(left, right, strict=True)],
      (0,),
    )
    return integers(stored)

  noise = jax.lax.map(block, (in_blocks(numbers), in_blocks(starts)))
  ends = np.cumsum(np.multiply(counts, parts)) * length
  return [
    x.reshape(count, -1)[:, :size].reshape(count, *alike.shape)
    for alike, count, size, x in zip(
      leaves, counts, sizes, jnp.split(noise.ravel(), ends)[:-1], strict=True
    )
  ]


# One program also where the caller does not use jit.
@jax.jit
def _all_noisy(
  key: list[jax.Array], leaves: list[LatticeSum]
) -> list[jax.Array]:
  """Adds the noise of all leaves, those of one shape and type together.

  The generator takes a third of a second to compile, and a model has hundreds
  of leaves and few shapes.
  """
  if not leaves:
    return []
  kinds: dict[Hashable, list[int]] = {}
  for i, x in enumerate(leaves):
    kinds.setdefault(tuple(map(jax.typeof, x)), []).append(i)

  def merged(shape: tuple[int, ...]) -> tuple[int, ...]:
    # The last axis of a factor is its rank, too short for a vectorised loop: it
    # is merged with the one before. Earlier axes stay, they may be sharded.
    return (*shape[:-2], math.prod(shape[-2:]))

  alike = [
    _Alike(tuple(numbers), merged(leaves[numbers[0]].low.shape))
    for numbers in kinds.values()
  ]
  drawn = functools.partial(_drawn, leaves=alike)
  # A block of ChaCha20 has the words of entries that are far from each other,
  # and its rounds are a loop, which nothing copies.
  on_cpu = drawn if len(key) == 8 else functools.partial(
    _drawn_in_blocks, leaves=alike
  )  # fmt: skip
  noise = jax.lax.platform_dependent(key, cpu=on_cpu, default=drawn)
  out: dict[int, jax.Array] = {}
  for (numbers, _), steps in zip(alike, noise, strict=True):
    high, low, unit = (
      jnp.stack(x) for x in zip(*(leaves[i] for i in numbers), strict=True)
    )
    count, *shape = low.shape
    high, low = (x.reshape(steps.shape) for x in (high, low))
    unit = unit.reshape(count, *[1] * (steps.ndim - 1))
    noisy = to_float(LatticeSum(high, low + steps, unit))
    out.update(zip(numbers, noisy.reshape(count, *shape), strict=True))
  return [out[i] for i in range(len(leaves))]


# One program where the caller does not use jit, and traced once for each shape.
@functools.partial(jax.jit, inline=True)
def to_float(x: LatticeSum) -> jax.Array:
  """The numbers, rounded: a function of the integers that they stand for."""
  # There is one way to write an integer with 0 <= rest < 2^14.
  dtype = x.unit.dtype
  high = (x.high + (x.low >> LIMB_BITS).astype(x.high.dtype)).astype(dtype)
  return (high * LIMB + (x.low & (LIMB - 1)).astype(dtype)) * x.unit


def add_noise(
  prng_key: jax.Array,
  tree: ArrayTree,
  stddev: Scalar | Sequence[Scalar],
  *,
  with_digest: bool = False,
) -> ArrayTree:
  """Adds independent noise to every entry of a tree.

  Floats are brought to the lattice first. The noise of an entry depends on the
  key, on the number of its leaf and on its position there, and on nothing else:
  neither on other leaves nor on the sharding nor on the device.

  ================  ===========================================================
  ``stddev=0``      what came in
  NaN, Inf          stay
  narrow types      refused: they would round the noise away
  ================  ===========================================================

  Args:
    prng_key: Typed key, used for this call and for nothing else.
    tree: Tree of float32 or float64 arrays, or of :class:`LatticeSum` in the
      unit :func:`unit_of` of the same stddev.
    stddev: Standard deviation of the noise of every entry, or one for each
      leaf, in their order. May be traced.
    with_digest: Whether the key depends on a digest of what is released, see
      :func:`prism_optax._randomness._keys.for_release`. It is noted only.

  Returns:
    The tree of noisy arrays.

  Raises:
    ValueError: For any other type, for a leaf of 2^32 entries or more, or for a
      known stddev between 0 and 1e-32.
  """
  key = _keys.key_words(prng_key)
  leaves, treedef = jax.tree.flatten(tree, is_leaf=is_sum)
  stddevs = stddev if isinstance(stddev, Sequence) else [stddev] * len(leaves)

  def on_lattice(x: jax.Array | LatticeSum, s: Scalar) -> LatticeSum:
    like = (x.low, x.unit) if isinstance(x, LatticeSum) else (x, x)
    shape, dtype = like[0].shape, like[1].dtype
    if dtype not in (jnp.float32, jnp.float64):
      raise ValueError(f'Expected float32 or float64, got {dtype}.')
    if math.prod(shape) >= 2**32:
      raise ValueError(f'Expected fewer than 2^32 entries, got {shape}.')
    if isinstance(x, LatticeSum):
      return x
    points: LatticeSum = towards_zero(x, unit_of(s, 0.0, dtype))
    return points

  def with_noise(
    out: jax.Array, x: jax.Array | LatticeSum, s: Scalar
  ) -> jax.Array:
    if isinstance(x, LatticeSum):
      return jnp.where(s > 0, out, to_float(x))
    return jnp.where((s > 0) & jnp.isfinite(x), out, x)

  what = _marks.Noise(
    tuple(map(_marks.known, stddevs)), with_digest=with_digest
  )
  for known in what.stddevs:
    if known is not None and 0 < known < _LEAST_STDDEV:
      raise ValueError(
        f'Expected stddev = 0 or stddev >= {_LEAST_STDDEV:.1e}, got {known}.'
      )
  entering = _marks.noise_enters(list(map(parts, leaves)), what)
  leaves = list(map(with_parts, leaves, entering))
  sums = list(map(on_lattice, leaves, stddevs))
  noisy = map(with_noise, _all_noisy(key, sums), leaves, stddevs)
  out = _marks.released([(x,) for x in noisy], what)
  return jax.tree.unflatten(treedef, [x for (x,) in out])
