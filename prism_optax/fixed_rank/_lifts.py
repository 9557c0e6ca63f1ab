"""Between tangent vectors and what they come from or lead to."""

import jax
import jax.numpy as jnp

from prism_optax._linalg import _factorizations, _products
from prism_optax._linalg._products import gram, matmul
from prism_optax.fixed_rank._points import Factors, Frame
from prism_optax.fixed_rank._tangents import (
  Tangent,
  check_fits,
  multiply_out,
  remove,
  transport_sum,
)


def project(frame: Frame, tangent: Tangent) -> Tangent:
  """Orthogonal projection of arbitrary arrays on the coordinates at a frame.

  ``X_L <- (I - P_L) X_L Q_R^T Q_R`` and ``X_R <- X_R Q_L^T Q_L``: the right
  factors mask the directions that a rank-deficient factor does not show.
  Applied to i.i.d. standard normal arrays it gives isotropic tangent noise
  (PRISM, arXiv:2606.00944, Eq. 17-21), of expected squared norm ``r (m + n -
  r)``.

  Args:
    frame: Frame of the factors.
    tangent: Arrays (..., m, r) and (..., n, r) of any values; they may carry
      more leading axes than the frame.

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


def lift(frame: Frame, tangent: Tangent) -> Factors:
  """Steps of the factors with ``dL right^T + left dR^T = T``, of least norm.

  ``dL = X_L C_R^-T`` and ``dR = X_R C_L^-T`` put the whole core of T on the
  right factor. The horizontal lift, the one of least norm (PRISM,
  arXiv:2606.00944, Prop. A.11), adds ``L W`` and ``-R W^T`` so that
  ``L^T dL = dR^T R``. The equation is solved for ``W' = C_L W C_R^T``, which
  cancels from the tangent vector whatever its accuracy: with the core D of T,
  ``C_L C_L^T W' + W' C_R C_R^T = D C_R C_R^T``.

  Args:
    frame: Frame of the factors.
    tangent: Coordinates (..., m, r) and (..., n, r).

  Returns:
    ``(dL, dR)`` in the same shapes. What only a lost direction could carry is
    left out: the inverses are pseudo-inverses.

  Example:
    >>> import jax.numpy as jnp
    >>> from prism_optax import fixed_rank
    >>> from prism_optax.fixed_rank import _lifts
    >>> z = fixed_rank.Factors(2 * jnp.eye(3, 1), 4 * jnp.eye(2, 1))
    >>> q = fixed_rank.frame(z)
    >>> x = fixed_rank.Tangent(8 * jnp.eye(3, 1, -1), jnp.zeros((2, 1)))
    >>> steps = _lifts.lift(q, x)
    >>> steps.left.ravel().tolist(), steps.right.ravel().tolist()
    ([0.0, 2.0, 0.0], [0.0, 0.0])
  """
  left, right = tangent
  core = gram(right, frame.right)
  w = sylvester_of_grams(
    frame.left_core.mT,
    frame.right_core.mT,
    matmul(core, matmul(frame.right_core, frame.right_core.mT)),
  )
  left = left + matmul(frame.left, w)
  right = right + matmul(frame.right, -w.mT)
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
    >>> from prism_optax.fixed_rank import _lifts
    >>> z = fixed_rank.Factors(2 * jnp.eye(3, 1), 4 * jnp.eye(2, 1))
    >>> q = fixed_rank.frame(z)
    >>> steps = fixed_rank.Factors(z.left, z.right)  # T = 2 Z, of norm 16.
    >>> x = _lifts.tangent_from_steps(q, steps)
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


def transport(old_frame: Frame, new_frame: Frame, tangent: Tangent) -> Tangent:
  """Projects a tangent vector at one point on the tangent space at another.

  With ``T = X_L Q_R^T + Q_L X_R^T`` at the old point, ``X_L' = (I - P_L') T
  Q_R'`` and ``X_R' = T^T Q_L'``, by products with r x r matrices only: the
  projection of PRISM (arXiv:2606.00944, Eq. 13) of T at the new point. Using it
  to carry moments from step to step is ours.

  Args:
    old_frame: Frame that ``tangent`` is written in; only its bases are read.
    new_frame: Frame at the other point.
    tangent: Coordinates (..., m, r) and (..., n, r).

  Returns:
    Coordinates in the new frame, same shapes, of no larger norm.

  Raises:
    ValueError: If m, n or r are not the frames'.

  Example:
    >>> import jax.numpy as jnp
    >>> from prism_optax import fixed_rank
    >>> old = fixed_rank.frame(
    ...   fixed_rank.Factors(jnp.eye(3, 1), jnp.eye(2, 1)))
    >>> new = fixed_rank.frame(
    ...   fixed_rank.Factors(jnp.eye(3, 1), jnp.eye(2, 1, -1)))
    >>> x = fixed_rank.Tangent(jnp.zeros((3, 1)), jnp.array([[3.0], [4.0]]))
    >>> fixed_rank.transport(old, new, x).right.ravel().tolist()
    [3.0, 4.0]
  """
  bases = Factors(old_frame.left, old_frame.right)
  return multiply_out(transport_sum(bases, new_frame, tangent)[0])


@_products.flat_batch
def sylvester_of_grams(a: jax.Array, b: jax.Array, c: jax.Array) -> jax.Array:
  """Solves ``a^T a w + w b^T b = c`` for square ``a`` and ``b``.

  The Gram matrices are never formed: their small eigenvalues would be lost at
  the square of the condition number. Where the equation is singular (a
  direction both of whose singular values vanish, up to rounding) the solution
  of least norm is taken.
  """
  _, sa, va = _factorizations.svd(a, complete=True)
  _, sb, vb = _factorizations.svd(b, complete=True)
  eps = a.shape[-1] * jnp.finfo(a.dtype).eps
  # Scaled by the largest singular value: squares must not underflow.
  largest = jnp.maximum(sa[:, :1], sb[:, :1])
  scale = jnp.where(largest > 0, largest, 1)[:, :, None]
  a_squares, b_squares = (jnp.square(x[:, None] / scale) for x in (sa, sb))
  total = a_squares.mT + b_squares
  rotated = matmul(matmul(va, c), vb.mT) * _products.safe_reciprocal(
    total, total > eps**2
  )
  return gram(va, matmul(rotated, vb)) / scale / scale
