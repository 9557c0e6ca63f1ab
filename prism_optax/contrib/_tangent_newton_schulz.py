r"""Muon on the manifold of rank-r matrices: orthogonalized tangent vectors.

A tangent vector ``T = X_L Q_R^T + Q_L X_R^T`` has rank up to 2r, and its polar
factor is not tangent. The direction taken here is ``P_Z(F(T))``: the
orthogonalized matrix F(T), the direction of steepest ascent in the spectral
norm, is projected back on the tangent space at Z.

The code forms no (m, n) matrix and factorizes nothing. Let X be the part of
``X_R`` orthogonal to ``Q_R`` and ``D = X_R^T Q_R`` the core. In the bases
``B_L = [Q_L, X_L]`` and ``B_R = [Q_R, X]`` the vector is ``B_L M B_R^T`` with

.. math::
  M = \begin{pmatrix} D & I \\ I & 0 \end{pmatrix},

and a step of the iteration of :mod:`prism_optax.muon` changes the 2r x 2r core
alone, with the Gram matrices of the bases in between:

.. math::
  M \leftarrow p_\kappa(M G_R M^\top G_L)\, M .

The bases need not be orthonormal and may lose rank: a step is a polynomial,
hence exact and continuous everywhere. If the frames turn by orthogonal
matrices, the coordinates of the result turn likewise, so the step in Z does not
depend on the gauge of the factors.
"""

import jax.numpy as jnp

from prism_optax import fixed_rank
from prism_optax._linalg._products import gram, matmul
from prism_optax.fixed_rank._points import Frame
from prism_optax.muon._newton_schulz import divisor, frobenius_norm
from prism_optax.muon._polynomials import Steps, check_options, polynomials


def tangent_newton_schulz(
  frame: Frame,
  tangent: fixed_rank.Tangent,
  *,
  degree: int,
  steps: Steps,
  normalize: str,
  scale: float,
) -> fixed_rank.Tangent:
  """The tangent projection of the orthogonalized tangent vector.

  ``P_Z(F(T))`` with the Newton-Schulz iteration F of DP-Muon (arXiv:2605.12994)
  and the projection of PRISM (arXiv:2606.00944, Eq. 13); the form on the
  2r x 2r core is ours. Zero stays zero. If an entry is not finite, the result
  is not finite.

  Args:
    frame: Orthonormal frames at Z, or partial isometries where a factor has
      lost rank. Only the two bases are used.
    tangent: Coordinates (..., m, r), orthogonal to ``frame.left``, and
      (..., n, r).
    degree: Degree kappa of the polynomial.
    steps: Number q of steps, or the coefficients of each, see
      :func:`prism_optax.muon.newton_schulz`.
    normalize: ``'max1'``, ``'frobenius'`` or ``'none'``, as for matrices; the
      norm is the intrinsic one.
    scale: The result is multiplied by this factor.

  Returns:
    Coordinates of the direction. With ``'max1'`` and ``'frobenius'`` its
    spectral norm is at most ``2 scale`` and its intrinsic norm at most
    ``scale sqrt(2 r)``, whatever the gradient.

  Raises:
    ValueError: For an option that is not allowed.

  Example:
    >>> import jax.numpy as jnp
    >>> from prism_optax import fixed_rank
    >>> from prism_optax.contrib import _tangent_newton_schulz as newton
    >>> z = fixed_rank.Factors(jnp.eye(5, 2), jnp.eye(4, 2))
    >>> x = fixed_rank.Tangent(3.0 * jnp.eye(5, 2, -2), 3.0 * jnp.eye(4, 2, -2))
    >>> y = newton.tangent_newton_schulz(fixed_rank.frame(z), x, degree=2,
    ...                                  steps=5, normalize='max1', scale=1.0)
    >>> bool(jnp.allclose(y.left, x.left / 3, atol=1e-5))  # 3 becomes 1.
    True
  """
  check_options(degree, steps, normalize)
  q_left, q_right, left, right = frame.left, frame.right, *tangent
  norm = frobenius_norm(left, right)
  share = divisor(normalize, norm)
  left, right = left / share, right / share

  rank = left.shape[-1]
  core = gram(right, q_right)
  outer = right - matmul(q_right, core.mT)
  eye = jnp.broadcast_to(jnp.eye(rank, dtype=core.dtype), core.shape)
  zero = jnp.zeros_like(core)
  # The Gram of a partial isometry is the projector on what is observed.
  left_seen, right_seen = gram(q_left, q_left), gram(q_right, q_right)
  left_gram = jnp.block([[left_seen, zero], [zero, gram(left, left)]])
  right_gram = jnp.block([[right_seen, zero], [zero, gram(outer, outer)]])
  middle = jnp.block([[core, eye], [eye, zero]])
  for c in polynomials(degree, steps):
    # Powers of 1 - (M G_R M^T) G_L applied to M: the product with M comes
    # first, because G_L has no inverse and the square alone is not symmetric.
    square = matmul(matmul(matmul(middle, right_gram), middle.mT), left_gram)
    power, total = middle, c[0] * middle
    for j in range(1, degree + 1):
      power = power - matmul(square, power)
      total = total + c[j] * power
    middle = total

  # The scale goes to the small core, so that the results are plain products.
  middle = scale * middle
  # F(T) Q_R = B_L M (Pi_R; 0) and F(T)^T Q_L = B_R M^T (Pi_L; 0): the block
  # of M that belongs to two outer bases is what the projection leaves out.
  new_left = matmul(left, matmul(middle[..., rank:, :rank], right_seen))
  new_right = matmul(
    q_right, gram(middle[..., :rank, :rank], left_seen)
  ) + matmul(outer, gram(middle[..., :rank, rank:], left_seen))
  return fixed_rank.Tangent(new_left, new_right)
