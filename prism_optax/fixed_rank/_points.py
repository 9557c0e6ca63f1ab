"""Points of the manifold: factors and their orthonormal frames."""

from typing import NamedTuple

import jax

from prism_optax import _linalg


class Factors(NamedTuple):
  """A rank-r matrix ``Z = left @ right.mT``, or a step or gradient of the pair.

  Attributes:
    left: (..., m, r), the output side.
    right: (..., n, r), the input side.
  """

  left: jax.Array
  right: jax.Array


class Frame(NamedTuple):
  """Orthonormal bases of the two factors and their r x r cores.

  ``factors.left = left @ left_core``, ``factors.right = right @ right_core``.

  Attributes:
    left: ``Q_L`` (..., m, r).
    right: ``Q_R`` (..., n, r).
    left_core: ``C_L`` (..., r, r).
    right_core: ``C_R`` (..., r, r).
    left_inverse: ``C_L^-1``, or with ``C_L C_L^-1 = Q_L^T Q_L`` (..., r, r).
    right_inverse: ``C_R^-1``, likewise.
    left_mask: ``Q_L^T Q_L`` (..., r, r), the projector on the observed
      directions: the identity, or less where the factor has lost rank.
    right_mask: ``Q_R^T Q_R``, likewise.
  """

  left: jax.Array
  right: jax.Array
  left_core: jax.Array
  right_core: jax.Array
  left_inverse: jax.Array
  right_inverse: jax.Array
  left_mask: jax.Array
  right_mask: jax.Array


def check_pair(name: str, left: jax.Array, right: jax.Array) -> None:
  """Raises ``ValueError`` unless the shapes are (..., m, r) and (..., n, r)."""
  if (
    left.ndim < 2
    or right.ndim < 2
    or left.shape[:-2] != right.shape[:-2]
    or left.shape[-1] != right.shape[-1]
  ):
    raise ValueError(
      f'Expected {name} of shapes (..., m, r) and (..., n, r), got'
      f' {name}.left.shape={left.shape}, {name}.right.shape={right.shape}.'
    )


def frame(factors: Factors) -> Frame:
  """Orthonormal frames of the two factors.

  ``left = Q_L C_L`` and ``right = Q_R C_R``, so that ``Q_L Q_L^T`` and ``Q_R
  Q_R^T`` are the projectors of PRISM (arXiv:2606.00944, Eq. 12). Each is the
  polar factor of the column-normalised factor (ours), a continuous function of
  the factors alone. Factors with orthogonal columns (what :func:`retract`
  returns) need no factorisation.

  ========================  ===================================================
  zero factor               its frame is zero, and so is the mask
  zero column               left out: the frame is a partial isometry
  lost rank                 directions below r machine epsilons of the
                            column-normalised factor are left out
  columns of any length     harmless: normalised first
  NaN or Inf in a factor    NaN in its frame
  ========================  ===================================================

  Args:
    factors: (..., m, r) and (..., n, r), float32 or float64.

  Returns:
    The frame, in the type of the factors. It is not differentiated.

  Raises:
    ValueError: If the shapes do not match or ``r > min(m, n)``.

  Example:
    >>> import jax.numpy as jnp
    >>> from prism_optax import fixed_rank
    >>> left, right = jnp.array([[3.0], [4.0]]), jnp.array([[0.0], [2.0]])
    >>> f = fixed_rank.frame(fixed_rank.Factors(left, right))
    >>> print(f.left.ravel().round(3), f.left_core.ravel(), f.right.ravel())
    [0.6 0.8] [5.] [0. 1.]
  """
  left, right = factors
  check_pair('factors', left, right)
  rank = left.shape[-1]
  if rank < 1 or rank > min(left.shape[-2], right.shape[-2]):
    raise ValueError(
      'Expected 1 <= rank <= min(m, n), got'
      f' factors.left.shape={left.shape}, factors.right.shape={right.shape}.'
    )
  sides = [_linalg.orthonormal_frame(x) for x in (left, right)]
  return Frame(*(x for pair in zip(*sides, strict=True) for x in pair))
