r"""Newton-Schulz orthogonalization of matrices.

The iteration is the one of DP-Muon (arXiv:2605.12994). A matrix ``M`` with no
more rows than columns goes through

.. math::
  Y_0 = M / \max(1, \|M\|_F), \qquad
  Y_j = p_\kappa(Y_{j-1} Y_{j-1}^\top)\, Y_{j-1}, \qquad
  p_\kappa(x) = \sum_{j=0}^{\kappa} \binom{2j}{j} 4^{-j} (1 - x)^j ,

where :math:`p_\kappa` is the Taylor polynomial of :math:`x^{-1/2}` at 1. A
singular value s becomes :math:`s\, p_\kappa(s^2)`, which grows towards 1 and
never beyond: near 1 with order ``degree + 1``, near 0 with the factor
``p(0) = (2k + 1) C(2k, k) / 4^k`` per step, k the degree. So ``steps`` steps
cannot raise a singular value by more than ``p(0)**steps`` (23 for degree 2, 5
steps): values far below the inverse of that stay small.

After the first division the iteration is a polynomial, so it needs no
factorization, and its derivatives are finite everywhere.

Other polynomials may take the place of :math:`p_\kappa`, another one in each
step: :func:`minimax_coefficients` finds those that come nearest to one.
"""

from prism_optax.muon._newton_schulz import newton_schulz
from prism_optax.muon._polynomials import minimax_coefficients

__all__ = ['minimax_coefficients', 'newton_schulz']
