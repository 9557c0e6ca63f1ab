"""Where the coordinates X_L, X_R sit in a gradient, and how they are stored."""

import style
from matplotlib import pyplot as plt
from matplotlib.patches import Rectangle

M, N, R = 7.0, 10.0, 2.0
CORE, SIDE_L, SIDE_R = '#F3D19A', '#E8C1D6', style.PUBLIC


def box(axis, x, y, width, height, colour, text='', **options):
  """A block whose upper left corner is (x, y), y downwards."""
  options = {'linewidth': 1, 'edgecolor': '0.2'} | options
  axis.add_patch(Rectangle((x, y), width, height, facecolor=colour, **options))
  axis.text(x + width / 2, y + height / 2, text, ha='center', va='center')


def side(axis, x, y, text, **options):
  axis.text(x, y, text, ha='center', va='center', color='0.25', **options)


def gradient(axis):
  box(axis, 0, 0, R, R, CORE, '$D$')
  box(axis, R, 0, N - R, R, SIDE_R, "$X_R'^\\top$")
  box(axis, 0, R, R, M - R, SIDE_L, '$X_L$')
  box(axis, R, R, N - R, M - R, '0.93',
      'normal to the manifold:\nno step of the factors\nleads here',
      edgecolor='0.8')  # fmt: skip
  axis.add_patch(Rectangle((0, 0), N, M, fill=False, linewidth=1.3))
  side(axis, R / 2, -0.45, '$Q_R$')
  side(axis, (R + N) / 2, -0.45, '$Q_R^{\\perp}$')
  side(axis, -0.6, R / 2, '$Q_L$')
  side(axis, -0.6, (R + M) / 2, '$Q_L^{\\perp}$')
  side(
    axis, N / 2, M + 0.7, 'a gradient $G$ ($m \\times n$), in the bases of $Z$'
  )


def stored(axis, x, y=-1.5):
  """The two leaves, in the same bases, with what the projection removes."""
  box(axis, x, y, R, R, 'white', '0', hatch='////', edgecolor='0.7')
  box(axis, x, y + R, R, M - R, SIDE_L, '$X_L$')
  axis.add_patch(Rectangle((x, y), R, M, fill=False, linewidth=1.3))
  side(axis, x + R / 2, y - 0.45, 'leaf left, $m \\times r$')
  side(axis, x + R / 2, y + M + 1.2,
       'hatched: noise alone,\nprojected away\nafter the sum')  # fmt: skip
  x += 2.9 * R
  box(axis, x, y, R, R, CORE, '$D^\\top$')
  box(axis, x, y + R, R, N - R, SIDE_R, "$X_R'$")
  axis.add_patch(Rectangle((x, y), R, N, fill=False, linewidth=1.3))
  side(axis, x + R / 2, y - 0.45, 'leaf right, $n \\times r$')
  side(axis, x + 1.4 * R, y + N / 2, '$\\}\\;X_R$')


def main():
  figure, axis = plt.subplots(figsize=(style.WIDTH, 3.5), layout='constrained')
  gradient(axis)
  stored(axis, N + 3.4)
  axis.annotate(
    '', (N + 2.7, M / 2), (N + 0.7, M / 2),
    arrowprops={'arrowstyle': '-|>', 'color': '0.4', 'linewidth': 1.5},
  )  # fmt: skip
  side(axis, N + 1.7, M / 2 - 0.9, 'clip, noise,\nstore')
  axis.set(xlim=(-1.2, N + 13.2), ylim=(9, -2.5), aspect='equal')
  axis.axis('off')
  style.save(figure, __file__)


if __name__ == '__main__':
  main()
