"""Slow, dense float64 versions of the geometry and of the clipping.

Everything here is written from the definitions in NumPy: projectors are
m x m and n x n matrices made by an SVD, tangent vectors are dense m x n
matrices, the Sylvester equation is solved as one Kronecker system. Nothing
is shared with the package, so that an agreement means something.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

EPS = np.finfo(np.float64).eps


# Random inputs.


def random_orthonormal(rng, size, rank):
  """Columns drawn uniformly from the Stiefel manifold, (size, rank)."""
  q, r = np.linalg.qr(rng.standard_normal((size, rank)))
  return q * np.sign(np.diag(r))


def random_matrix(rng, rows, columns, condition=1.0):
  """A (rows, columns) matrix, rows >= columns, norm 1, given condition."""
  values = np.geomspace(1.0, 1.0 / condition, columns)
  left = random_orthonormal(rng, rows, columns)
  return (left * values) @ random_orthonormal(rng, columns, columns).T


def random_factors(rng, m, n, rank, condition=1.0):
  """Factors (m, rank), (n, rank), each with the given condition number."""
  left = random_matrix(rng, m, rank, condition)
  return left, random_matrix(rng, n, rank, condition)


def random_gauge(rng, rank, condition=1.0, scale=1.0):
  """An invertible matrix K and K^-T, both accurate to rounding."""
  # From its SVD, because the rounding of np.linalg.inv would be multiplied
  # by the condition number and show as a change of Z.
  values = scale * np.geomspace(1.0, 1.0 / condition, rank)
  u = random_orthonormal(rng, rank, rank)
  v = random_orthonormal(rng, rank, rank)
  return (u * values) @ v.T, (u / values) @ v.T


def change_gauge(factors, gauge):
  """(L, R) -> (L K, R K^-T); ``gauge`` is the pair (K, K^-T)."""
  return factors[0] @ gauge[0], factors[1] @ gauge[1]


def balance(factors):
  """The balanced SVD gauge (U s^1/2, V s^1/2) of the same Z."""
  left, right = factors
  q_l, c_l = np.linalg.qr(left)
  q_r, c_r = np.linalg.qr(right)
  u, s, vt = np.linalg.svd(c_l @ c_r.T)
  return (q_l @ u) * np.sqrt(s), (q_r @ vt.T) * np.sqrt(s)


def relative_error(value, target):
  """max |value - target| / max |target|; 1 stands in for a target of zero."""
  value, target = np.asarray(value, np.float64), np.asarray(target, np.float64)
  assert value.shape == target.shape, (value.shape, target.shape)
  if not np.all(np.isfinite(value)):
    return np.inf
  scale = np.max(np.abs(target), initial=0.0)
  return np.max(np.abs(value - target), initial=0.0) / (scale or 1.0)


# Geometry of one module.


def numerical_range(matrix, eps=EPS):
  """Orthonormal basis of the column space that the rounding ``eps`` leaves."""
  u, s, _ = np.linalg.svd(np.asarray(matrix, np.float64), full_matrices=False)
  return u[:, s > matrix.shape[-1] * eps * s[0]] if s[0] > 0 else u[:, :0]


def projector(matrix, eps=EPS):
  """The orthogonal projector on the numerical range, (size, size)."""
  basis = numerical_range(matrix, eps)
  return basis @ basis.T


@dataclasses.dataclass(frozen=True)
class Point:
  """A point of the manifold without any gauge.

  The projectors are kept beside Z because they say more at a zero factor:
  where ``left`` is zero Z is zero, but the range of ``right`` still tells
  which part of a gradient is observed.
  """

  z: np.ndarray  # (m, n)
  left_projector: np.ndarray  # (m, m)
  right_projector: np.ndarray  # (n, n)

  @classmethod
  def from_factors(cls, left, right, eps=EPS):
    left, right = np.asarray(left, np.float64), np.asarray(right, np.float64)
    return cls(left @ right.T, projector(left, eps), projector(right, eps))

  @property
  def transpose(self):
    return Point(self.z.T, self.right_projector, self.left_projector)

  def project(self, g):
    """P_L G + G P_R - P_L G P_R, of (m, n) or of a stack of them."""
    pl, pr = self.left_projector, self.right_projector
    return pl @ g + g @ pr - pl @ g @ pr

  def retract(self, tangent, rank):
    """The best approximation of Z + T of the given rank."""
    u, s, vt = np.linalg.svd(self.z + tangent, full_matrices=False)
    u, s, vt = u[:, :rank], s[:rank], vt[:rank]
    return Point((u * s) @ vt, u @ u.T, vt.T @ vt)


def best_approximation(z, rank):
  """The best approximation of the given rank, (m, n)."""
  u, s, vt = np.linalg.svd(z, full_matrices=False)
  return (u[:, :rank] * s[:rank]) @ vt[:rank]


def horizontal_lift(factors, steps):
  """The shortest (dL, dR) with the same dL R^T + L dR^T.

  Solves M W + W N = dR^T R - L^T dL, M = L^T L, N = R^T R, for all entries of
  W at once; where that is singular (zero factors), in the least squares sense.
  """
  (left, right), (dl, dr) = factors, steps
  identity = np.eye(left.shape[-1])
  # Row-major vec: vec(M W) = (M kron I) vec W, vec(W N) = (I kron N^T) vec W.
  system = np.kron(left.T @ left, identity) + np.kron(identity, right.T @ right)
  target = dr.T @ right - left.T @ dl
  w = np.linalg.lstsq(system, target.ravel(), rcond=None)[0]
  w = w.reshape(target.shape)
  return dl + left @ w, dr - right @ w.T


def align(factors, old):
  """Turns both factors by the orthogonal matrix that brings them nearest."""
  u, _, vt = np.linalg.svd(factors[0].T @ old[0] + factors[1].T @ old[1])
  return factors[0] @ (u @ vt), factors[1] @ (u @ vt)


# Clipping.


def clipped_mean(
  points: Sequence[Point],
  grads: Sequence[np.ndarray],
  extras: Sequence[np.ndarray] = (),
  *,
  l2_clip_norm: float,
  normalize_by: float = 1.0,
  padding: np.ndarray | None = None,
):
  """Projects, clips by the norm over everything, sums and divides.

  Args:
    points: One for each module.
    grads: Gradients with respect to Z, (batch, m, n) for each module.
    extras: Gradients of the other leaves, (batch, ...) each.
    l2_clip_norm: The bound on one example's norm over modules and extras.
    normalize_by: The divisor of the sum.
    padding: (batch,) booleans, True for rows that are no example.

  Returns:
    A list of tangents (m, n), a list like ``extras`` without the batch axis,
    and the (batch,) norms before the clipping.
  """
  batch = len([*grads, *extras][0])
  keep = np.ones(batch, bool) if padding is None else ~np.asarray(padding)
  for leaf in (*grads, *extras):
    keep = keep & np.all(np.isfinite(leaf.reshape(batch, -1)), axis=1)

  def clean(leaf):
    return np.where(keep.reshape((-1,) + (1,) * (leaf.ndim - 1)), leaf, 0.0)

  tangents = [p.project(clean(g)) for p, g in zip(points, grads, strict=True)]
  leaves = [*tangents, *(clean(e) for e in extras)]
  norms = np.sqrt(
    sum(np.sum(x.reshape(batch, -1) ** 2, axis=1) for x in leaves)
  )
  coefficients = l2_clip_norm / np.maximum(norms, l2_clip_norm)
  sums = [np.tensordot(coefficients, x, 1) / normalize_by for x in leaves]
  return sums[: len(tangents)], sums[len(tangents) :], norms
