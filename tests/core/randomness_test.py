"""Keys: fresh from the operating system, typed, never baked into a program."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prism_optax import _randomness


def test_none_asks_the_operating_system_each_time(monkeypatch):
  """Not NumPy's global generator, whose state a program may have fixed."""
  np.random.seed(0)  # noqa: NPY002
  first = _randomness.resolve_key('prng_key', None, {})
  np.random.seed(0)  # noqa: NPY002
  second = _randomness.resolve_key('prng_key', None, {})
  assert (jax.random.key_data(first) != jax.random.key_data(second)).any()
  monkeypatch.setattr(_randomness.os, 'urandom', lambda n: bytes(range(n)))
  key = _randomness.resolve_key('prng_key', None, {})
  assert jax.random.key_data(key).tobytes() == bytes(range(8))


def test_integers_give_the_same_key_whatever_the_default_generator():
  with jax.default_prng_impl('rbg'):
    key = _randomness.resolve_key('prng_key', 7, {})
  assert jax.random.key_impl(key) == 'threefry2x32'
  np.testing.assert_array_equal(
    jax.random.key_data(key), jax.random.key_data(jax.random.key(7))
  )


def test_given_keys_are_copied():
  """The state may be donated; the caller's key must live on."""
  key = jax.random.key(1)
  copy = _randomness.resolve_key('prng_key', key, {})
  jax.jit(lambda k: jax.random.split(k)[0], donate_argnums=0)(copy)
  assert jax.random.key_data(key).shape == (2,)


def test_tracing_with_a_fresh_seed_is_refused():
  def init(x):
    return _randomness.resolve_key('prng_key', None, {'x': x})

  with pytest.raises(ValueError, match='prng_key=None.*outside of jit'):
    jax.jit(init)(jnp.ones(2))


@pytest.mark.parametrize(
  'bad', [jax.random.PRNGKey(0), 1.5, 'seed', True, np.zeros(2, np.uint32)]
)
def test_what_is_no_key_is_refused(bad):
  with pytest.raises(ValueError, match='Expected prng_key'):
    _randomness.check_key('prng_key', bad)


def test_several_keys_are_refused():
  with pytest.raises(ValueError, match='one key'):
    _randomness.check_key('prng_key', jax.random.split(jax.random.key(0)))
