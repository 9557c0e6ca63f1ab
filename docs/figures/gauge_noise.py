"""The noise that reaches Z from three gauges of the same factors.

Left: the orbit of factors with one product, in the smallest case (1 x 1, rank
1), with the same noise disc at three of its points. Right: noise on the factors
of one 2 x 2 matrix of rank 1, in the orthonormal tangent coordinates of Z, from
draws that go through the library; its third coordinate, the core, is left out.
"""

import jax
import numpy as np
import style
from matplotlib import pyplot as plt

from prism_optax import fixed_rank
from prism_optax.fixed_rank import _lifts

GAUGES = {1 / 3: style.BLUE, 1.0: style.ORANGE, 3.0: style.PURPLE}
STDDEV, DRAWS = 0.12, 400


def orbit(axis):
  c = np.linspace(0.2, 4.6, 300)
  axis.plot(c, 1 / c, color='0.2')
  for change in (-0.3, 0.3):
    axis.plot(c, (1 + change) / c, color='0.2', linewidth=0.6, linestyle='--')
  circle = np.linspace(0, 2 * np.pi, 100)
  for gauge, colour in GAUGES.items():
    x = gauge + 2 * STDDEV * np.cos(circle)
    y = 1 / gauge + 2 * STDDEV * np.sin(circle)
    axis.fill(x, y, color=colour, alpha=0.55, linewidth=0)
  axis.annotate('$lr = 1.3\\,z$', (2.1, 0.75), color='0.2')
  axis.annotate('$lr = 0.7\\,z$', (0.35, 0.12), color='0.2')
  axis.set(
    xlim=(0, 4), ylim=(0, 4), aspect='equal', xlabel='$l$', ylabel='$r$',
    title='one $z$, three gauges',
  )  # fmt: skip
  axis.annotate('$lr = z$', (1.35, 1.0), color='0.2')


def other(unit):
  """The unit vector across ``unit`` (2, 1)."""
  return np.array([-unit[1, 0], unit[0, 0]])


def seen(gauge, noise):
  """Coordinates (X_L, X_R') of the change of Z, for noise on the factors."""
  left = np.array([[0.8], [0.6]])
  right = np.array([[0.6], [-0.8]])
  pair = fixed_rank.Factors(gauge * left, right / gauge)
  frame = fixed_rank.frame(pair)
  steps = fixed_rank.Factors(*noise)
  in_factors = jax.vmap(_lifts.tangent_from_steps, (None, 0))(frame, steps)
  in_tangent = jax.vmap(fixed_rank.project, (None, 0))(
    frame, fixed_rank.Tangent(*noise)
  )
  across = other(np.asarray(frame.left)), other(np.asarray(frame.right))
  return [
    [np.asarray(x)[..., 0] @ u for x, u in zip(t, across, strict=True)]
    for t in (in_factors, in_tangent)
  ]


def ellipses(factors, tangent):
  rng = np.random.default_rng(0)
  circle = np.linspace(0, 2 * np.pi, 200)
  for gauge, colour in GAUGES.items():
    noise = STDDEV * rng.normal(size=(2, DRAWS, 2, 1)).astype(np.float32)
    for axis, (x, y), axes in zip(
      (factors, tangent), seen(gauge, noise), ((1 / gauge, gauge), (1, 1)),
      strict=True,
    ):  # fmt: skip
      axis.plot(x, y, '.', color=colour, markersize=2, alpha=0.5)
      radii = 2 * STDDEV * np.array(axes)
      axis.plot(
        radii[0] * np.cos(circle), radii[1] * np.sin(circle), color=colour,
        label=f'$l$ times {"1/3" if gauge < 1 else f"{gauge:g}"}',
      )  # fmt: skip
  for axis, title in (
    (factors, 'noise on the factors'),
    (tangent, 'noise in the tangent space'),
  ):
    axis.set(
      xlim=(-1.25, 1.25), ylim=(-1.25, 1.25), aspect='equal', title=title,
      xlabel='$X_L$',
    )  # fmt: skip
  factors.set_ylabel("$X_R'$")
  tangent.annotate('three gauges,\none circle', (-1.1, 0.6), color='0.2')


def main():
  figure, axes = plt.subplots(
    1, 3, figsize=(style.WIDTH, 2.9), layout='constrained'
  )
  orbit(axes[0])
  ellipses(*axes[1:])
  figure.legend(
    *axes[1].get_legend_handles_labels(), loc='outside lower center', ncols=3
  )
  style.save(figure, __file__)


if __name__ == '__main__':
  main()
