"""The two secrets of a private run: what is sampled and what is added.

They are independent, and come from the operating system unless a seed is
asked for: a guarantee holds against those who cannot predict the batches and
the noise, so a known seed voids it.
"""

import secrets

import jax
import numpy as np


def sampling_seed(seed: int | None) -> np.ndarray:
  """``(4,)`` uint32 for ``sampling.draw``; secret if ``seed`` is None."""
  if seed is None:
    return np.frombuffer(secrets.token_bytes(16), np.uint32).copy()
  return np.random.SeedSequence(seed, spawn_key=(0,)).generate_state(4)


def noise_key(seed: int | None) -> jax.Array:
  """A typed key for the noise; secret if ``seed`` is None."""
  if seed is None:
    words = np.frombuffer(secrets.token_bytes(16), np.uint32)
  else:
    words = np.random.SeedSequence(seed, spawn_key=(1,)).generate_state(4)
  # All 128 bits: `jax.random.key` of an integer would use 32 of them.
  return jax.random.wrap_key_data(words, impl='rbg')
