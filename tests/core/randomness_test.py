"""Keys: fresh from the operating system, typed, never baked into a program."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import multihost_utils

from prism_optax._randomness import _generators, _keys


@pytest.mark.parametrize(
  ('prng_key', 'words', 'size'),
  [(None, 2, 8), (None, 4, 16), ('chacha20', 4, 32)],
)
def test_a_fresh_key_asks_the_operating_system_each_time(
  prng_key, words, size, monkeypatch
):
  """Not NumPy's global generator, whose state a program may have fixed."""

  def fresh():
    np.random.seed(0)  # noqa: NPY002
    key = _keys.resolve_key('prng_key', prng_key, {}, words=words)
    return np.ravel(jax.random.key_data(key)).tobytes()

  assert fresh() != fresh()
  monkeypatch.setattr(_keys.os, 'urandom', lambda n: bytes(range(n)))
  assert fresh() == bytes(range(size))
  # Of several processes all take the bits of the first.
  monkeypatch.setattr(jax, 'process_count', lambda: 2)
  monkeypatch.setattr(multihost_utils, 'broadcast_one_to_all', np.invert)
  assert fresh() == bytes(255 - i for i in range(size))


@pytest.mark.parametrize('seed', [0, 5, 2**40 + 5, 2**63, 2**128 - 1])
def test_no_bit_of_an_integer_is_lost(seed):
  """Also with x64 off, where `jax.random.key` keeps the low 32 bits."""
  key = _keys.resolve_key('prng_key', seed, {}, words=4)
  words = [int(x) for x in _keys.key_words(key)]
  assert sum(x << 32 * i for i, x in enumerate(reversed(words))) == seed


@pytest.mark.parametrize('words', [2, 4])
def test_a_seed_is_one_key_however_it_comes(words):
  """Whatever the default generator."""
  for seed in (7, np.int64(7), jax.random.key(7, impl='threefry2x32')):
    with jax.default_prng_impl('rbg'):
      key = _keys.resolve_key('prng_key', seed, {}, words=words)
    assert jax.random.key_data(key).tolist() == [0] * (words - 1) + [7]


def test_given_keys_are_copied():
  """The state may be donated; the caller's key must live on."""
  key = jax.random.key(1)
  copy = _keys.resolve_key('prng_key', key, {})
  jax.jit(lambda k: jax.random.split(k)[0], donate_argnums=0)(copy)
  assert jax.random.key_data(key).shape == (2,)


@pytest.mark.parametrize('prng_key', [None, 'chacha20'])
def test_the_shape_of_a_fresh_key_needs_no_seed(prng_key, monkeypatch):
  """As a checkpoint wants it; nothing is drawn, so nothing is repeated."""

  def init(x):
    return _keys.resolve_key('prng_key', prng_key, x, words=4)

  real = init(np.ones(2))
  monkeypatch.delattr('os.urandom')
  shape = jax.eval_shape(init, jnp.ones(2))
  assert (shape.shape, shape.dtype) == (real.shape, real.dtype)


def test_each_step_of_chacha20_forgets_the_key_before():
  """One block makes the next key and the one of the noise, and nothing else."""
  words = np.arange(8, dtype=np.uint32)
  key = jax.random.wrap_key_data(words.reshape(2, 4), impl='rbg')
  next_key, drawn = jax.jit(_keys.split)(key)
  block = _generators.chacha20(list(jnp.uint32(words)), [jnp.uint32(0)] * 4)
  got = [*_keys.key_words(next_key), *_keys.key_words(drawn)]
  np.testing.assert_array_equal(got, block)
  assert drawn.shape == (2,)


@pytest.mark.parametrize(
  ('bad', 'words', 'message'),
  [
    *((x, 4, f"prng_key='{x}'") for x in ('chacha', 'ChaCha20', 'threefry')),
    (-1, 4, r'prng_key < 2.128.*-1'), (2**128, 4, r'prng_key < 2.128'),
    (2**64, 2, r'prng_key < 2.64'), (-5, 2, r'prng_key < 2.64.*-5'),
    *(
      (x, 2, 'Expected prng_key')
      for x in (jax.random.PRNGKey(0), 1.5, 'seed', True, np.zeros(2, 'uint32'))
    ),
    (jax.random.split(jax.random.key(0)), 2, 'one key'),
  ],
)  # fmt: skip
def test_what_is_no_key_is_refused(bad, words, message):
  options = {} if words == 2 else {'words': words}
  with pytest.raises(ValueError, match=message):
    _keys.check_key('prng_key', bad, **options)


# A digest of what is released.

DIGEST, OTHER = (np.arange(8, dtype=np.uint32) + i for i in (0, 1))


@pytest.mark.parametrize('prng_key', [7, 'chacha20'])
def test_without_a_digest_a_key_is_what_it_was(prng_key):
  key = _keys.resolve_key('prng_key', prng_key, (), words=4)
  assert _keys.for_release(key, None) is key
  one, other = (_keys.for_release(key, x) for x in (DIGEST, OTHER))
  assert one.shape == key.shape
  words = [np.asarray(jax.random.key_data(x)).ravel() for x in (one, other)]
  # No word of one is that of another: 16 of 2^32 would coincide by chance with
  # a probability of 3e-8.
  assert len(set(np.concatenate(words).tolist())) == 2 * words[0].size


def test_every_word_of_a_digest_counts():
  digests = np.stack([DIGEST] * 9)
  digests[np.arange(8), np.arange(8)] ^= 1 << 31
  for key in (
    _keys.resolve_key('prng_key', k, (), words=4) for k in (7, 'chacha20')
  ):
    *others, one = jax.jit(
      jax.vmap(
        lambda x, key=key: jax.random.key_data(_keys.for_release(key, x))
      )
    )(digests)
    for other in others:
      assert (one != other).all()


@pytest.mark.parametrize('digest', [DIGEST[:4], DIGEST.astype(np.int32), 5])
def test_a_digest_of_another_form_is_refused(digest):
  key = _keys.resolve_key('prng_key', 7, (), words=4)
  with pytest.raises(ValueError, match=r'release_digest to be None or \(8,\)'):
    _keys.for_release(key, digest)
