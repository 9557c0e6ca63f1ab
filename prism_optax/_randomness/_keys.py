"""Keys: fresh from the operating system, or given.

A key is a secret of the mechanism: whoever has it can subtract the noise. So
keys of noise have 128 bits: one of 64 could be found by trying, and so could an
integer of which 32 bits are kept. A key of 256 bits, two typed keys of 128, is
one of ChaCha20.
"""

import math
import numbers
import os
from typing import NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.extend import core
from jax.interpreters import mlir

from prism_optax import _validate
from prism_optax._randomness import _generators
from prism_optax._types import ArrayTree, PRNGKeyLike

# Named, whatever `jax_default_prng_impl` says. 'rbg' holds four words, and
# splits and folds them by Threefry; its own generator of bits is not used here.
CHACHA20 = 'chacha20'
_IMPLEMENTATIONS = {2: 'threefry2x32', 4: 'rbg'}


def check_key(name: str, prng_key: PRNGKeyLike, *, words: int = 2) -> None:
  """Raises ``ValueError`` unless the key is None, an int or one typed key.

  Args:
    name: Name of the argument, for the error message.
    prng_key: What was given; for noise also ``'chacha20'``.
    words: Number of 32-bit words that an integer must fit in.
  """
  if prng_key is None:
    return
  if isinstance(prng_key, str) and words == 4:
    _validate.one_of(name, prng_key, (CHACHA20,))
    return
  if isinstance(prng_key, numbers.Integral) and not isinstance(prng_key, bool):
    if not 0 <= prng_key < 1 << 32 * words:
      raise ValueError(
        f'Expected 0 <= {name} < 2^{32 * words}, because other integers would'
        f' lose bits, got {prng_key}.'
      )
    return
  dtype = getattr(prng_key, 'dtype', None)
  if dtype is None or not jnp.issubdtype(dtype, jax.dtypes.prng_key):
    raise ValueError(
      f'Expected {name} to be None, an int or a typed key (jax.random.key), got'
      f' {type(prng_key).__name__} of dtype {dtype}.'
    )
  if shape := getattr(prng_key, 'shape', ()):
    raise ValueError(f'Expected {name} to be one key, got prng_key.{shape=}.')


def is_given(prng_key: PRNGKeyLike) -> bool:
  """Whether somebody outside knows the key."""
  return prng_key is not None and not isinstance(prng_key, str)


def _no_seed(
  *_: object, name: str, prng_key: PRNGKeyLike, **__: object
) -> NoReturn:
  raise ValueError(
    f'{name}={prng_key!r} takes a fresh seed from the operating system and'
    ' cannot be used under jit: the seed would become a constant of the'
    f' compiled program. Call `init` outside of jit, or pass {name}.'
  )


# In the place of a fresh seed while JAX is tracing: it has a shape, for those
# who want to know what a state will look like, and no value.
_fresh_p = core.Primitive('fresh_seed')
_fresh_p.def_impl(_no_seed)
_fresh_p.def_abstract_eval(
  lambda *, shape, **_: jax.core.ShapedArray(shape, jnp.uint32)
)
mlir.register_lowering(_fresh_p, _no_seed)


def resolve_key(
  name: str, prng_key: PRNGKeyLike, params: ArrayTree, *, words: int = 2
) -> jax.Array:
  """Makes a typed key in its own memory. Every ``init`` calls this.

  None reads the operating system's entropy source at each call, and so does
  ``'chacha20'``. Where several processes train together, all must call this,
  and all get the bits of the first one: noise that differed between the copies
  of one release would make several releases of it.

  Args:
    name: Name of the argument, for the error message.
    prng_key: None, ``'chacha20'``, a seed or a typed key, which is copied.
    params: What ``init`` was called with; it shows whether JAX is tracing.
    words: Number of 32-bit words of a new key: 4 for noise, which hides
      something; 2 for starting values and probes.

  Returns:
    A typed key of shape (); of shape (2,) for ChaCha20.

  Raises:
    ValueError: If a fresh key is asked for in a program that is compiled. It
      would contain one seed and draw the same noise whenever it runs
      (``jax.eval_shape`` runs nothing and gets the shape of a key). Also for
      an integer that does not fit in the words.
  """
  check_key(name, prng_key, words=words)
  data: np.ndarray | list[jax.Array]
  if prng_key is None or isinstance(prng_key, str):
    shape = (2, words) if prng_key == CHACHA20 else (words,)
    if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(params)):
      traced = _fresh_p.bind(shape=shape, name=name, prng_key=prng_key)
      return jax.random.wrap_key_data(traced, impl=_IMPLEMENTATIONS[words])
    fresh = os.urandom(4 * math.prod(shape))
    data = np.frombuffer(fresh, np.uint32).reshape(shape)
    if jax.process_count() > 1:
      data = np.asarray(multihost_utils.broadcast_one_to_all(data))
  elif isinstance(prng_key, numbers.Integral):
    # The most significant word first, as `jax.random.key` has them.
    data = np.frombuffer(int(prng_key).to_bytes(4 * words, 'big'), '>u4')
  elif words == 2:
    return jnp.copy(prng_key)  # The state may be donated, the caller's key not.
  else:
    data = key_words(prng_key)
  return jax.random.wrap_key_data(
    jnp.array(data, jnp.uint32), impl=_IMPLEMENTATIONS[words]
  )


def split(prng_key: jax.Array) -> tuple[jax.Array, jax.Array]:
  """The next key of a state, and one for what is drawn now."""
  if not prng_key.shape:
    next_key, key = jax.random.split(prng_key)
    return next_key, key
  # One block under the old key, which cannot be found from the next one. No
  # noise is drawn under a key of a state.
  zero = jnp.zeros((), jnp.uint32)
  block = jnp.stack(_generators.chacha20(key_words(prng_key), [zero] * 4))
  keys = jax.random.wrap_key_data(
    block.reshape(2, 2, 4), impl=_IMPLEMENTATIONS[4]
  )
  return keys[0], keys[1]


def for_release(
  prng_key: jax.Array, digest: jax.typing.ArrayLike | None
) -> jax.Array:
  """The key of one release: a function of the key and of what is released.

  A key that is kept (restored, copied, given again) may meet other data or
  another program. With a digest of them the noise is then another one, and the
  same one where all is the same.

  Args:
    prng_key: A key of four words, or the two of ChaCha20, from which nothing
      else is drawn.
    digest: None, which leaves the key as it is, or (8,) uint32, public or not.

  Returns:
    A key of the same kind.

  Raises:
    ValueError: For a digest of another shape or type.
  """
  if digest is None:
    return prng_key
  words = jnp.asarray(digest)
  if words.shape != (8,) or words.dtype != jnp.uint32:
    raise ValueError(
      'Expected release_digest to be None or (8,) uint32, got'
      f' {words.shape} {words.dtype}.'
    )
  if not prng_key.shape:
    # A loop, because XLA compiles a program of its own for each fold.
    return jax.lax.fori_loop(
      0, 8, lambda i, key: jax.random.fold_in(key, words[i]), prng_key
    )
  key = key_words(prng_key)
  for half in (words[:4], words[4:]):  # Four words are one counter.
    key = _generators.chacha20(key, list(half))[:8]
  return jax.random.wrap_key_data(
    jnp.stack(key).reshape(2, 4), impl=_IMPLEMENTATIONS[4]
  )


def key_words(prng_key: jax.typing.ArrayLike) -> list[jax.Array]:
  """The words of a key: four, or the eight of ChaCha20.

  Those of a key of two words come last, after zeros: a seed is the same key
  whether it came as an integer or as ``jax.random.key(seed)``.
  """
  data = jax.random.key_data(prng_key).astype(jnp.uint32).ravel()
  missing = jnp.zeros(max(4 - data.size, 0), jnp.uint32)
  return list(jnp.concatenate([missing, data]))
