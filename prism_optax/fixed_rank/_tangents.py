"""Tangent vectors in orthonormal coordinates, and as steps of the factors."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from prism_optax import _linalg
from prism_optax._linalg import gram, matmul
from prism_optax.fixed_rank._points import Factors, Frame
from prism_optax.fixed_rank._points import frame as frame_of


class Tangent(NamedTuple):
  """Orthonormal coordinates of ``T = left Q_R^T + Q_L right^T``.

  Attributes:
    left: ``X_L`` (..., m, r), orthogonal to the columns of ``Q_L``.
    right: ``X_R`` (..., n, r).
  """

  left: jax.Array
  right: jax.Array


def check_fits(
  frame: Frame | Factors, name: str, pair: Factors | Tangent
) -> None:
  """Raises ``ValueError`` unless m, n and r of ``pair`` are the frame's.

  Broadcasting would turn some other shapes into a wrong answer.
  """
  for x, q in zip(pair, frame, strict=False):
    if jnp.shape(x)[-2:] != q.shape[-2:]:
      raise ValueError(
        f'Expected {name} of shapes (..., {q.shape[-2]}, {q.shape[-1]}) for'
        f' frames of shapes {frame[0].shape} and {frame[1].shape}, got'
        f' {name}.left.shape={jnp.shape(pair[0])},'
        f' {name}.right.shape={jnp.shape(pair[1])}.'
      )


def remove(q: jax.Array, x: jax.Array) -> jax.Array:
  """``(I - q q^T) x``."""
  return x - matmul(q, gram(q, x))


def tangent_from_gradients(frame: Frame, grads: Factors) -> Tangent:
  """Coordinates of the tangent projection of the gradient in Z.

  For factor gradients ``g_L = G right`` and ``g_R = G^T left`` of one m x n
  gradient G, the result stands for ``P_L G + G P_R - P_L G P_R`` (PRISM,
  arXiv:2606.00944, Eq. 13): ``X_L = (I - P_L) g_L C_R^-1``,
  ``X_R = g_R C_L^-1``.

  Args:
    frame: Frame of the factors, axes (..., ., .).
    grads: Gradients with respect to ``left`` (..., m, r) and ``right``
      (..., n, r). They may carry more leading axes than the frame.

  Returns:
    Coordinates in the shapes of ``grads``. Those that a factor of lower rank
    hides are zero.

  Raises:
    ValueError: If m, n or r are not the frame's.

  Example:
    >>> import jax.numpy as jnp
    >>> from prism_optax import fixed_rank
    >>> z = fixed_rank.Factors(jnp.array([[2.0], [0.0]]), jnp.array([[4.0]]))
    >>> g = jnp.array([[1.0], [3.0]])
    >>> grads = fixed_rank.Factors(g @ z.right, g.T @ z.left)
    >>> x = fixed_rank.tangent_from_gradients(fixed_rank.frame(z), grads)
    >>> x.left.ravel().tolist(), x.right.ravel().tolist()
    ([0.0, 3.0], [1.0])
  """
  check_fits(frame, 'grads', grads)
  return Tangent(
    remove(frame.left, matmul(grads.left, frame.right_inverse)),
    matmul(grads.right, frame.left_inverse),
  )


def project(frame: Frame, tangent: Tangent) -> Tangent:
  """Orthogonal projection of arbitrary arrays on the coordinates at a frame.

  ``X_L <- (I - P_L) X_L Q_R^T Q_R`` and ``X_R <- X_R Q_L^T Q_L``: the right
  factors mask what a rank-deficient factor does not show. Applied to i.i.d.
  standard normal arrays it gives isotropic tangent noise (PRISM,
  arXiv:2606.00944, Eq. 17-21), of expected squared norm ``r (m + n - r)``.

  Args:
    frame: Frame of the factors.
    tangent: Any arrays (..., m, r) and (..., n, r); they may carry more leading
      axes than the frame.

  Returns:
    Coordinates, same shapes. Projecting again changes nothing.

  Raises:
    ValueError: If m, n or r are not the frame's.

  Example:
    >>> import jax.numpy as jnp
    >>> from prism_optax import fixed_rank
    >>> q = fixed_rank.frame(fixed_rank.Factors(jnp.eye(3, 1), jnp.eye(2, 1)))
    >>> x = fixed_rank.Tangent(jnp.ones((3, 1)), jnp.ones((2, 1)))
    >>> fixed_rank.project(q, x).left.ravel().tolist()
    [0.0, 1.0, 1.0]
  """
  check_fits(frame, 'tangent', tangent)
  return Tangent(
    remove(frame.left, matmul(tangent.left, frame.right_mask)),
    matmul(tangent.right, frame.left_mask),
  )


def norm(tangent: Tangent) -> jax.Array:
  """The intrinsic norm, which is the norm of the coordinates.

  ``||T||_F = sqrt(||X_L||_F^2 + ||X_R||_F^2)`` (PRISM, arXiv:2606.00944,
  Eq. 15, in orthonormal coordinates).

  Args:
    tangent: Coordinates (..., m, r) and (..., n, r).

  Returns:
    Shape (...), in the unit of T.

  Example:
    >>> import jax.numpy as jnp
    >>> from prism_optax import fixed_rank
    >>> x = fixed_rank.Tangent(3 * jnp.eye(3, 1), 4 * jnp.eye(2, 1))
    >>> fixed_rank.norm(x).item()
    5.0
  """
  return jnp.sqrt(
    jnp.sum(jnp.square(tangent.left), axis=(-2, -1))
    + jnp.sum(jnp.square(tangent.right), axis=(-2, -1))
  )


def embed(frame: Frame, tangent: Tangent) -> jax.Array:
  """The dense m x n matrix T, for tests and small problems.

  ``T = X_L Q_R^T + Q_L X_R^T``, PRISM's Eq. 11 (arXiv:2606.00944) in
  orthonormal bases.

  Args:
    frame: Frame of the factors.
    tangent: Coordinates (..., m, r) and (..., n, r).

  Returns:
    (..., m, n)

  Raises:
    ValueError: If m, n or r are not the frame's.

  Example:
    >>> import jax.numpy as jnp
    >>> from prism_optax import fixed_rank
    >>> q = fixed_rank.frame(fixed_rank.Factors(jnp.eye(3, 1), jnp.eye(2, 1)))
    >>> x = fixed_rank.Tangent(3 * jnp.eye(3, 1, -1), 4 * jnp.eye(2, 1, -1))
    >>> print(fixed_rank.embed(q, x))
    [[0. 4.]
     [3. 0.]
     [0. 0.]]
  """
  check_fits(frame, 'tangent', tangent)
  return matmul(tangent.left, frame.right.mT) + matmul(
    frame.left, tangent.right.mT
  )


def lift(
  frame: Frame, tangent: Tangent, *, horizontal: bool = False
) -> Factors:
  """Steps of the factors with ``dL right^T + left dR^T = T``.

  ``dL = X_L C_R^-T`` and ``dR = X_R C_L^-T`` put the whole core of T on the
  right factor. The horizontal lift is the one of least norm (PRISM,
  arXiv:2606.00944, Prop. A.11): it adds ``L W`` and ``-R W^T`` so that
  ``L^T dL = dR^T R``. The equation is solved for ``W' = C_L W C_R^T``, which
  cancels from the tangent vector whatever its accuracy: with the core D of T,
  ``C_L C_L^T W' + W' C_R C_R^T = D C_R C_R^T``.

  Args:
    frame: Frame of the factors.
    tangent: Coordinates (..., m, r) and (..., n, r).
    horizontal: Return the lift of least norm.

  Returns:
    ``(dL, dR)`` in the same shapes. What only a lost direction could carry is
    left out: the inverses are pseudo-inverses.

  Raises:
    ValueError: If m, n or r are not the frame's.

  Example:
    >>> import jax.numpy as jnp
    >>> from prism_optax import fixed_rank
    >>> z = fixed_rank.Factors(2 * jnp.eye(3, 1), 4 * jnp.eye(2, 1))
    >>> q = fixed_rank.frame(z)
    >>> x = fixed_rank.Tangent(8 * jnp.eye(3, 1, -1), jnp.zeros((2, 1)))
    >>> steps = fixed_rank.lift(q, x)
    >>> steps.left.ravel().tolist(), steps.right.ravel().tolist()
    ([0.0, 2.0, 0.0], [0.0, 0.0])
  """
  check_fits(frame, 'tangent', tangent)
  left, right = tangent
  if horizontal:
    core = gram(right, frame.right)
    w = _linalg.sylvester_of_grams(
      frame.left_core.mT,
      frame.right_core.mT,
      matmul(core, matmul(frame.right_core, frame.right_core.mT)),
    )
    left = left + matmul(frame.left, w)
    right = right - matmul(frame.right, w.mT)
  return Factors(
    matmul(left, frame.right_inverse.mT), matmul(right, frame.left_inverse.mT)
  )


def tangent_from_steps(frame: Frame, steps: Factors) -> Tangent:
  """Coordinates of ``T = dL right^T + left dR^T``: undoes any lift.

  ``X_L = (I - P_L) dL C_R^T`` and ``X_R = dR C_L^T + Q_R C_R dL^T Q_L``: the
  coordinates of a vector of the form of PRISM's Eq. 11 (arXiv:2606.00944).

  Args:
    frame: Frame of the factors.
    steps: ``(dL, dR)``, (..., m, r) and (..., n, r).

  Returns:
    Coordinates, same shapes; the same for all lifts of one T.

  Raises:
    ValueError: If m, n or r are not the frame's.

  Example:
    >>> import jax.numpy as jnp
    >>> from prism_optax import fixed_rank
    >>> z = fixed_rank.Factors(2 * jnp.eye(3, 1), 4 * jnp.eye(2, 1))
    >>> q = fixed_rank.frame(z)
    >>> steps = fixed_rank.Factors(z.left, z.right)  # T = 2 Z, of norm 16.
    >>> x = fixed_rank.tangent_from_steps(q, steps)
    >>> x.left.ravel().tolist(), x.right.ravel().tolist()
    ([0.0, 0.0, 0.0], [16.0, 0.0])
  """
  check_fits(frame, 'steps', steps)
  return Tangent(
    remove(frame.left, matmul(steps.left, frame.right_core.mT)),
    matmul(steps.right, frame.left_core.mT)
    + matmul(
      frame.right, matmul(frame.right_core, gram(steps.left, frame.left))
    ),
  )


def horizontal_lift(factors: Factors, steps: Factors) -> Factors:
  """The steps of least norm with the same tangent vector.

  ``(dL + L W, dR - R W^T)`` with ``M W + W N = dR^T R - L^T dL``, ``M = L^T L``
  and ``N = R^T R`` (PRISM, arXiv:2606.00944, Prop. A.11). See :func:`lift`.

  Args:
    factors: (..., m, r) and (..., n, r).
    steps: Any lift of the tangent vector, same shapes.

  Returns:
    The horizontal lift, same shapes.

  Raises:
    ValueError: If the shapes do not match or ``r > min(m, n)``.

  Example:
    >>> import jax.numpy as jnp
    >>> from prism_optax import fixed_rank
    >>> z = fixed_rank.Factors(jnp.eye(3, 1), jnp.eye(2, 1))
    >>> steps = fixed_rank.Factors(jnp.zeros((3, 1)), 2 * jnp.eye(2, 1))
    >>> left, right = fixed_rank.horizontal_lift(z, steps)
    >>> left.ravel().tolist(), right.ravel().tolist()  # Shared out.
    ([1.0, 0.0, 0.0], [1.0, 0.0])
  """
  q = frame_of(factors)
  return lift(q, tangent_from_steps(q, steps), horizontal=True)
