"""Table and plot of ``paper_diagnostics.py``, and the axes that they share."""

import pathlib

import matplotlib as mpl
import numpy as np

from benchmarks.common import plots

mpl.use('agg')
from matplotlib import pyplot as plt

GAUGES = (0.25, 0.5, 1.0, 2.0, 4.0)
SWEEP = np.logspace(-3, 3, 61)
SIGMAS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
METHODS = ('factors', 'PRISM')
COLOURS, BILINEAR = {'factors': '#D55E00', 'PRISM': '#0072B2'}, '#E69F00'


def _named(axis, *labels):
  """Direct labels: text, place, colour."""
  for text, place, colour in labels:
    axis.annotate(text, place, color=colour, fontsize=11)


def plot(one, two, three, path: pathlib.Path) -> None:
  """The three issues side by side; arguments as for :func:`table`."""
  bands, closed, best = two
  figure, axes = plt.subplots(2, 3, figsize=(12, 7), layout='constrained')
  red, blue = COLOURS.values()
  for row, (k, label) in enumerate(
    ((0, 'clipped fraction'), (1, 'mean clip coefficient'))
  ):
    axis = axes[row, 0]
    for method in METHODS:
      for when, style in (('first', '-o'), ('last', '--s')):
        axis.plot(
          GAUGES, [x[k] for x in one[method][when]], style,
          color=COLOURS[method],
        )  # fmt: skip
    axis.set(xscale='log', xlabel='gauge c', ylabel=label, ylim=(0, 1))
  # One curve of a pair is named on either side of it.
  _named(
    axes[0, 0], ('factors, first step', (0.4, 0.61), red),
    ('PRISM, first step', (1.1, 0.53), blue),
    ('factors, last step', (0.4, 0.29), red),
    ('PRISM, last step (dashed)', (0.3, 0.13), blue),
  )  # fmt: skip
  _named(
    axes[1, 0], ('PRISM, last step (dashed)', (0.3, 0.91), blue),
    ('factors, last step', (1.1, 0.775), red),
    ('PRISM, first step', (0.25, 0.725), blue),
    ('factors, first step', (0.45, 0.56), red),
  )  # fmt: skip
  axes[0, 0].set_title('I: what the clip does depends on the gauge')
  axis = axes[0, 1]
  for name, colour in (*COLOURS.items(), ('bilinear', BILINEAR)):
    low, middle, high = bands[name]
    axis.fill_between(SWEEP, low, high, color=colour, alpha=0.3, lw=0)
    axis.plot(SWEEP, middle, color=colour)
    axis.plot(SWEEP, closed[name], 'k:', linewidth=1)
  axis.plot([best] * 2, [20, 4e3], color='gray', linewidth=0.8)
  axis.set(
    xscale='log', yscale='log', xlabel='gauge c', ylabel='noise in Z / stddev',
    title='II: the same Z, another noise',
  )  # fmt: skip
  _named(
    axis, ('factors', (2.5e-2, 2e3), red), ('PRISM', (60, 26), blue),
    ('product of both\n(/ stddev²)', (1.3e-3, 42), '#8A5A00'),
    (f'best c = {best:.1f}', (2.1, 3e3), '0.3'),
    ('dotted: closed forms', (4e-2, 2e4), '0.3'),
    ('bands: 10 to 90 % of draws', (4e-2, 1.15e4), '0.3'),
  )  # fmt: skip
  axis = axes[1, 1]
  ratio = np.array(bands['factors'][1]) / np.array(bands['PRISM'][1])
  axis.plot(SWEEP, ratio, color=red)
  axis.axhline(1, color=blue)
  axis.set(
    xscale='log', yscale='log', xlabel='gauge c',
    ylabel='noise in Z: factors / PRISM',
  )  # fmt: skip
  _named(axis, ('equal', (1.3e-3, 1.15), blue))
  for method, style in zip(METHODS, ('-o', '--s'), strict=True):
    raw, out = np.array(three[method]).T
    axes[0, 2].plot(SIGMAS, out, style, color=COLOURS[method])
    axes[1, 2].plot(SIGMAS, out / raw, style, color=COLOURS[method])
  axes[0, 2].set(
    xscale='log', ylim=(0, 110), xlabel='noise multiplier',
    ylabel='preconditioned noise in Z', title='III: adaptive steps and noise',
  )  # fmt: skip
  axes[1, 2].set(
    xscale='log', yscale='log', xlabel='noise multiplier',
    ylabel='amplification by the preconditioner',
  )  # fmt: skip
  _named(axes[0, 2], ('factors', (1, 87), red), ('PRISM', (1, 52), blue))
  axes[1, 2].annotate(
    'factors (line) and\nPRISM (dashed):\nthe same to 3 %', (0.9, 70),
    color='0.3', fontsize=11,
  )  # fmt: skip
  for axis, ticks in (
    *((a, GAUGES) for a in axes[:, 0]), *((a, SIGMAS) for a in axes[:, 2])
  ):  # fmt: skip
    axis.minorticks_off()
    axis.set_xticks(ticks, [f'{t:g}' for t in ticks])
  axes[1, 2].set_yticks([5, 10, 20, 50, 100], ['5', '10', '20', '50', '100'])
  plots.finish(axes.flat)
  plots.save(figure, path, 110)
  plt.close(figure)


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
