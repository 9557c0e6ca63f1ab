"""What a rank preconditioner has seen and does."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from prism_optax import _linalg


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
