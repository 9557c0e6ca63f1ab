"""What noise does to Z, and by how much Z has moved."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from prism_optax import _linalg, lora


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
  left: jax.Array, right: jax.Array, stddev: Any
) -> FactorNoiseEnergy:
  """What i.i.d. noise on the factors does to Z: it depends on the gauge.

  First order ``s^2 (m ||right||^2 + n ||left||^2)``, second order ``s^4 m n r``
  (PRISM, arXiv:2606.00944, Prop. 2.2, Eq. 8 and 9). Along the gauges
  ``(c left, right / c)`` the first-order part is smallest at
  ``c^4 = m ||right||^2 / (n ||left||^2)`` and has no upper bound (Cor. 2.3).

  Args:
    left: (..., m, r).
    right: (..., n, r).
    stddev: s, per entry of either factor.

  Returns:
    Both parts, in total over the entries of Z: the first of shape (...).

  Example:
    >>> import jax.numpy as jnp
    >>> from prism_optax import diagnostics
    >>> left, right = jnp.eye(3, 1), jnp.eye(2, 1)
    >>> energy = diagnostics.factor_noise_energy(left, right, 0.1)
    >>> round(float(energy.first_order), 3), round(energy.second_order, 6)
    (0.05, 0.0006)
  """
  m, rank = left.shape[-2:]
  n = right.shape[-2]
  squares = [jnp.sum(jnp.square(x), axis=(-2, -1)) for x in (left, right)]
  first = stddev**2 * (m * squares[1] + n * squares[0])
  return FactorNoiseEnergy(first, stddev**4 * m * n * rank)


def tangent_noise_energy(m: int, n: int, rank: int, stddev: Any) -> Any:
  """Expected square of isotropic tangent noise, in any gauge the same.

  ``s^2 E ||P(Xi)||_F^2 = s^2 r (m + n - r)`` (PRISM, arXiv:2606.00944,
  Theorem 3.1, Eq. 21), the square being chi-square distributed (Lemma A.23).

  Args:
    m: Output dimension.
    n: Input dimension.
    rank: r, of one module.
    stddev: s, per coordinate.

  Returns:
    In total over the entries of one module's Z.

  Example:
    >>> from prism_optax import diagnostics
    >>> diagnostics.tangent_noise_energy(3, 2, 1, 0.5)
    1.0
  """
  return stddev**2 * rank * (m + n - rank)


def change_norms(params: Any, new_params: Any, *, layout: Any = None) -> Any:
  """The norm of the change of Z for each module.

  ``||Z' - Z||_F``, without any m x n matrix, from ``L' R'^T - L R^T = [L' - L,
  L] [R', R' - R]^T`` (ours): nothing large cancels.

  Args:
    params: Tree of trainable arrays.
    new_params: The same after some steps, or with noise on its factors.
    layout: See :func:`prism_optax.lora.describe_pairs`.

  Returns:
    A dict from module names to norms: floats, or arrays ``(*stack,)``.

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
  adapters = lora.Adapters(params, layout)
  norms = [
    _change_norm(*old, *new)
    for old, new in zip(
      adapters.factors(params).pairs,
      adapters.factors(new_params).pairs,
      strict=True,
    )
  ]
  return {
    name: float(x) if np.ndim(x) == 0 else np.asarray(x)
    for name, x in adapters.by_module(norms).items()
  }


@_linalg.flat_batch
def _change_norm(old_left, old_right, new_left, new_right):
  """``||L' R'^T - L R^T||_F`` of (b, ., r) factors, shape (b,)."""
  # L' R'^T - L R^T = [L' - L, L] [R', R' - R]^T: no large terms cancel, unless
  # the gauge turns. There Grams would lose half of the digits.
  left = jnp.concatenate([new_left - old_left, old_left], -1)
  right = jnp.concatenate([new_right, new_right - old_right], -1)
  cores = [_linalg.qr(x)[1] for x in (left, right)]
  return jnp.linalg.norm(_linalg.matmul(cores[0], cores[1].mT), axis=(-2, -1))
