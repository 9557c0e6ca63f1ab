"""Geometry of the manifold of m x n matrices of rank r, on arrays.

A point is a pair of factors, ``Z = left @ right.mT``. A tangent vector at Z is
written in orthonormal coordinates with respect to a frame of Z: with
``left = Q_L C_L`` and ``right = Q_R C_R`` (orthonormal ``Q``, square ``C``)::

    T = X_L Q_R^T + Q_L X_R^T,        Q_L^T X_L = 0,

so that ``||T||_F^2 = ||X_L||_F^2 + ||X_R||_F^2``: the Euclidean norm of the
coordinates is the intrinsic norm (PRISM, arXiv:2606.00944, Eq. 15), and every
gauge ``(left K, right K^-T)`` of the same Z gives the same coordinates up to
orthogonal matrices on the right. The coordinates have the shapes of the
factors.

Where a factor is zero or rank-deficient its frame is a partial isometry on the
numerical range: the coordinates of directions that the gradients of the factors
do not show are zero.

All functions broadcast over leading axes and compute in the type of their
arguments, float32 or float64. ``m`` is the output side, ``n`` the input side.
Frames are not differentiated (``stop_gradient``).
"""

from prism_optax.fixed_rank._lifts import project, transport
from prism_optax.fixed_rank._points import Factors, frame
from prism_optax.fixed_rank._retraction import retraction
from prism_optax.fixed_rank._tangents import (
  Tangent,
  multiply_out,
  tangent_from_gradients,
)

# fmt: off
__all__ = [
  'Factors', 'Tangent', 'frame', 'multiply_out', 'project', 'retraction',
  'tangent_from_gradients', 'transport',
]
# fmt: on
