r"""Newton-Schulz orthogonalization of matrices, and its bias under noise.

The iteration is the one of DP-Muon (arXiv:2605.12994). A matrix ``M`` with no
more rows than columns goes through

.. math::
  Y_0 = M / \max(1, \|M\|_F), \qquad
  Y_j = p_\kappa(Y_{j-1} Y_{j-1}^\top)\, Y_{j-1}, \qquad
  p_\kappa(x) = \sum_{j=0}^{\kappa} \binom{2j}{j} 4^{-j} (1 - x)^j ,

where :math:`p_\kappa` is the Taylor polynomial of :math:`x^{-1/2}` at 1. A
singular value s becomes :math:`s\, p_\kappa(s^2)`, which grows towards 1 and
never beyond: near 1 with order ``degree + 1``, near 0 with the factor
:func:`slope_at_zero` per step. So ``steps`` steps cannot raise a singular
value by more than ``slope_at_zero(degree)**steps`` (23 for degree 2, 5 steps);
what lies far below that stays small.

Everything is a polynomial: no factorization, no division but the first one,
finite derivatives everywhere.
"""

from prism_optax.orthogonalization._bias import subtract_bias as subtract_bias
from prism_optax.orthogonalization._newton_schulz import (
  at_least_float32 as at_least_float32,
)
from prism_optax.orthogonalization._newton_schulz import (
  check_options as check_options,
)
from prism_optax.orthogonalization._newton_schulz import (
  coefficients as coefficients,
)
from prism_optax.orthogonalization._newton_schulz import divisor as divisor
from prism_optax.orthogonalization._newton_schulz import (
  frobenius_norm as frobenius_norm,
)
from prism_optax.orthogonalization._newton_schulz import (
  orthogonalize as orthogonalize,
)
from prism_optax.orthogonalization._newton_schulz import (
  slope_at_zero as slope_at_zero,
)
