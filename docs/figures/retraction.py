"""A step in the tangent space and the way back, in three dimensions.

Left: symmetric 2 x 2 matrices of rank 1 are a cone; the library takes a step
from one of them. Right: how far plain addition of factor steps ends from
Z + T, over the distance of the retraction, for a 40 x 30 matrix of rank 4.
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


def embedded(frame, x):
  """The dense matrix of a tangent vector."""
  return x.left @ frame.right.mT + frame.left @ x.right.mT


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
    return np.asarray(unit @ unit.T + embedded(frame, x))

  grid = np.array(
    [
      [place(at(tangent(a, t))) for t in np.linspace(-0.5, 1.15, 5)]
      for a in np.linspace(-0.45, 0.45, 5)
    ]
  )
  axis.plot_surface(
    *np.moveaxis(grid, -1, 0), alpha=0.5, color='gold', linewidth=0
  )
  step = tangent(0.0, 0.95)
  steps = _lifts.lift(frame, step)
  points = {
    '$Z$': np.asarray(unit @ unit.T),
    '$Z + T$': at(step),
    '$Z^+$': np.asarray(
      (lambda f: f.left @ f.right.T)(fixed_rank.retraction(frame, step))
    ),
    'factors added': np.asarray(
      (z.left + steps.left) @ (z.right + steps.right).T
    ),
  }
  marks = dict(
    zip(points, zip('oDoX', ('k', 'k', style.BLUE, style.RED), strict=True),
        strict=True)
  )  # fmt: skip
  for name, matrix in points.items():
    marker, colour = marks[name]
    x, y, z = place(matrix)
    axis.plot([x], [y], [z], marker, color=colour, markersize=5)
    axis.text(x, y, z, f'  {name}', color=colour, va='center')
  start, end, near, added = (np.array(place(p)) for p in points.values())
  for a, b, look, colour in (
    (start, end, '-', 'k'), (end, near, ':', style.BLUE),
    (end, added, ':', style.RED),
  ):  # fmt: skip
    axis.plot(*np.stack([a, b]).T, look, color=colour, linewidth=1.3)
  axis.set(xlim=(-1, 1), ylim=(-1, 1), zlim=(0, 1.3))
  axis.set_box_aspect((1, 1, 0.7), zoom=1.2)
  axis.view_init(elev=14, azim=-38)
  axis.axis('off')
  axis.set_title(
    'matrices of rank 1 (a cone),\ntheir tangent plane at $Z$, and a step'
  )


def further(gauge):
  """Distance from Z + T of the added factors, over the retraction's."""
  rng = np.random.default_rng(0)
  q = [np.linalg.qr(rng.normal(size=(k, 4)))[0] for k in (40, 30)]
  root = np.diag(np.array([2.0, 1.5, 1.2, 1.0]) ** 0.5)
  sides = (gauge, 1 / gauge)
  pair = fixed_rank.Factors(
    *(c * jnp.asarray(x @ root) for c, x in zip(sides, q, strict=True))
  )
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
    steps = _lifts.lift(frame, x)
    added = (pair.left + steps.left) @ (pair.right + steps.right).T
    moved = z + embedded(frame, x)
    return jnp.linalg.norm(added - moved) / jnp.linalg.norm(
      best.left @ best.right.T - moved
    )

  return [at(size) for size in SIZES]


def ratios(axis):
  for gauge, text, colour in (
    (1.0, 'balanced factors $L$, $R$', style.BLUE),
    (10.0, 'factors $10\\,L$, $R / 10$', style.PURPLE),
  ):
    axis.plot(SIZES, further(gauge), color=colour, label=text)
  axis.axhline(1, color='k', lw=1)
  axis.annotate('$Z^+$', (1.1, 1), va='center', annotation_clip=False)
  axis.set(
    xscale='log', xlabel='step $\\|T\\| / \\|Z\\|$', ylim=(0.95, 1.6),
    title='distance of the added factors from\n$Z + T$, over the distance of'
    ' $Z^+$',
  )  # fmt: skip
  axis.set_xticks([0.001, 0.01, 0.1, 1], ['0.001', '0.01', '0.1', '1'])
  axis.legend(loc='upper left', title='adding steps to')


def main():
  figure = plt.figure(figsize=(style.WIDTH, 3.2), layout='constrained')
  left, right = figure.subfigures(1, 2, width_ratios=(1, 1))
  with jax.enable_x64(True):
    cone(left.add_subplot(projection='3d', computed_zorder=False))
    ratios(right.subplots())
  style.save(figure, __file__)


if __name__ == '__main__':
  main()
