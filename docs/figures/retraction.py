"""A step in the tangent space and the way back, in three dimensions.

Left: symmetric 2 x 2 matrices of rank 1 are a cone; the library takes a step
from one of them. Right: how far the retraction is from the step, and plain
addition of factor steps from the retraction, for a 40 x 30 matrix of rank 4.
"""

import jax
import jax.numpy as jnp
import numpy as np
import style
from matplotlib import pyplot as plt

from prism_optax import fixed_rank
from prism_optax.fixed_rank import _lifts

SIZES = np.logspace(-3, 0, 25)


def place(matrix):
  """Orthonormal coordinates of a symmetric matrix; the cone's axis is up."""
  a, b, c = matrix[0, 0], matrix[0, 1], matrix[1, 1]
  return (a - c) / 2**0.5, 2**0.5 * b, (a + c) / 2**0.5


def cone(axis):
  angle, height = np.meshgrid(
    np.linspace(0, 2 * np.pi, 60), np.linspace(0, 1.2, 12)
  )
  axis.plot_surface(
    height * np.cos(angle), height * np.sin(angle), height, alpha=0.16,
    color=style.BLUE, linewidth=0, antialiased=True,
  )  # fmt: skip
  theta = -1.1 / 2
  unit = jnp.array([[np.cos(theta)], [np.sin(theta)]])
  across = jnp.array([[-np.sin(theta)], [np.cos(theta)]])
  z = fixed_rank.Factors(unit, unit)
  frame = fixed_rank.frame(z)

  def tangent(along, turn):
    """``along Z + turn (u v^T + v u^T) / sqrt 2``."""
    x = turn / 2**0.5 * across
    return fixed_rank.Tangent(x, along * unit + x)

  def at(x):
    return np.asarray(unit @ unit.T + _lifts.embed(frame, x))

  grid = np.array(
    [
      [place(at(tangent(a, t))) for t in np.linspace(-0.5, 1.15, 5)]
      for a in np.linspace(-0.45, 0.45, 5)
    ]
  )
  axis.plot_surface(
    *np.moveaxis(grid, -1, 0), alpha=0.5, color='gold', linewidth=0
  )
  x = tangent(0.0, 0.95)
  steps = _lifts.lift(frame, x, horizontal=True)
  points = {
    '$Z$': np.asarray(unit @ unit.T),
    '$Z + T$': at(x),
    '$Z^+$, nearest': np.asarray(
      (lambda f: f.left @ f.right.T)(fixed_rank.retraction(frame, x))
    ),
    'factors added': np.asarray(
      (z.left + steps.left) @ (z.right + steps.right).T
    ),
  }
  marks = dict(zip(points, ('ko', 'kD', 'bo', 'rX'), strict=True))
  for name, matrix in points.items():
    axis.plot(*([v] for v in place(matrix)), marks[name], markersize=6,
              label=name)  # fmt: skip
  start, end, near, added = (np.array(place(p)) for p in points.values())
  for a, b, look in ((start, end, 'k-'), (end, near, 'b:'), (end, added, 'r:')):
    axis.plot(*np.stack([a, b]).T, look, linewidth=1.3)
  axis.set(xlim=(-1, 1), ylim=(-1, 1), zlim=(0, 1.3))
  axis.set_box_aspect((1, 1, 0.7), zoom=1.2)
  axis.view_init(elev=14, azim=-38)
  axis.axis('off')
  axis.legend(loc='upper left', bbox_to_anchor=(-0.05, 1.0))
  axis.set_title('Rank-1 matrices, their tangent plane, a step')


def errors():
  """Relative distances for steps of each size over the norm of Z."""
  rng = np.random.default_rng(0)
  q = [np.linalg.qr(rng.normal(size=(k, 4)))[0] for k in (40, 30)]
  root = np.diag(np.array([2.0, 1.5, 1.2, 1.0]) ** 0.5)
  pair = fixed_rank.Factors(*(jnp.asarray(x @ root) for x in q))
  frame = fixed_rank.frame(pair)
  noise = fixed_rank.Tangent(
    *(jnp.asarray(rng.normal(size=x.shape)) for x in q)
  )
  unit = fixed_rank.project(frame, noise)
  z = pair.left @ pair.right.T
  length = jnp.linalg.norm(z) / jnp.hypot(*map(jnp.linalg.norm, unit))

  @jax.jit
  def at(size):
    x = fixed_rank.Tangent(*(size * length * y for y in unit))
    best = fixed_rank.retraction(frame, x)
    steps = _lifts.lift(frame, x, horizontal=True)
    added = (pair.left + steps.left) @ (pair.right + steps.right).T
    best = best.left @ best.right.T
    moved = z + _lifts.embed(frame, x)
    differences = (best - moved, added - best)
    return [jnp.linalg.norm(d) / jnp.linalg.norm(z) for d in differences]

  return np.array([at(size) for size in SIZES]).T


def rates(axis):
  away, added = errors()
  axis.loglog(SIZES, away, color='k', label='$Z^+$ from $Z + T$ (Eq. 23)')
  axis.loglog(SIZES, added, color=style.RED, label='factors added, from $Z^+$')
  axis.set(
    xlabel='$\\|T\\| / \\|Z\\|$', ylabel='distance / $\\|Z\\|$',
    title='What the way back costs', ylim=(1e-7, 3),
  )  # fmt: skip
  axis.legend(loc='upper left')


def main():
  figure = plt.figure(figsize=(9.5, 4.1), layout='constrained')
  left, right = figure.subfigures(1, 2, width_ratios=(1.15, 1))
  with jax.enable_x64(True):
    cone(left.add_subplot(projection='3d', computed_zorder=False))
    rates(right.subplots())
  style.save(figure, __file__)


if __name__ == '__main__':
  main()
