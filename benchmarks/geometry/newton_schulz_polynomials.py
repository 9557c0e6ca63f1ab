"""What polynomials make of the singular values of noisy gradients.

    python -m benchmarks.geometry.newton_schulz_polynomials

DP-Muon's iteration, Muon's (Jordan et al. 2024) and the best polynomials in
turn (``muon.minimax_coefficients``), by the number of matrix products that they
cost, for matrices divided by their Frobenius norm: how far a value near zero is
lifted, and how far from one singular values end, in the root mean square.
Spectra: noise alone, a signal of rank 8 under noise of the same norm, and one
that falls by three decades. Then the same with products of bfloat16. A few
seconds.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from benchmarks.common import runner
from prism_optax import muon
from prism_optax.muon import _polynomials

# Of Jordan et al. 2024, for p(x) = a + b x + c x^2, as optax has them.
JORDAN = (3.4445, -4.7750, 2.0315)
Rows = tuple[tuple[float, ...], ...]


def in_powers_of_the_rest(a: float, b: float, c: float) -> tuple[float, ...]:
  """From powers of x to powers of 1 - x."""
  return (a + b + c, -b - 2 * c, c)


POLYNOMIALS: dict[str, Rows] = {
  'DP-Muon, degree 1, 8 steps': (_polynomials.coefficients(1),) * 8,
  'DP-Muon, degree 2, 5 steps': (_polynomials.coefficients(2),) * 5,
  'DP-Muon, degree 3, 4 steps': (_polynomials.coefficients(3),) * 4,
  'Muon, 3 steps': (in_powers_of_the_rest(*JORDAN),) * 3,
  'Muon, 5 steps': (in_powers_of_the_rest(*JORDAN),) * 5,
  'best from 0.1, 3 steps': muon.minimax_coefficients(0.1, 3),
  'best from 0.03, 4 steps': muon.minimax_coefficients(0.03, 4),
  'best from 0.003, 5 steps': muon.minimax_coefficients(0.003, 5),
}


@functools.cache
def spectra() -> dict[str, np.ndarray]:
  """Matrices in float64, of Frobenius norm one."""
  rng = np.random.default_rng(0)
  found = {}
  for columns in (384, 1536):
    shape = (384, columns)
    noise = rng.normal(size=shape)
    signal = rng.normal(size=(384, 8)) @ rng.normal(size=(8, columns))
    signal *= np.linalg.norm(noise) / np.linalg.norm(signal)
    found[f'noise, 384 x {columns}'] = noise
    found[f'signal and noise, 384 x {columns}'] = noise + signal
  left, right = (np.linalg.qr(rng.normal(size=(384, 384)))[0] for _ in range(2))
  found['three decades, 384 x 384'] = (left * np.logspace(0, -3, 384)) @ right
  return {name: x / np.linalg.norm(x) for name, x in found.items()}


def composed(rows: Rows) -> Callable[[Any], Any]:
  def values(s: Any) -> Any:
    for row in rows:
      s = s * sum(c * (1 - s**2) ** j for j, c in enumerate(row))
    return s

  return values


def measure(polynomials: str) -> dict[str, Any]:
  """Their price, their lift, and what becomes of each spectrum."""
  table = POLYNOMIALS[polynomials]
  values, tiny, degree = composed(table), 1e-9, len(table[0]) - 1
  ends = {}
  for title, matrix in spectra().items():
    left, s, right = np.linalg.svd(matrix, full_matrices=False)
    exact = values(s)
    narrow = muon.newton_schulz(
      jnp.asarray(matrix, jnp.float32), degree=degree, steps=table,
      normalize='none', matmul_dtype=jnp.bfloat16,
    )  # fmt: skip
    error = np.float64(narrow) - (left * exact) @ right
    ends[title] = {
      'rms from one': float(np.sqrt(np.mean((exact - 1) ** 2))),
      'largest': float(exact.max()),
      # Of the entries of an orthogonal matrix.
      'rms of bfloat16 products': float(np.linalg.norm(error) / len(s) ** 0.5),
    }
  return {
    # The square, Horner's rule, and the product with the matrix.
    'products': sum(map(len, table)),
    'lift': values(tiny) / tiny,
    'spectra': ends,
  }


if __name__ == '__main__':
  runner.main(
    __doc__,
    'newton_schulz_polynomials',
    [{'polynomials': name} for name in POLYNOMIALS],
    measure,
  )
