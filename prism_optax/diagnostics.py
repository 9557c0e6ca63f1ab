"""Proofs about programs; measures of gauge dependence, noise, preconditioning.

A proof reads a program, no value. The measures show why DP-SGD on LoRA factors
fails and how PRISM behaves (the three issues of arXiv:2606.00944). What is
computed from raw per-example values is named ``nonprivate_*``: no guarantee
covers it, so compute it on public data, or keep it on the trusted side. The
rest reads parameters, shapes and states of optimizers, which are already
private.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from prism_optax import _per_example, _validate, fixed_rank
from prism_optax._modules import LayoutLike, ModuleTree
from prism_optax._proofs._independence import prove_independent
from prism_optax._proofs._release import prove_released

# fmt: off
__all__ = [
  'factor_noise_energy', 'nonprivate_clip_statistics', 'prove_independent',
  'prove_released', 'tangent_noise_energy',
]
# fmt: on


class ClipStatistics(NamedTuple):
  """How a clip acts on one batch. Not private.

  Attributes:
    norms: Norm of each example, shape (B,).
    clipped_fraction: Share of the examples with a norm above the clip norm.
    mean_coefficient: Mean of ``min(1, C / norm)`` over the examples.
  """

  norms: jax.Array
  clipped_fraction: jax.Array
  mean_coefficient: jax.Array


def nonprivate_clip_statistics(
  per_example_grads: optax.Updates,
  params: optax.Params,
  l2_clip_norm: float | jax.Array,
  *,
  space: str = 'tangent',
  layout: LayoutLike = None,
) -> ClipStatistics:
  """Returns how a clip acts on a batch: norms, clip fraction, coefficient.

  The norm is that of PRISM's Eq. 16 (arXiv:2606.00944) or, for its issue I,
  that of Eq. 4. Not private: the result must not leave the trusted side unless
  the data is public.

  Args:
    per_example_grads: Leaves ``(B, *shape)``, gradients of the factors.
    params: Tree of trainable arrays.
    l2_clip_norm: C, positive, in the unit of one example's gradient.
    space: ``'tangent'`` for the intrinsic norm, the same in every gauge;
      ``'factor'`` for the norm that DP-SGD on the factors takes.
    layout: See :func:`prism_optax.lora.describe_pairs`.

  Returns:
    ``norms`` (B,) of the examples, not finite where one has a NaN or Inf;
    ``clipped_fraction``, the share of the examples with a norm above the clip
    norm; ``mean_coefficient``, the mean of ``min(1, C / norm)``.

  Raises:
    ValueError: For another space, or a clip norm that is not positive.

  Example:
    >>> import jax.numpy as jnp
    >>> from prism_optax import diagnostics
    >>> params = {'lora_a': jnp.eye(3, 1), 'lora_b': 4 * jnp.eye(1, 2)}
    >>> grads = {'lora_a': jnp.zeros((2, 3, 1)),
    ...          'lora_b': jnp.array([[[0.0, 5.0]], [[0.0, 0.5]]])}
    >>> found = diagnostics.nonprivate_clip_statistics(grads, params, 2.0)
    >>> found.norms.tolist(), found.clipped_fraction.item()
    ([5.0, 0.5], 0.5)
  """
  _validate.one_of('space', space, ('tangent', 'factor'))
  _validate.positive('l2_clip_norm', l2_clip_norm)
  leaves = jax.tree.leaves(per_example_grads)
  if space == 'tangent':
    tree = ModuleTree(params, layout)
    gradients = tree.gradients(per_example_grads, 1, 'per_example_grads')
    stacks = gradients.map_pairs(
      lambda pair, frame: fixed_rank.tangent_from_gradients(frame, pair),
      tree.frames(params),
    )
    leaves = jax.tree.leaves(stacks)
  norms = jnp.sqrt(
    jax.vmap(_per_example.squared_norm, (0, None))(leaves, l2_clip_norm)
  )
  return ClipStatistics(
    norms * l2_clip_norm,
    jnp.mean(norms > 1, dtype=jnp.float32),
    jnp.mean(1 / jnp.maximum(norms, 1)),
  )


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
    Two parts, each in total over the entries of Z: ``first_order``, ``s^2 (m
    ||right||^2 + n ||left||^2)`` (Eq. 8), shape (...), and ``second_order``,
    ``s^4 m n r`` (Eq. 9), what the product of the two noises adds.

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
