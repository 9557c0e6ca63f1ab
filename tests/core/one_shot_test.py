"""Symmetric matrices as vectors, whose noise has a known edge."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prism_optax.contrib import _one_shot_release


def test_the_vector_of_a_matrix_keeps_its_length():
  x = np.float32(np.random.default_rng(0).normal(size=(5, 5)))
  x = x + x.T
  vector = np.float64(_one_shot_release.to_vector(jnp.asarray(x)))
  assert np.linalg.norm(vector) == pytest.approx(np.linalg.norm(x), rel=1e-6)
  back, _ = _one_shot_release.to_square(vector)
  np.testing.assert_allclose(back, x, rtol=1e-6)


def test_rows_of_float64_are_float32_with_x64_too():
  with jax.enable_x64(True):
    assert _one_shot_release.as_rows('x', np.ones(3)).dtype == np.float32


def test_without_noise_a_sum_is_on_a_fine_lattice():
  """Of a record of length one, in steps of 2^-28."""
  batch = {'x': jnp.float32([[2**-28, 1.5 * 2**-28]])}
  released = _one_shot_release.release(
    [batch], lambda x: x, noise_multiplier=0.0, dataset_size=1, prng_key=0,
    purpose=0,
  )  # fmt: skip
  np.testing.assert_array_equal(released.arrays['x'], [2**-28, 2**-28])


def test_the_edge_is_the_largest_eigenvalue_of_noise():
  noise = np.random.default_rng(1).normal(size=200 * 201 // 2)
  square, edge = _one_shot_release.to_square(noise)
  largest = np.abs(np.linalg.eigvalsh(square)).max()
  # It spreads by n^(-2/3) of its size, 3 % (Tracy and Widom).
  assert largest == pytest.approx(edge, rel=0.1)
