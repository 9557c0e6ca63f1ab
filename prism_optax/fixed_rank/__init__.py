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
numerical range: directions that the gradients of the factors do not show are
left out (their coordinates are zero), not invented.

All functions broadcast over leading axes and compute in the type of their
arguments, float32 or float64. ``m`` is the output side, ``n`` the input side.
Frames are not differentiated (``stop_gradient``).
"""

from prism_optax.fixed_rank._combinations import Combination as Combination
from prism_optax.fixed_rank._combinations import Products as Products
from prism_optax.fixed_rank._combinations import RankMatrices as RankMatrices
from prism_optax.fixed_rank._combinations import combination as combination
from prism_optax.fixed_rank._combinations import multiply_out as multiply_out
from prism_optax.fixed_rank._combinations import products as products
from prism_optax.fixed_rank._combinations import projection as projection
from prism_optax.fixed_rank._points import Factors as Factors
from prism_optax.fixed_rank._points import Frame as Frame
from prism_optax.fixed_rank._points import frame as frame
from prism_optax.fixed_rank._retraction import retract as retract
from prism_optax.fixed_rank._tangents import Tangent as Tangent
from prism_optax.fixed_rank._tangents import embed as embed
from prism_optax.fixed_rank._tangents import horizontal_lift as horizontal_lift
from prism_optax.fixed_rank._tangents import lift as lift
from prism_optax.fixed_rank._tangents import norm as norm
from prism_optax.fixed_rank._tangents import project as project
from prism_optax.fixed_rank._tangents import (
  tangent_from_gradients as tangent_from_gradients,
)
from prism_optax.fixed_rank._tangents import (
  tangent_from_steps as tangent_from_steps,
)
from prism_optax.fixed_rank._transport import Carried as Carried
from prism_optax.fixed_rank._transport import carry as carry
from prism_optax.fixed_rank._transport import transport as transport
from prism_optax.fixed_rank._truncation import truncate as truncate
