"""Directions of other optimizers, as their papers have them.

They see the factors as plain arrays, after clip and noise. A learning rate
follows.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax


def scale_where(name: str, factor: float) -> optax.GradientTransformation:
  """Scales the leaves of one name."""

  def update(updates, params=None):
    del params
    return jax.tree.map_with_path(
      lambda path, x: factor * x if path[-1].key == name else x, updates
    )

  return optax.stateless(update)


def scale_by_bc(
  stddev: jax.typing.ArrayLike,
  b1: float = 0.9,
  b2: float = 0.999,
  floor: float = 1e-8,
) -> optax.GradientTransformation:
  """DP-AdamBC (Tang et al. 2023, arXiv:2312.14334).

  The known variance of the noise is taken out of Adam's second moment; what is
  left is at least ``floor``.
  """

  def init(params):
    zeros = optax.tree.zeros_like(params)
    return zeros, zeros, jnp.zeros((), jnp.int32)

  def update(updates, state, params=None):
    del params
    mu, nu, count = state
    count = count + 1
    mu = optax.tree.update_moment(updates, mu, b1, 1)
    nu = optax.tree.update_moment(updates, nu, b2, 2)
    signal = jax.tree.map(
      lambda v: jnp.maximum(v - stddev**2, floor),
      optax.tree.bias_correction(nu, b2, count),
    )
    out = jax.tree.map(
      lambda m, v: m / jnp.sqrt(v),
      optax.tree.bias_correction(mu, b1, count),
      signal,
    )
    return out, (mu, nu, count)

  return optax.GradientTransformation(init, update)


class _Rite(NamedTuple):
  """Moments of one factor, in the basis of the other one."""

  basis: jax.Array
  moment: jax.Array
  square: jax.Array
  escaped: jax.Array


def _power(gram: jax.Array, power: float, damping: float) -> jax.Array:
  """A power of a positive semidefinite matrix, its eigenvalues damped."""
  values, vectors = jnp.linalg.eigh(gram)
  return (vectors * (jnp.maximum(values, 0) + damping) ** power) @ vectors.T


def scale_by_rite(
  b1: jax.typing.ArrayLike = 0.9, b2: float = 0.999
) -> optax.GradientTransformation:
  """LoRA-RITE (Yen et al. 2024, arXiv:2410.20625, Algorithm 1).

  Each factor's gradient is freed of the magnitude of the other factor and
  preconditioned in r x r; moments turn with the basis, and the mass that
  leaves the second moment by it is added to the diagonal. The basis is the
  polar factor, damped where a factor is near zero. The head gets Adam.
  """

  def start(factor, other):
    square = jnp.zeros((factor.shape[1],) * 2)
    return _Rite(
      jnp.zeros_like(other), jnp.zeros_like(factor), square, jnp.zeros(())
    )

  def one(state, gradient, other, count):
    inverse = _power(other.T @ other, -0.5, 1e-6)
    basis = other @ inverse
    turn = basis.T @ state.basis
    plain = gradient @ inverse
    kept = turn @ state.square @ turn.T
    lost = jnp.max(
      jnp.linalg.eigvalsh(state.square) - jnp.linalg.eigvalsh(kept)
    )
    escaped = b2 * (state.escaped + jnp.maximum(lost, 0))
    square = b2 * kept + (1 - b2) * plain.T @ plain / len(gradient)
    corrected = (square + escaped * jnp.eye(len(square))) / (1 - b2**count)
    scaled = plain @ _power(corrected, -0.5, 1e-16)
    moment = b1 * state.moment @ turn.T + (1 - b1) * scaled
    step = moment @ inverse / (1 - b1**count)
    return step, _Rite(basis, moment, square, escaped)

  adam = optax.scale_by_adam(b1=b1, b2=b2)

  def others(tree):
    return {name: x for name, x in tree.items() if name != 'layers'}

  def sides(tree):
    """[(A, B^T), ...] of all modules."""
    return [
      (pair['lora_a'], pair['lora_b'].T)
      for layer in tree['layers']
      for _, pair in sorted(layer.items())
    ]

  def init(params):
    pairs = [(start(a, b), start(b, a)) for a, b in sides(params)]
    return pairs, adam.init(others(params)), jnp.zeros((), jnp.int32)

  def update(updates, state, params):
    pairs, head, count = state
    count = count + 1
    steps = [
      (one(of_a, grad_a, b, count), one(of_b, grad_b, a, count))
      for (of_a, of_b), (grad_a, grad_b), (a, b) in zip(
        pairs, sides(updates), sides(params), strict=True
      )
    ]
    pairs = [(of_a, of_b) for (_, of_a), (_, of_b) in steps]
    turn = iter([{'lora_a': a, 'lora_b': b.T} for (a, _), (b, _) in steps])
    layers = [
      {name: next(turn) for name in sorted(layer)}
      for layer in updates['layers']
    ]
    step, head = adam.update(others(updates), head)
    return {'layers': layers, **step}, (pairs, head, count)

  return optax.GradientTransformation(init, update)
