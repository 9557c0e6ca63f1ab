"""Measures of gauge dependence, noise and preconditioning.

They tell why DP-SGD on LoRA factors fails and how PRISM behaves (the three
issues of arXiv:2606.00944). What is computed from raw per-example values is
named ``nonprivate_*``: it is not covered by any guarantee, so compute it on
public data, or do not let it out. The rest reads parameters, shapes and states
of optimizers, which are already private.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from prism_optax import _linalg, _per_example, _validate, lora


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


class ClipStatistics(NamedTuple):
  """How a clip acts on one batch. Not private.

  Attributes:
    norms: Of each example, (B,).
    clipped_fraction: Share of the examples with a norm above the clip norm.
    mean_coefficient: Mean of ``min(1, C / norm)``.
  """

  norms: jax.Array
  clipped_fraction: jax.Array
  mean_coefficient: jax.Array


def nonprivate_clip_statistics(
  per_example_grads: Any,
  params: Any,
  l2_clip_norm: Any,
  *,
  space: str = 'tangent',
  layout: Any = None,
) -> ClipStatistics:
  """How a clip acts on a batch: norms, clip fraction, mean coefficient.

  The norm of PRISM's Eq. 16 (arXiv:2606.00944) or, for its issue I, that of
  Eq. 4. Not private: for public data, or for nobody's eyes.

  Args:
    per_example_grads: Leaves ``(B, *shape)``, gradients of the factors.
    params: Tree of trainable arrays.
    l2_clip_norm: C, in the unit of one example's gradient.
    space: ``'tangent'`` for the intrinsic norm, the same in every gauge;
      ``'factor'`` for the norm that DP-SGD on the factors takes.
    layout: See :func:`prism_optax.lora.describe_pairs`.

  Returns:
    The statistics. Examples with a NaN or Inf have norms that are not finite.

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
    adapters = lora.Adapters(params, layout)
    gradients = adapters.gradients(per_example_grads, 1, 'per_example_grads')
    blocks = lora.to_coordinates(adapters.frames(params), gradients)
    leaves = jax.tree.leaves(blocks)
  norms = jnp.sqrt(_per_example.squared_norms(leaves, l2_clip_norm))
  return ClipStatistics(
    norms * l2_clip_norm,
    jnp.mean(norms > 1, dtype=jnp.float32),
    jnp.mean(1 / jnp.maximum(norms, 1)),
  )


def nonprivate_signal_to_noise(
  coordinates: Any, params: Any, stddev: Any, *, layout: Any = None
) -> jax.Array:
  """Norm of a clipped mean over the root mean square norm of its noise.

  ``||X|| / (s sqrt(d))``, d the dimension of the tangent space and of the other
  leaves: ``sum r (m + n - r)`` by PRISM's Theorem 3.1 (arXiv:2606.00944), full
  rank assumed. Not private: it reads the mean before the noise.

  Args:
    coordinates: The clipped mean before noise, tangent coordinates.
    params: Tree of trainable arrays.
    stddev: s, per coordinate, in the unit of ``coordinates``.
    layout: See :func:`prism_optax.lora.describe_pairs`.

  Returns:
    The ratio, shape (); ``inf`` or NaN for s = 0.

  Raises:
    ValueError: If pairs cannot be found, or the trees do not fit each other.

  Example:
    >>> import jax.numpy as jnp
    >>> from prism_optax import diagnostics
    >>> params = {'lora_a': jnp.eye(3, 1), 'lora_b': jnp.eye(1, 2)}
    >>> mean = {'lora_a': jnp.zeros((3, 1)), 'lora_b': jnp.full((1, 2), 2.0)}
    >>> ratio = diagnostics.nonprivate_signal_to_noise(mean, params, 0.5)
    >>> round(ratio.item(), 4)
    2.8284
  """
  adapters = lora.Adapters(params, layout)
  blocks = adapters.coordinates(coordinates, 'coordinates')
  square = sum(jnp.sum(jnp.square(x)) for x in jax.tree.leaves(blocks))
  dimension = sum(x.size for x in blocks.others) + sum(
    int(np.prod(x.stack)) * x.rank * (x.m + x.n - x.rank)
    for x in adapters.modules
  )
  return jnp.sqrt(square / dimension) / stddev


class Spectra(NamedTuple):
  """Eigenvalues of one stack of modules, ascending, (k, r) each.

  Attributes:
    nu: Of the second moments, bias-corrected, before floor and cap.
    noise: Of the noise covariance they have seen: ``s^2`` where observed.
    gain: ``1 / sqrt(max(nu, floor))``: by how much the preconditioner can
      amplify a perturbation (PRISM, issue III, Eq. 27).
  """

  nu: jax.Array
  noise: jax.Array
  gain: jax.Array


def preconditioner_spectra(
  state: Any, *, b2: float = 0.999, floor_factor: float = 1.0
) -> tuple[tuple[Spectra, Spectra], ...]:
  """Spectra and floors of a rank preconditioner, for each stack: left, right.

  What PRISM's issue III (arXiv:2606.00944, Eq. 10, 26 and 27) is about. It
  reads an optimizer's state: post-processing of what is private already.

  Args:
    state: ``RankPreconditionerState`` in orthonormal coordinates, after at
      least one update.
    b2: As given to the preconditioner.
    floor_factor: Likewise.

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

  def spectra(nu, noise):
    nu, noise = (_linalg.eigh(x / correction)[0] for x in (nu, noise))
    # Where a factor has lost rank, what is not observed is zero to rounding.
    tiny = noise.shape[-1] * jnp.finfo(noise.dtype).eps * noise[..., -1:]
    observed = jnp.maximum(jnp.sum(noise > tiny, -1, keepdims=True), 1)
    floor = floor_factor * jnp.sum(noise, -1, keepdims=True) / observed
    return Spectra(nu, noise, 1 / jnp.sqrt(jnp.maximum(nu, floor)))

  return tuple(tuple(map(spectra, x.nu, x.noise)) for x in pairs)


def depends_on_other_examples(
  per_example_grads: Callable[[Any, Any], Any],
  params: Any,
  batch: Any,
  *,
  tolerance: float = 1e-4,
) -> bool:
  """Whether an example's gradient changes when the rest of its batch does.

  Clipping bounds what one record does to its own gradient only: with batch
  normalisation, in-batch negatives or a loss normalised over the batch the
  sensitivity is not what the clip says, and no epsilon holds. Try it on made-up
  data before training. (Ours; a False is no proof.) An entry that is finite in
  one company and not in the other has changed.

  Args:
    per_example_grads: ``f(params, batch)``, a tree of leaves (B, ...).
    params: Passed on.
    batch: Tree of arrays (B, ...), B at least 2, not all examples equal.
    tolerance: Relative change that counts as rounding.

  Returns:
    True if the gradient of any example moves when the others are exchanged.

  Raises:
    ValueError: If the batch has fewer than two examples.

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> from prism_optax import diagnostics
    >>> loss = lambda p, x: jnp.mean((p * x) ** 2)
    >>> alone = lambda p, xs: jax.vmap(jax.grad(loss), (None, 0))(p, xs)
    >>> centred = lambda p, xs: alone(p, xs - xs.mean(0))
    >>> batch = jnp.arange(6.0).reshape(3, 2)
    >>> diagnostics.depends_on_other_examples(alone, jnp.ones(2), batch)
    False
    >>> diagnostics.depends_on_other_examples(centred, jnp.ones(2), batch)
    True
  """
  size = jax.tree.leaves(batch)[0].shape[0]
  if size < 2:
    raise ValueError(f'Expected a batch of at least 2 examples, got {size}.')
  together = per_example_grads(params, batch)
  for i in range(size):
    # The same example in the same place, in the company of its copies.
    copies = jax.tree.map(lambda x, i=i: jnp.broadcast_to(x[i], x.shape), batch)
    alone = per_example_grads(params, copies)
    for x, y in zip(
      jax.tree.leaves(together), jax.tree.leaves(alone), strict=True
    ):
      if _differ(x[i], y[i], tolerance):
        return True
  return False


def _differ(x: Any, y: Any, tolerance: float) -> bool:
  """Whether y is another array than x, or not finite in other places."""
  x, y = (np.asarray(z, np.float64) for z in (x, y))
  same = (x == y) | (np.isnan(x) & np.isnan(y))
  size = np.max(np.abs(x), where=np.isfinite(x), initial=0.0)
  with np.errstate(invalid='ignore'):
    change = np.where(same, 0.0, np.abs(x - y))
  # NaN fails the comparison: it came from the other examples.
  return not np.all(change <= tolerance * size)
