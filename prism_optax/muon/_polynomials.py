"""The polynomials of the iteration: DP-Muon's, or the best ones in turn."""

import math
from collections.abc import Sequence

import numpy as np

from prism_optax import _validate

Steps = int | Sequence[Sequence[float]]
# Powers of higher ones are too much alike for the exchange in float64.
_LARGEST_DEGREE = 5


def coefficients(degree: int) -> tuple[float, ...]:
  """Coefficients of ``(1 - x)^j``, j = 0..degree, of the polynomial p.

  ``c_j = C(2j, j) / 4^j`` (DP-Muon, arXiv:2605.12994). These are binomials over
  powers of two, so the floats are exact while a binomial has at most 53 bits.
  Their sum is ``p(0) = (2k + 1) C(2k, k) / 4^k`` for the degree k: the factor
  by which one step raises a very small singular value.

  Args:
    degree: At least 1.

  Returns:
    ``degree + 1`` numbers.

  Raises:
    ValueError: If ``degree`` is not an integer of at least 1.

  Example:
    >>> from prism_optax.muon import _polynomials
    >>> _polynomials.coefficients(3)
    (1.0, 0.5, 0.375, 0.3125)
  """
  _validate.integer('degree', degree, 1)
  return tuple(math.comb(2 * j, j) / 4**j for j in range(degree + 1))


def minimax_coefficients(
  least: float, steps: int, *, degree: int = 2
) -> tuple[tuple[float, ...], ...]:
  """One polynomial for each step, each the best after the steps before it.

  Singular values from ``least`` to 1 are brought as near to one as composed odd
  polynomials can bring them (the Polar Express, Amsel et al. 2025,
  arXiv:2505.16932, found by Remez' exchange). Three steps with ``least=0.1``
  raise small values by as much as five of DP-Muon's, and end as near to one
  above it.

  The last polynomial is scaled so that no singular value ends above one; on the
  way they may be as large as two.

  Args:
    least: The smallest singular value, in units of the divisor of the matrix,
      that is to come near one. Smaller ones grow by the same factor as it.
    steps: Number of polynomials.
    degree: Degree of p(x), at most 5; the odd polynomial has degree ``2 degree
      + 1``.

  Returns:
    Coefficients for ``steps`` of :func:`newton_schulz` and of its callers. Each
    step has ``degree + 1`` coefficients of ``(1 - x)^j``. DP-Muon's own are
    ``C(2j, j) / 4^j``.

  Raises:
    ValueError: If ``least`` is not between 0 and 1, a number is not a positive
      integer, or ``degree`` is too large.

  Example:
    >>> import jax.numpy as jnp
    >>> from prism_optax import muon
    >>> table = muon.minimax_coefficients(0.1, 3)
    >>> x = jnp.diag(jnp.array([1.0, 0.4, 0.1]))
    >>> y = muon.newton_schulz(x, steps=table, normalize='none')
    >>> bool(jnp.allclose(y, jnp.eye(3), atol=1e-3))
    True
  """
  _validate.known_open_probability('least', least)
  _validate.integer('steps', steps, 1)
  _validate.integer('degree', degree, 1)
  if degree > _LARGEST_DEGREE:
    raise ValueError(f'Expected degree <= {_LARGEST_DEGREE}, got {degree=}.')
  lower, upper = float(least), 1.0
  table = []
  for _ in range(steps):
    row, error = _best(lower, upper, degree)
    table.append(row)
    lower, upper = 1 - error, 1 + error
  table[-1] = table[-1] / upper
  return tuple(tuple(map(float, row)) for row in table)


def _best(lower: float, upper: float, degree: int) -> tuple[np.ndarray, float]:
  """The odd polynomial nearest to one on an interval, and how near.

  Its error is the same, with signs in turn, at ``degree + 2`` points
  (Chebyshev): the ends and where the derivative is zero.
  """
  if (upper - lower) ** (degree + 1) < 1e-12:
    # The points coincide. The series at one leaves no more than that.
    return np.array(coefficients(degree)), 0.0
  powers = np.arange(degree + 1)
  points = lower + (upper - lower) * np.sin(
    np.linspace(0, np.pi / 2, degree + 2)
  ) ** 2  # fmt: skip
  signs = (-1.0) ** np.arange(degree + 2)
  found: np.ndarray = np.zeros(degree + 1)
  before = np.inf
  for _ in range(100):
    odd = points[:, None] ** (2 * powers + 1)
    solution = np.linalg.solve(
      np.column_stack([odd, signs]), np.ones(degree + 2)
    )
    found, error = solution[:-1], float(solution[-1])
    if abs(error - before) <= 1e-14:
      break
    before = error
    # Zeros of the derivative, a polynomial in the squares.
    squares = np.polynomial.polynomial.polyroots((2 * powers + 1) * found)
    points[1:-1] = np.sqrt(np.sort(squares.real))
  # From powers of x to powers of 1 - x.
  rows = [
    sum(found[i] * math.comb(i, j) for i in range(j, degree + 1)) * (-1) ** j
    for j in range(degree + 1)
  ]
  return np.array(rows), abs(error)


def polynomials(degree: int, steps: Steps) -> list[tuple[float, ...]]:
  """The coefficients of each step, of checked options."""
  if isinstance(steps, int):
    return [coefficients(degree)] * steps
  return [tuple(row) for row in steps]


def check_options(degree: int, steps: Steps, normalize: str) -> None:
  """Raises ``ValueError`` for options that no orthogonalization accepts."""
  _validate.integer('degree', degree, 1)
  if isinstance(steps, Sequence) and not isinstance(steps, str):
    fits = [isinstance(x, Sequence) and len(x) == degree + 1 for x in steps]
    if not fits or not all(fits):
      raise ValueError(
        'Expected steps to be an integer, or to have degree + 1 ='
        f' {degree + 1} coefficients for each step, got {steps=}.'
      )
  else:
    _validate.integer('steps', steps, 1)
  _validate.one_of('normalize', normalize, ('max1', 'frobenius', 'none'))
