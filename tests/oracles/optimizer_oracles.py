"""Whole optimizers in dense float64, to compare trajectories with.

`PrismOracle` never chooses a frame: its state is made of objects that do not
depend on the gauge, m x n tangent matrices and symmetric operators on the
column spaces, so that it cannot share a mistake about frames with code that
keeps rank x rank blocks. `PaperOracle` is the paper's optimizer in the
authors' factor coordinates.
"""

import dataclasses

import numpy as np

from tests.oracles import oracles


@dataclasses.dataclass(frozen=True)
class Options:
  """Hyper-parameters of the adaptive step."""

  b1: float = 0.9
  b2: float = 0.999
  eps: float = 1e-8
  floor_factor: float = 1.0  # 0 means no floor.
  bias_correction: bool = False
  max_condition_number: float = 1e4

  def first_correction(self, count):
    return 1 - self.b1**count if self.bias_correction else 1.0


def _basis(projector):
  """Orthonormal columns that span the range of an orthogonal projector."""
  w, q = np.linalg.eigh(projector)
  return q[:, w > 0.5]


def _rotation(old, new):
  """The partial isometry nearest to P_old P_new: turns range into range."""
  u, cosines, vt = np.linalg.svd(old @ new)
  keep = cosines > 1e-9  # The others belong to the orthogonal complements.
  return u[:, keep] @ vt[keep]


def _inverse_root(second, noise, projector, options):
  """(floored second moment)^-1/2 on the range of the projector."""
  q = _basis(projector)
  if q.shape[1] == 0:
    return np.zeros_like(projector)
  floor = options.floor_factor * np.trace(noise) / q.shape[1]
  w, v = np.linalg.eigh(q.T @ second @ q)
  w = np.maximum(np.maximum(w, 0.0), floor)
  w = np.maximum(w, np.max(w) / options.max_condition_number)
  v = q @ v
  return (v / (np.sqrt(w) + options.eps)) @ v.T


class _ModuleMoments:
  """Moments of one module, all zero at first.

  first: dense tangent matrix (m, n).
  second_l, noise_l: (n, n), the operators Q_R V_L Q_R^T and Q_R N_L Q_R^T.
  second_r, noise_r: (m, m), the operators Q_L V_R Q_L^T and Q_L N_R Q_L^T.
  """

  def __init__(self, point):
    m, n = point.z.shape
    self.point = point
    self.first = np.zeros((m, n))
    self.second_l, self.noise_l = np.zeros((2, n, n))
    self.second_r, self.noise_r = np.zeros((2, m, m))

  def transport(self, point):
    """Carries the moments to the tangent space and ranges at the new point."""
    o_l = _rotation(self.point.right_projector, point.right_projector)
    o_r = _rotation(self.point.left_projector, point.left_projector)
    self.first = point.project(self.first)
    self.second_l, self.noise_l = (
      o_l.T @ x @ o_l for x in (self.second_l, self.noise_l)
    )
    self.second_r, self.noise_r = (
      o_r.T @ x @ o_r for x in (self.second_r, self.noise_r)
    )
    self.point = point

  def update(self, tangent, variance, options):
    m, n = tangent.shape
    pl, pr = self.point.left_projector, self.point.right_projector
    # What the right range sees of T (outer block and core), and the left one.
    seen_l, seen_r = tangent @ pr, pl @ tangent
    b1, b2 = options.b1, options.b2
    self.first = b1 * self.first + (1 - b1) * tangent
    self.second_l = b2 * self.second_l + (1 - b2) * seen_l.T @ seen_l / m
    self.second_r = b2 * self.second_r + (1 - b2) * seen_r @ seen_r.T / n
    self.noise_l = b2 * self.noise_l + (1 - b2) * variance * pr
    self.noise_r = b2 * self.noise_r + (1 - b2) * variance * pl

  def direction(self, count, options):
    pl, pr = self.point.left_projector, self.point.right_projector
    first = self.first / options.first_correction(count)
    c2 = 1 - options.b2**count
    on_right = _inverse_root(self.second_l / c2, self.noise_l / c2, pr, options)
    on_left = _inverse_root(self.second_r / c2, self.noise_r / c2, pl, options)
    core = pl @ first @ pr
    outer_l = first @ pr - core
    outer_r = pl @ first - core
    return (
      outer_l @ on_right
      + on_left @ outer_r
      + (on_left @ core + core @ on_right) / 2
    )


class PrismOracle:
  """The optimizer on points of the manifold and on ordinary arrays."""

  def __init__(self, points, ranks, extras=(), options=None):
    self.points, self.ranks = list(points), list(ranks)
    self.extras = [np.array(e, np.float64) for e in extras]
    self.options = options or Options()
    self.count = 0
    self._modules = [_ModuleMoments(p) for p in points]
    self._first = [np.zeros_like(e) for e in self.extras]
    self._second = [np.zeros_like(e) for e in self.extras]
    self._noise = 0.0

  def directions(self, tangents, extras=(), stddev=0.0):
    """Directions for noisy means: (m, n) tangents, then extra leaves."""
    options, variance = self.options, stddev**2
    self.count += 1
    out = []
    for state, point, t in zip(
      self._modules, self.points, tangents, strict=True
    ):
      state.transport(point)
      state.update(point.project(t), variance, options)
      out.append(state.direction(self.count, options))
    self._noise = options.b2 * self._noise + (1 - options.b2) * variance
    c1, c2 = options.first_correction(self.count), 1 - options.b2**self.count
    for k, grad in enumerate(extras):
      b1, b2 = options.b1, options.b2
      self._first[k] = b1 * self._first[k] + (1 - b1) * grad
      self._second[k] = b2 * self._second[k] + (1 - b2) * grad**2
      v, noise = self._second[k] / c2, self._noise / c2
      v = np.maximum(np.maximum(v, 0.0), options.floor_factor * noise)
      out.append(self._first[k] / c1 / (np.sqrt(v) + options.eps))
    return out[: len(self.points)], out[len(self.points) :]

  def step(
    self, learning_rate, tangents, extras=(), stddev=0.0, weight_decay=0.0
  ):
    """Moves the points and the extras against the directions."""
    modules, leaves = self.directions(tangents, extras, stddev)
    self.points = [
      # Z is a tangent vector at itself, so a decay is one, too.
      p.retract(-learning_rate * (u + weight_decay * p.z), rank)
      for p, u, rank in zip(self.points, modules, self.ranks, strict=True)
    ]
    self.extras = [
      e - learning_rate * u for e, u in zip(self.extras, leaves, strict=True)
    ]


@dataclasses.dataclass(frozen=True)
class PaperOptions:
  """The authors' settings, named as in the golden files."""

  learning_rate: float = 0.02
  stddev: float = 0.0  # Per coordinate of the mean: sigma C / b.
  adaptive: bool = True
  b1: float = 0.9
  b2: float = 0.999
  eps: float = 1e-8
  floor_mode: str = 'geometry'
  floor_factor: float = 1.0
  max_condition_number: float = 1e4

  @classmethod
  def of_golden(cls, config):
    """Of the entries ``cfg_*`` of a golden file."""
    c = {k: v.item() for k, v in config.items() if v.ndim == 0}
    floor_mode = ('none', 'scalar', 'geometry')[c['floor_mode']]
    stddev = c['sigma'] * c['C'] / c['batch_size']
    return cls(
      c['lr'], stddev, bool(c['adaptive']), c['b1'], c['b2'], c['eps'],
      floor_mode, c['factor'], c['cond_max'],
    )  # fmt: skip


def _power(matrix, exponent):
  w, v = np.linalg.eigh(matrix)
  return (v * w**exponent) @ v.T


class PaperOracle:
  """The paper's optimizer for one module, in horizontal factor coordinates."""

  def __init__(self, factors, options):
    self.factors, self.options = factors, options
    rank = factors[0].shape[1]
    self.count = 0
    self._first = [np.zeros_like(f) for f in factors]
    self._second = [np.zeros((rank, rank)) for _ in factors]

  def noise(self, draws):
    """The tangent noise (m, n) that standard normal (m, r), (n, r) make."""
    (left, right), (u, v) = self.factors, draws
    outer = u - oracles.projector(left) @ u
    dl = outer @ _power(right.T @ right, -0.5)
    dr = v @ _power(left.T @ left, -0.5)
    return self.options.stddev * (dl @ right.T + left @ dr.T)

  def _direction(self, steps):
    o, (left, right) = self.options, self.factors
    m = len(left)
    variance = o.stddev**2
    # What unit tangent noise looks like in the rank space of each factor.
    noise = (
      (m - left.shape[1]) / m * np.linalg.inv(right.T @ right),
      np.linalg.inv(left.T @ left),
    )
    self.count += 1
    c1, c2 = 1 - o.b1**self.count, 1 - o.b2**self.count
    out = []
    for k, (g, covariance) in enumerate(zip(steps, noise, strict=True)):
      self._first[k] = o.b1 * self._first[k] + (1 - o.b1) * g
      self._second[k] = o.b2 * self._second[k] + (1 - o.b2) * g.T @ g / len(g)
      v = self._second[k] / c2
      scalar = o.floor_factor * variance
      floor = {
        'none': 0.0,
        'scalar': scalar,
        'geometry': max(scalar, scalar * np.trace(covariance) / len(v)),
      }[o.floor_mode]
      w, q = np.linalg.eigh(v)
      w = np.maximum(np.maximum(w, 0.0) + o.eps, floor)
      w = np.maximum(w, np.max(w) / o.max_condition_number)
      out.append(self._first[k] / c1 @ (q / np.sqrt(w)) @ q.T)
    return tuple(out)

  def step(self, tangent):
    """One step for the noisy mean, a dense tangent (m, n)."""
    left, right = self.factors
    # Some lift of T; the horizontal one does not depend on which.
    dl = tangent @ np.linalg.pinv(right).T
    dr = (tangent - dl @ right.T).T @ np.linalg.pinv(left).T
    steps = oracles.horizontal_lift(self.factors, (dl, dr))
    if self.options.adaptive:
      steps = self._direction(steps)
    dl, dr = (-self.options.learning_rate * s for s in steps)
    z = oracles.best_approximation(
      left @ right.T + dl @ right.T + left @ dr.T, left.shape[1]
    )
    u, s, vt = np.linalg.svd(z)
    rank = left.shape[1]
    root = np.sqrt(s[:rank])
    new = (u[:, :rank] * root, vt[:rank].T * root)
    self.factors = oracles.align(new, self.factors)
