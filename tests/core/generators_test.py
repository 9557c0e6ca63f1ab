"""Random words, against the published vectors of their generators."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prism_optax._randomness import _generators


def _words(values):
  return [jnp.uint32(x) for x in values]


def _hex(words):
  return ''.join(f'{int(x):08x}' for x in words)


def test_threefry_has_the_published_blocks():
  """Of Threefry-4x32-20 (Random123)."""
  for counter, key, block in (
    ([0] * 4, [0] * 4, '9c6ca96ae17eae66fc10ecd45256a7d8'),
    ([0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
     [0xA4093822, 0x299F31D0, 0x082EFA98, 0xEC4E6C89],
     '59cd1dbbb887957986b5d00cac8b6d84'),
  ):  # fmt: skip
    assert _hex(_generators.threefry4x32(_words(key), _words(counter))) == block


_chacha20 = jax.jit(_generators.chacha20)


def test_chacha20_has_the_block_of_rfc_8439():
  """Section 2.3.2."""
  nonce, key = bytes.fromhex('000000090000004a00000000'), bytes(range(32))
  counter, key = ([1, *np.frombuffer(nonce, '<u4')], np.frombuffer(key, '<u4'))
  assert _hex(_chacha20(_words(key), _words(counter))) == (
    'e4e7f11015593bd11fdd0f50c47120a3c7f4d1c70368c0339aaa22044e6cd4c3'
    '466482d209aa9f0705d7c214a2028bd9d19c12b5b94e16dee883d0cb4e3c50a2'
  )


@pytest.mark.parametrize('shape', [(3, 5), (4,), (), (0, 2)])
def test_every_entry_has_four_words_of_chacha20_to_itself(shape):
  key = _words(range(8))
  words = np.stack(_generators.words(key, shape, jnp.uint32(2)), -1)
  assert words.shape == (*shape, 4)
  zero = jnp.uint32(0)
  count = -(-words.size // 16)
  blocks = [
    _chacha20(key, [jnp.uint32(i), jnp.uint32(2), zero, zero])
    for i in range(count)
  ]
  # The first quarter of the entries has the first four words of each block.
  quarters = np.array(blocks, np.uint32).reshape(count, 4, 4).swapaxes(0, 1)
  np.testing.assert_array_equal(words.ravel(), quarters.ravel()[: words.size])


def test_a_part_of_an_array_has_the_words_of_its_place():
  words = functools.partial(_generators.words, _words(range(4)))
  whole, part = words((5,), jnp.uint32(2)), words((3,), jnp.uint32(2), 2)
  np.testing.assert_array_equal(np.stack(whole)[:, 2:], np.stack(part))


def test_positions_count_every_entry_once():
  positions = _generators.positions((3, 4, 5))
  np.testing.assert_array_equal(positions.ravel(), np.arange(60))
  assert _generators.positions(()).shape == ()
