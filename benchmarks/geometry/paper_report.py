"""Table and plot of ``paper_diagnostics.py``, and the axes that they share."""

import pathlib

import matplotlib as mpl
import numpy as np

mpl.use('agg')
from matplotlib import pyplot as plt

GAUGES = (0.25, 0.5, 1.0, 2.0, 4.0)
SWEEP = np.logspace(-3, 3, 61)
SIGMAS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
METHODS = ('factors', 'PRISM')
COLOURS = {'factors': 'tab:red', 'PRISM': 'tab:blue'}


def plot(one, two, three, path: pathlib.Path) -> None:
  """The three issues side by side; arguments as for :func:`table`."""
  bands, closed, best = two
  figure, axes = plt.subplots(2, 3, figsize=(15, 8), layout='constrained')
  for row, (k, label) in enumerate(
    ((0, 'clipped fraction'), (1, 'mean clip coefficient'))
  ):
    axis = axes[row, 0]
    for method in METHODS:
      for when, style in (('first', '-o'), ('last', '--s')):
        axis.plot(
          GAUGES, [x[k] for x in one[method][when]], style,
          color=COLOURS[method], label=f'{method}, {when} step',
        )  # fmt: skip
    axis.set(xscale='log', xlabel='gauge c', ylabel=label, ylim=(-0.05, 1.05))
    axis.legend()
  axes[0, 0].set_title('I: what the clip does depends on the gauge')
  axis = axes[0, 1]
  for name, colour in (*COLOURS.items(), ('bilinear', 'tab:orange')):
    low, middle, high = bands[name]
    axis.fill_between(SWEEP, low, high, color=colour, alpha=0.3)
    label = 'bilinear (/ stddev squared)' if name == 'bilinear' else name
    axis.plot(SWEEP, middle, color=colour, label=f'{label}, 10 to 90 %')
    axis.plot(SWEEP, closed[name], 'k:', linewidth=1)
  axis.axvline(best, color='gray', linewidth=0.8)
  axis.set(
    xscale='log', yscale='log', xlabel='gauge c', ylabel='noise in Z / stddev',
    title='II: the same Z, another noise (dotted: closed forms)',
  )  # fmt: skip
  axis.legend()
  axis = axes[1, 1]
  ratio = np.array(bands['factors'][1]) / np.array(bands['PRISM'][1])
  axis.plot(SWEEP, ratio, color='tab:red')
  axis.axhline(1, color='tab:blue')
  axis.set(
    xscale='log', yscale='log', xlabel='gauge c',
    ylabel='noise in Z: factors / PRISM',
  )  # fmt: skip
  for method in METHODS:
    raw, out = np.array(three[method]).T
    axes[0, 2].plot(SIGMAS, out, '-o', color=COLOURS[method], label=method)
    axes[1, 2].plot(SIGMAS, out / raw, '-o', color=COLOURS[method],
                    label=method)  # fmt: skip
  axes[0, 2].set(
    xscale='log', ylim=(0, None), xlabel='noise multiplier',
    ylabel='preconditioned noise in Z', title='III: adaptive steps and noise',
  )  # fmt: skip
  axes[1, 2].set(
    xscale='log', yscale='log', xlabel='noise multiplier',
    ylabel='amplification by the preconditioner',
  )  # fmt: skip
  axes[0, 2].legend()
  axes[1, 2].legend()
  for axis, ticks in (
    *((a, GAUGES) for a in axes[:, 0]), *((a, SIGMAS) for a in axes[:, 2])
  ):  # fmt: skip
    axis.minorticks_off()
    axis.set_xticks(ticks, [f'{t:g}' for t in ticks])
  figure.savefig(path, dpi=110)


def table(one, two, three) -> None:
  """Prints all numbers.

  Args:
    one: Clipped fraction and mean coefficient by method, step and gauge.
    two: Bands of the noise in Z by gauge, the closed forms, the best gauge.
    three: Raw and preconditioned noise by method and noise multiplier.
  """
  print('\nI. clipped fraction / mean coefficient')
  print(f'{"":22}' + ''.join(f'{f"c = {c:g}":>15}' for c in GAUGES))
  for method in METHODS:
    for when in ('first', 'last'):
      cells = ''.join(f'{f"{f:.2f} / {c:.2f}":>15}' for f, c in
                      one[method][when])  # fmt: skip
      print(f'{f"{method}, {when} step":22}{cells}')
  bands, closed, best = two
  print('\nII. norm of the noise in Z over its stddev, median (closed form)')
  picks = [0, 15, 30, 45, 60]
  print(f'{"":22}' + ''.join(f'{f"c = {SWEEP[i]:.2g}":>18}' for i in picks))
  for name in ('factors', 'bilinear', 'PRISM'):
    cells = ''.join(
      f'{f"{bands[name][1][i]:.1f} ({closed[name][i]:.1f})":>18}' for i in picks
    )
    print(f'{name:22}{cells}')
  measured = SWEEP[int(np.argmin(bands['factors'][1]))]
  print(
    f'smallest for the factors at c = {measured:.2f}, by formula {best:.2f}'
  )
  print('\nIII. preconditioned noise in Z (amplification)')
  print(f'{"noise multiplier":22}' + ''.join(f'{s:>16g}' for s in SIGMAS))
  for method in METHODS:
    cells = ''.join(f'{f"{b:.2f} ({b / a:.0f})":>16}' for a, b in
                    three[method])  # fmt: skip
    print(f'{method:22}{cells}')
