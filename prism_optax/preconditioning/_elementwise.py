"""Adam with the known-noise floor, for leaves that are no LoRA factors."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class ElementwiseMoments(NamedTuple):
  """Adam's moments of one leaf, and the noise variance that ``nu`` has seen.

  Attributes:
    mu: First moment, the leaf's shape.
    nu: Second moment, the leaf's shape.
    noise: Scalar, with the same decay as ``nu``.
  """

  mu: jax.Array
  nu: jax.Array
  noise: jax.Array


def init_moments(leaf: jax.Array) -> ElementwiseMoments:
  # Each in an array of its own: a state may be donated, and no buffer twice.
  return ElementwiseMoments(
    jnp.zeros_like(leaf), jnp.zeros_like(leaf), jnp.zeros((), leaf.dtype)
  )


def accumulate(
  moments: ElementwiseMoments, gradient: jax.Array, b1, b2, variance
) -> ElementwiseMoments:
  return ElementwiseMoments(
    b1 * moments.mu + (1 - b1) * gradient,
    b2 * moments.nu + (1 - b2) * jnp.square(gradient),
    b2 * moments.noise + (1 - b2) * variance,
  )


def direction(
  moments: ElementwiseMoments,
  *,
  mu_correction,
  nu_correction,
  eps,
  floor_factor,
  debias: bool,
) -> jax.Array:
  """``mu / (sqrt(max(nu, floor)) + eps)``, zero where nothing was ever seen."""
  noise = moments.noise / nu_correction
  nu = moments.nu / nu_correction - (noise if debias else 0)
  root = jnp.sqrt(jnp.maximum(jnp.maximum(nu, floor_factor * noise), 0)) + eps
  mu = moments.mu / mu_correction
  return jnp.where(root > 0, mu / jnp.where(root > 0, root, 1), 0)
