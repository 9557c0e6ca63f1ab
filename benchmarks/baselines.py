"""The optimizers that are compared, each in a few lines from optax parts.

A method says what happens to one example's gradient before it is clipped, and
gives an optax transformation of the clipped mean, which adds the noise. The
baselines see the factors as plain arrays, as their papers do.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax_privacy import noise_addition
from jax_privacy.matrix_factorization import toeplitz

import prism_optax
from prism_optax import lora


class Release(NamedTuple):
  """What a transformation of the clipped mean has to know.

  Attributes:
    clip: C.
    batch: b, the divisor.
    stddev: Of the noise on the mean, ``noise_multiplier * C / b``; may be 0.
    key: Of the noise.
    steps: Updates in all.
    epoch: Steps after which a row comes back where the order is fixed.
  """

  clip: Any
  batch: int
  stddev: Any
  key: jax.Array
  steps: int = 0
  epoch: int = 0


@dataclasses.dataclass(frozen=True)
class Method:
  """One way to train.

  Attributes:
    make: ``make(rate, release, params, layout)``, a transformation of the
      clipped mean; only shapes of ``params`` are read.
    coordinates: ``coordinates(params, release, layout)`` is applied to one
      example's gradient before the clip.
    prepare: ``prepare(params, layout)``, once before training.
    parameters: ``'lora'``, ``'matrices'`` (the kernels themselves) or
      ``'head'`` (a linear probe).
    correlated: Whether the noise is correlated over the steps, so that batches
      are drawn in a fixed order and accounted without amplification.
  """

  make: Callable[..., optax.GradientTransformation]
  coordinates: Callable[..., Callable] = lambda *_: lambda gradients: gradients
  prepare: Callable[..., Any] = lambda params, layout: params
  parameters: str = 'lora'
  correlated: bool = False


def noise(release: Release) -> optax.GradientTransformation:
  """Gaussian noise on all entries, as jax-privacy's privatizer adds it."""

  def init(params):
    del params
    return release.key

  def update(updates, key, params=None):
    del params
    key, draw = jax.random.split(key)
    normal = optax.tree.random_like(draw, updates, jax.random.normal)
    return optax.tree.add_scale(updates, release.stddev, normal), key

  return optax.GradientTransformation(init, update)


def _on_factors(make_optimizer: Callable, **fields) -> Method:
  def make(rate, release, params, layout):
    del params, layout
    return optax.chain(noise(release), make_optimizer(rate, release))

  return Method(make, **fields)


def adamw_decayed(rate, release, b1=0.9):
  """AdamW with what helped PRISM here: much decay, and a warm-up.

  The factors are decayed, not their product: in the gauge of a fresh start the
  two are alike.
  """
  del release
  return optax.chain(
    optax.adamw(rate, b1=b1, weight_decay=1.0),
    optax.scale_by_schedule(lambda count: 1 - b1 ** (count + 1)),
  )


def _scale_where(name: str, factor: float) -> optax.GradientTransformation:
  """Scales the leaves of one name."""

  def update(updates, params=None):
    del params
    return jax.tree.map_with_path(
      lambda path, x: factor * x if path[-1].key == name else x, updates
    )

  return optax.stateless(update)


def lora_plus(rate, release, ratio=6.0):
  """LoRA+ (Hayou et al. 2024, arXiv:2402.12354): B learns faster than A."""
  del release
  return optax.chain(optax.adam(rate), _scale_where('lora_b', ratio))


def ffa(rate, release):
  """FFA-LoRA (Sun et al. 2024, arXiv:2403.12313): A stays as it was."""
  del release
  return optax.chain(optax.adam(rate), _scale_where('lora_a', 0.0))


def _without_a(*_):
  """One example's gradient with none for A: no share of the norm, no signal."""
  return lambda gradients: jax.tree.map_with_path(
    lambda path, g: jnp.zeros_like(g) if path[-1].key == 'lora_a' else g,
    gradients,
  )


def adam_bc(rate, release, b1=0.9, b2=0.999, floor=1e-8):
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
      lambda v: jnp.maximum(v - release.stddev**2, floor),
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


def lora_rite(rate, release, b1=0.9, b2=0.999):
  """LoRA-RITE (Yen et al. 2024, arXiv:2410.20625, Algorithm 1).

  Each factor's gradient is freed of the magnitude of the other factor and
  preconditioned in r x r; moments turn with the basis, and the mass that
  leaves the second moment by it is added to the diagonal. The basis is the
  polar factor, damped where a factor is near zero. The head gets Adam.
  """
  del release

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


def _prism(**options) -> Method:
  def make(rate, release, params, layout):
    del params
    return prism_optax.prism(
      rate,
      l2_clip_norm=release.clip,
      noise_multiplier=release.stddev * release.batch / release.clip,
      expected_batch_size=release.batch,
      per_example_gradients=False,
      prng_key=release.key,
      layout=layout,
      **options,
    )

  def prepare(params, layout):
    return lora.canonicalize(params, layout=layout)

  def coordinates(params, release, layout):
    del release
    return prism_optax.tangent_coordinates(params, layout=layout)

  return Method(make, coordinates, prepare)


def strategy(steps: int, epoch: int) -> jax.Array:
  """Bands of the matrix of prefix sums, none longer than an epoch.

  Toeplitz, optimal for the largest error of a prefix sum (Fichtenberger et al.
  2023, arXiv:2202.11205).
  """
  coefficients = toeplitz.optimal_max_error_strategy_coefs(steps)
  return jnp.where(jnp.arange(steps) < epoch, coefficients, 0.0)


def _prism_correlated() -> Method:
  """PRISM behind jax-privacy's correlated noise, kept in fixed coordinates."""

  def make(rate, release, params, layout):
    del params
    with jax.ensure_compile_time_eval():  # Constants, also inside of a step.
      coefficients = strategy(release.steps, release.epoch)
      matrix = toeplitz.inverse_as_streaming_matrix(coefficients)
      per_step = prism_optax.correlated_noise_stddev(
        matrix, release.stddev, release.steps
      )
    return optax.chain(
      prism_optax.correlated_tangent_privatizer(
        lambda key: noise_addition.matrix_factorization_privatizer(
          matrix, stddev=release.stddev, prng_key=key
        ),
        horizon=release.steps,
        prng_key=release.key,
        layout=layout,
      ),
      prism_optax.scale_by_rank_preconditioner(
        noise_stddev=per_step, layout=layout
      ),
      prism_optax.add_decayed_factors(0.1, layout=layout),
      optax.scale_by_learning_rate(rate),
      prism_optax.retract(layout=layout),
    )

  plain = _prism()
  return dataclasses.replace(plain, make=make, correlated=True)


def _dp_muon() -> Method:
  """DP-Muon on the kernels themselves, Adam on the head's bias."""

  def groups(params):
    return jax.tree.map(
      lambda x: optax.contrib.MuonDimensionNumbers() if x.ndim == 2 else None,
      params,
    )

  def share(params, clip):
    """K groups of clip C / sqrt(K): together C, as for the others."""
    unit = prism_optax.per_matrix_clip(1.0, weight_dimension_numbers=groups)
    return clip / unit.sensitivity(params=params)

  def make(rate, release, params, layout):
    del layout
    return prism_optax.dp_muon(
      rate,
      l2_clip_norms=share(params, release.clip),
      noise_multiplier=release.stddev * release.batch / release.clip,
      expected_batch_size=release.batch,
      per_example_gradients=False,
      prng_key=release.key,
      consistent_rms=0.2,
      weight_dimension_numbers=groups,
    )

  def coordinates(params, release, layout):
    del layout
    return prism_optax.clip_each_matrix(
      share(params, release.clip), weight_dimension_numbers=groups
    )

  return Method(make, coordinates, parameters='matrices')


METHODS = {
  'prism': _prism(),
  'prism, decayed': _prism(weight_decay=1.0),
  'prism, paper mode': _prism(basis='factor'),
  'prism, muon': _prism(orthogonalize=True),
  'prism, correlated noise': _prism_correlated(),
  'dp-adamw': _on_factors(lambda rate, _: optax.adamw(rate)),
  'dp-adamw, decayed': _on_factors(adamw_decayed),
  'lora+': _on_factors(lora_plus),
  'ffa': _on_factors(ffa, coordinates=_without_a),
  'lamb': _on_factors(lambda rate, _: optax.lamb(rate)),
  'lora-rite': _on_factors(lora_rite),
  'lora-rite, spectral start': _on_factors(lora_rite),
  'dp-adambc': _on_factors(adam_bc),
  'dp-muon': _dp_muon(),
  'linear probe': _on_factors(
    lambda rate, _: optax.adamw(rate), parameters='head'
  ),
}


def prism_with(**options) -> Method:
  """PRISM with other options than its defaults."""
  return _prism(**options)
