"""Random words that are functions of a key and of a counter.

Both generators are made of additions, rotations and exclusive ors of 32-bit
words. They give the same bits on every platform and under any sharding. The
length of the key says which one is meant: four words are Threefry's, eight are
ChaCha20's.
"""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

# Rotations of the even and of the odd rounds, in turn.
_ROTATIONS = (
  (10, 26), (11, 21), (13, 27), (23, 5), (6, 20), (17, 11), (25, 10), (18, 20),
)  # fmt: skip
_PARITY = 0x1BD11BDA


# The rounds use operations of `lax`, because an operator takes several times as
# long to trace, and there are hundreds.


def _rotated(x: jax.Array, distance: int) -> jax.Array:
  return jax.lax.bitwise_or(
    jax.lax.shift_left(x, np.uint32(distance)),
    jax.lax.shift_right_logical(x, np.uint32(32 - distance)),
  )


def _of_one_shape(words: Sequence[jax.Array]) -> list[jax.Array]:
  shape = jnp.broadcast_shapes(*map(jnp.shape, words))
  return [jnp.broadcast_to(jnp.asarray(x, jnp.uint32), shape) for x in words]


def threefry4x32(
  key: Sequence[jax.Array], counter: Sequence[jax.Array]
) -> list[jax.Array]:
  """The block of a counter under Threefry-4x32 with 20 rounds.

  Salmon et al. 2011, Parallel random numbers: as easy as 1, 2, 3. All arrays
  hold unsigned 32-bit integers and broadcast. The rounds are unrolled in
  Python, so that XLA fuses them into the consumer.

  Args:
    key: Four words.
    counter: Four words.

  Returns:
    Four words.
  """

  def mixed(
    x: jax.Array, y: jax.Array, distance: int
  ) -> tuple[jax.Array, jax.Array]:
    x = jax.lax.add(x, y)
    return x, jax.lax.bitwise_xor(x, _rotated(y, distance))

  last = key[0] ^ key[1] ^ key[2] ^ key[3] ^ jnp.uint32(_PARITY)
  words = _of_one_shape([*counter, *key, last])
  start, schedule = words[:4], words[4:]
  a, b, c, d = map(jax.lax.add, start, schedule[:4])
  for i in range(20):
    first, second = _ROTATIONS[i % 8]
    a, b = mixed(a, b, first)
    c, d = mixed(c, d, second)
    b, d = d, b  # The next round pairs the words crosswise.
    if i % 4 == 3:
      injection = i // 4 + 1
      a, b, c, d = (
        jax.lax.add(x, schedule[(injection + j) % 5])
        for j, x in enumerate((a, b, c, d))
      )
      d = jax.lax.add(d, np.uint32(injection))
  return [a, b, c, d]


def positions(shape: tuple[int, ...]) -> jax.Array:
  """The index of each entry in row-major order, in an array of that shape."""
  strides = np.cumprod((1, *shape[:0:-1]), dtype=np.int64)[::-1]
  total = jnp.zeros(shape, jnp.uint32)
  for axis, stride in enumerate(strides[: len(shape)]):
    iota = jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
    total += jnp.uint32(stride) * iota
  return total


# "expand 32-byte k"
_CONSTANTS = (0x61707865, 0x3320646E, 0x79622D32, 0x6B206574)


def chacha20(
  key: Sequence[jax.Array], counter: Sequence[jax.Array]
) -> list[jax.Array]:
  """The block of a counter under ChaCha20 (RFC 8439, section 2.3).

  Args:
    key: Eight words, unsigned 32-bit integers.
    counter: The block counter and three words of a nonce. They broadcast.

  Returns:
    Sixteen words of the broadcast shape.
  """
  start = _of_one_shape([*map(jnp.uint32, _CONSTANTS), *key, *counter])

  def double_round(_: int, state: list[jax.Array]) -> list[jax.Array]:
    state = list(state)
    for turn in (0, 1):  # Columns, then diagonals.
      for i in range(4):
        a, b, c, d = (4 * row + (i + turn * row) % 4 for row in range(4))
        for x, y, z, distance in (
          (a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7),
        ):  # fmt: skip
          state[x] = jax.lax.add(state[x], state[y])
          met = jax.lax.bitwise_xor(state[z], state[x])
          state[z] = _rotated(met, distance)
    return state

  # A loop: unrolled, the twenty rounds compile for minutes.
  end = jax.lax.fori_loop(0, 10, double_round, start)
  return [x + y for x, y in zip(start, end, strict=True)]


def words(
  key: Sequence[jax.Array],
  shape: tuple[int, ...],
  leaf: jax.Array,
  first: jax.typing.ArrayLike = 0,
) -> list[jax.Array]:
  """Four words for each entry of arrays, by its position in its array.

  Args:
    key: Four words (Threefry) or eight (ChaCha20).
    shape: Of each array, fewer than 2^32 entries.
    leaf: Number of each array among those that use the key, in any shape.
    first: Positions of the first entries, for Threefry: parts of arrays.

  Returns:
    Four arrays, unsigned 32-bit integers: the axes of ``leaf``, then those of
    ``shape``.
  """
  zero = jnp.uint32(0)
  if len(key) == 4:
    leaf, first = (
      jnp.uint32(x).reshape(*jnp.shape(x), *[1] * len(shape))
      for x in (leaf, first)
    )
    position = positions(shape) + first
    return threefry4x32(key, [position, leaf, zero, zero])
  size = math.prod(shape)
  # A block serves one entry of each quarter of the array: no word is moved.
  blocks = jnp.arange(-(-size // 4), dtype=jnp.uint32)
  block = chacha20(key, [blocks, leaf[..., None], zero, zero])
  return [
    jnp.concatenate(block[i::4], -1)[..., :size].reshape(*leaf.shape, *shape)
    for i in range(4)
  ]
