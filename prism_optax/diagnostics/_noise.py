"""What noise and preconditioner do to Z, and by how much Z has moved."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from prism_optax import _linalg
from prism_optax._modules import LayoutLike, ModuleTree


class FactorNoiseEnergy(NamedTuple):
  """Expected square of what noise on the factors does to Z.

  ``E ||Z(noisy factors) - Z||_F^2`` in two parts (PRISM, arXiv:2606.00944,
  Prop. 2.2).

  Attributes:
    first_order: ``s^2 (m ||right||^2 + n ||left||^2)`` (Eq. 8).
    second_order: ``s^4 m n r`` (Eq. 9), what the product of the two noises
      adds.
  """

  first_order: jax.Array
  second_order: float


def factor_noise_energy(
  left: jax.Array, right: jax.Array, stddev: float
) -> FactorNoiseEnergy:
  """Returns what i.i.d. noise on the factors does to Z, in this gauge.

  The first order is ``s^2 (m ||right||^2 + n ||left||^2)``, the second ``s^4 m
  n r`` (PRISM, arXiv:2606.00944, Prop. 2.2, Eq. 8 and 9). Along the gauges
  ``(c left, right / c)`` the first-order part is smallest at
  ``c^4 = m ||right||^2 / (n ||left||^2)`` and has no upper bound (Cor. 2.3).

  Args:
    left: Output side, shape (..., m, r).
    right: Input side, shape (..., n, r).
    stddev: s, the noise on each entry of either factor.

  Returns:
    Both parts, in total over the entries of Z; the first has the shape (...).

  Example:
    >>> import jax.numpy as jnp
    >>> from prism_optax import diagnostics
    >>> left, right = jnp.eye(3, 1), jnp.eye(2, 1)
    >>> energy = diagnostics.factor_noise_energy(left, right, 0.1)
    >>> round(float(energy.first_order), 3), round(energy.second_order, 6)
    (0.05, 0.0006)
  """
  (m, rank), n = left.shape[-2:], right.shape[-2]
  squares = [jnp.sum(jnp.square(x), axis=(-2, -1)) for x in (left, right)]
  first = stddev**2 * (m * squares[1] + n * squares[0])
  return FactorNoiseEnergy(first, stddev**4 * m * n * rank)


def tangent_noise_energy(m: int, n: int, rank: int, stddev: float) -> float:
  """Returns the expected square of isotropic tangent noise, in every gauge.

  ``s^2 E ||P(Xi)||_F^2 = s^2 r (m + n - r)`` (PRISM, arXiv:2606.00944,
  Theorem 3.1, Eq. 21), the square being chi-square distributed (Lemma A.23).

  Args:
    m: Output dimension.
    n: Input dimension.
    rank: r, of one module.
    stddev: s, per orthonormal coordinate.

  Returns:
    The square in total over the entries of one module's Z.

  Example:
    >>> from prism_optax import diagnostics
    >>> diagnostics.tangent_noise_energy(3, 2, 1, 0.5)
    1.0
  """
  return stddev**2 * rank * (m + n - rank)


def change_norms(
  params: optax.Params,
  new_params: optax.Params,
  *,
  layout: LayoutLike = None,
) -> dict[str, float | np.ndarray]:
  """Returns the norm of the change of Z for each module.

  ``||Z' - Z||_F``, without any m x n matrix, from ``L' R'^T - L R^T = [L' - L,
  L] [R', R' - R]^T`` (ours): no large terms cancel.

  Args:
    params: Tree of trainable arrays.
    new_params: The same after some steps, or with noise on its factors.
    layout: See :func:`prism_optax.lora.describe_pairs`.

  Returns:
    Norms by module name: floats, or arrays ``(*stack,)``.

  Raises:
    ValueError: If pairs cannot be found, or the trees do not fit each other.

  Example:
    >>> import jax.numpy as jnp
    >>> from prism_optax import diagnostics
    >>> old = {'lora_a': jnp.eye(3, 1), 'lora_b': jnp.zeros((1, 2))}
    >>> new = {**old, 'lora_b': jnp.array([[3.0, 4.0]])}
    >>> diagnostics.change_norms(old, new)
    {'lora_a': 5.0}
  """
  tree = ModuleTree(params, layout)
  old, new = (tree.factors(x).pairs for x in (params, new_params))
  norms = []
  for (left, right), (new_left, new_right) in zip(old, new, strict=True):
    difference = [new_left - left, left], [new_right, new_right - right]
    norms.append(_product_norm(*(jnp.concatenate(x, -1) for x in difference)))
  return {
    name: float(x) if np.ndim(x) == 0 else np.asarray(x)
    for name, x in tree.by_module(norms).items()
  }


@_linalg.flat_batch
def _product_norm(left: jax.Array, right: jax.Array) -> jax.Array:
  """``||left right^T||_F`` of (b, ., k) factors, shape (b,)."""
  # Where the gauge turns large terms do cancel: QR keeps the digits of which
  # Gram matrices would lose half.
  core = _linalg.matmul(_linalg.qr(left)[1], _linalg.qr(right)[1].mT)
  norm: jax.Array = jnp.linalg.norm(core, axis=(-2, -1))
  return norm


class Spectra(NamedTuple):
  """Eigenvalues of one stack of modules, ascending, (k, r) each.

  Attributes:
    nu: Eigenvalues of the second moments, bias-corrected, before floor and cap.
    noise: Eigenvalues of the noise covariance that the moments have seen:
      ``s^2`` where observed.
    gain: ``1 / sqrt(max(nu, floor))``: by how much the preconditioner can
      amplify a perturbation (PRISM, issue III, Eq. 27).
  """

  nu: jax.Array
  noise: jax.Array
  gain: jax.Array


def preconditioner_spectra(
  state: optax.OptState, *, b2: float = 0.999, floor_factor: float = 1.0
) -> tuple[tuple[Spectra, Spectra], ...]:
  """Returns the spectra of a rank preconditioner for each stack: left, right.

  They show PRISM's issue III (arXiv:2606.00944, Eq. 10, 26 and 27). Only the
  state of an optimizer is read: post-processing of what is private already.

  Args:
    state: ``RankPreconditionerState`` in orthonormal coordinates, after at
      least one update.
    b2: Decay rate of the second moments, as given to the preconditioner.
    floor_factor: Factor of the floor, as given to the preconditioner.

  Returns:
    For each stack of same-shape modules the spectra of V_L and of V_R.

  Raises:
    ValueError: If the state holds no moments in orthonormal coordinates.

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> from prism_optax import scale_by_rank_preconditioner
    >>> from prism_optax import diagnostics
    >>> params = {'lora_a': jnp.eye(3, 1), 'lora_b': jnp.eye(1, 2)}
    >>> tx = scale_by_rank_preconditioner(noise_stddev=0.5)
    >>> grads = jax.tree.map(jnp.zeros_like, params)
    >>> _, state = tx.update(grads, tx.init(params), params)
    >>> left, right = diagnostics.preconditioner_spectra(state)[0]
    >>> round(left.noise.item(), 3), round(left.gain.item(), 3)  # s^2, 1 / s
    (0.25, 2.0)
  """
  pairs = getattr(state, 'pairs', None)
  if not pairs or not all(hasattr(x, 'noise') for x in pairs):
    raise ValueError(
      'Expected the state of scale_by_rank_preconditioner with'
      f' basis="orthonormal", got {type(state).__name__}.'
    )
  correction = -jnp.expm1(state.count * jnp.log(b2))

  def spectra(nu: jax.Array, noise: jax.Array) -> Spectra:
    nu, noise = (_linalg.eigh(x / correction)[0] for x in (nu, noise))
    # Where a factor has lost rank, what is not observed is zero to rounding.
    tiny = noise.shape[-1] * float(np.finfo(noise.dtype).eps) * noise[..., -1:]
    observed = jnp.maximum(jnp.sum(noise > tiny, -1, keepdims=True), 1)
    floor = floor_factor * jnp.sum(noise, -1, keepdims=True) / observed
    return Spectra(nu, noise, 1 / jnp.sqrt(jnp.maximum(nu, floor)))

  return tuple(
    (spectra(x.nu[0], x.noise[0]), spectra(x.nu[1], x.noise[1])) for x in pairs
  )
