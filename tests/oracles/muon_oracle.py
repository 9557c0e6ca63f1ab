"""DP-Muon (arXiv 2605.12994) in float64 NumPy, one matrix after another.

Written from the formulas, without sharing anything with the package: loops
over examples and matrices, powers and factorials as they stand.
"""

import math

import numpy as np


def weights(degree):
  """Coefficients of p_kappa."""
  return [math.comb(2 * s, s) / 4**s for s in range(degree + 1)]


def polynomial(matrix, degree):
  """p_kappa of a symmetric matrix, as the sum of its definition."""
  rest = np.eye(len(matrix)) - matrix
  total = np.zeros_like(matrix)
  for s, weight in enumerate(weights(degree)):
    total = total + weight * np.linalg.matrix_power(rest, s)
  return total


def orthogonalize(matrix, degree, steps, normalize='max1'):
  """Y_q of one (rows, columns) matrix."""
  matrix = np.asarray(matrix, np.float64)
  transposed = matrix.shape[0] > matrix.shape[1]
  y = matrix.T if transposed else matrix
  norm = math.sqrt(np.sum(y**2))
  if normalize == 'max1':
    y = y / max(1.0, norm)
  elif normalize == 'frobenius' and norm > 0:
    y = y / norm
  for _ in range(steps):
    y = polynomial(y @ y.T, degree) @ y
  return y.T if transposed else y


def singular_values(values, degree, steps):
  """What the iteration makes of singular values, one scalar at a time."""
  return by_rows(np.float64(values), [weights(degree)] * steps)


def by_rows(values, rows):
  """The same under other polynomials: rows of coefficients of (1 - x)^j."""
  for row in rows:
    values = values * sum(c * (1 - values**2) ** j for j, c in enumerate(row))
  return values


def clip(gradient, threshold):
  """H_t(z) = g / max(1, ||g||_F / C)."""
  norm = math.sqrt(np.sum(gradient**2))
  return gradient / max(1.0, norm / threshold)


class DPMuon:
  """The optimizer on a list of matrices, with the noise handed in."""

  def __init__(self, thetas, *, clips, batch, beta, degree, steps, eta):
    self.thetas = [np.array(t, np.float64) for t in thetas]
    self.momenta = [np.zeros_like(t) for t in self.thetas]
    self.clips, self.batch, self.beta = clips, batch, beta
    self.degree, self.steps, self.eta = degree, steps, eta

  def step(self, gradients, noises):
    """One step; ``gradients[i]`` is (examples, rows, columns).

    ``noises[i]`` is Z_t itself, of standard deviation sigma C / B.
    """
    for i, per_example in enumerate(gradients):
      mean = np.zeros_like(self.thetas[i])
      for g in per_example:
        mean = mean + clip(g, self.clips[i])
      noisy = mean / self.batch + noises[i]
      self.momenta[i] = self.beta * self.momenta[i] + noisy
      self.thetas[i] = self.thetas[i] - self.eta * orthogonalize(
        self.momenta[i], self.degree, self.steps
      )
    return self.thetas
