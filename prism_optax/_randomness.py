"""Where noise keys come from.

The key is a secret of the mechanism: whoever has it can subtract the noise.
"""

import numbers
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

# Pinned: its draws are the same on every platform and under any sharding,
# whatever `jax_default_prng_impl` says.
_IMPLEMENTATION = 'threefry2x32'


def check_key(name: str, prng_key: Any) -> None:
  """Raises ``ValueError`` unless None, a Python int or one typed key."""
  if prng_key is None or (
    isinstance(prng_key, numbers.Integral) and not isinstance(prng_key, bool)
  ):
    return
  dtype = getattr(prng_key, 'dtype', None)
  if dtype is None or not jnp.issubdtype(dtype, jax.dtypes.prng_key):
    raise ValueError(
      f'Expected {name} to be None, an int or a typed key (jax.random.key), got'
      f' {type(prng_key).__name__} of dtype {dtype}.'
    )
  if prng_key.shape:
    raise ValueError(f'Expected {name} to be one key, got {prng_key.shape=}.')


def resolve_key(name: str, prng_key: Any, params: Any) -> jax.Array:
  """A typed key of its own memory: given, from an int, or from the system.

  Called by ``init``. None reads 64 bits from the operating system's entropy
  source, each time; those of the first process where several train together,
  who must all call it: noise that differs between copies of one release would
  be several releases.

  Raises:
    ValueError: If ``prng_key`` is None while tracing: the compiled program
      would hold one seed for ever, and draw the same noise whenever it runs.
  """
  if prng_key is None:
    if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(params)):
      raise ValueError(
        f'{name}=None takes a fresh seed from the operating system and cannot'
        ' be used while tracing (jit, eval_shape): the seed would become a'
        ' constant of the compiled program. Call `init` outside of jit, or pass'
        f' {name}.'
      )
    words = np.frombuffer(os.urandom(8), np.uint32)
    if jax.process_count() > 1:
      words = np.asarray(multihost_utils.broadcast_one_to_all(words))
    return jax.random.wrap_key_data(jnp.array(words), impl=_IMPLEMENTATION)
  if isinstance(prng_key, numbers.Integral):
    return jax.random.key(int(prng_key), impl=_IMPLEMENTATION)
  return jnp.copy(prng_key)  # The state may be donated, the caller's key not.
