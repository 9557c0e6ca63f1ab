"""The optimizers of others, as their papers have them, from optax's parts.

They see the factors as plain arrays. None of them clips; :func:`dp_adam` has
the clip too, for networks whose gradients are all held at once.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import prism_optax


def add_noise(
  stddev: jax.typing.ArrayLike, key: jax.Array
) -> optax.GradientTransformation:
  """Gaussian noise on all entries, as jax-privacy's privatizer adds it.

  ``stddev``, per coordinate of what comes in, may be traced.
  """

  def init(params):
    del params
    return jnp.copy(key)  # The state may be donated.

  def update(updates, key, params=None):
    del params
    key, draw = jax.random.split(key)
    normal = optax.tree.random_like(draw, updates, jax.random.normal)
    return optax.tree.add_scale(updates, stddev, normal), key

  return optax.GradientTransformation(init, update)


def clip_whole_gradient(
  l2_clip_norm: jax.typing.ArrayLike, expected_batch_size: float
) -> optax.GradientTransformationExtraArgs:
  """Sum of whole per-example gradients of at most this norm, over b."""
  return prism_optax.per_matrix_clip(
    l2_clip_norm,
    normalize_by=expected_batch_size,
    # All leaves in one group: as if none of them were a matrix.
    weight_dimension_numbers=lambda tree: jax.tree.map(lambda _: None, tree),
  )


def dp_adam(
  rate: optax.ScalarOrSchedule,
  *,
  l2_clip_norm: jax.typing.ArrayLike,
  noise_multiplier: jax.typing.ArrayLike,
  expected_batch_size: float,
  key: jax.Array,
  b1: jax.typing.ArrayLike = 0.9,
  b2: jax.typing.ArrayLike = 0.999,
) -> optax.GradientTransformationExtraArgs:
  """DP-Adam from per-example gradients: one clip, one noise, Adam."""
  stddev = noise_multiplier * l2_clip_norm / expected_batch_size
  return optax.chain(
    clip_whole_gradient(l2_clip_norm, expected_batch_size),
    add_noise(stddev, key),
    optax.adam(rate, b1, b2),
  )


def adamw_decayed(
  rate: optax.ScalarOrSchedule, b1: float = 0.9
) -> optax.GradientTransformation:
  """AdamW with what helped PRISM here: much decay, and a warm-up.

  The factors are decayed, not their product: in the gauge of a fresh start the
  two are alike.
  """
  return optax.chain(
    optax.adamw(rate, b1=b1, weight_decay=1.0),
    optax.scale_by_schedule(lambda count: 1 - b1 ** (count + 1)),
  )


def scale_where(name: str, factor: float) -> optax.GradientTransformation:
  """Scales the leaves of one name."""

  def update(updates, params=None):
    del params
    return jax.tree.map_with_path(
      lambda path, x: factor * x if path[-1].key == name else x, updates
    )

  return optax.stateless(update)


def lora_plus(
  rate: optax.ScalarOrSchedule, ratio: float = 6.0
) -> optax.GradientTransformation:
  """LoRA+ (Hayou et al. 2024, arXiv:2402.12354): B learns faster than A."""
  return optax.chain(optax.adam(rate), scale_where('lora_b', ratio))


def ffa(rate: optax.ScalarOrSchedule) -> optax.GradientTransformation:
  """FFA-LoRA (Sun et al. 2024, arXiv:2403.12313): A stays as it was."""
  return optax.chain(optax.adam(rate), scale_where('lora_a', 0.0))


def without_a(gradient: Any) -> Any:
  """One example's gradient with zeros for A, which FFA does not train.

  So A takes no share of the norm.
  """
  return jax.tree.map_with_path(
    lambda path, g: jnp.zeros_like(g) if path[-1].key == 'lora_a' else g,
    gradient,
  )


def adam_bc(
  rate: optax.ScalarOrSchedule,
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
      lambda m, v: -rate * m / jnp.sqrt(v),
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


def lora_rite(
  rate: optax.ScalarOrSchedule, b1: float = 0.9, b2: float = 0.999
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
    step = -rate * moment @ inverse / (1 - b1**count)
    return step, _Rite(basis, moment, square, escaped)

  adam = optax.adam(rate)

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
