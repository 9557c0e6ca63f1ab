"""Plot of ``paper_diagnostics.py``, and the axes of its settings."""

import pathlib
from typing import Any

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


def plot(rows: list[dict[str, Any]], path: pathlib.Path) -> None:
  """The three issues side by side."""

  def of(issue: str, method: str, *names: str, **more: str) -> np.ndarray:
    """Columns of the rows of an issue and a method."""
    wanted = {'issue': issue, 'method': method, **more}
    found = [x for x in rows if all(x.get(k) == v for k, v in wanted.items())]
    return np.array([[x[name] for x in found] for name in names])

  (best,) = (x['gauge'] for x in rows if x['issue'] == 'best gauge')
  figure, axes = plt.subplots(2, 3, figsize=(12, 7), layout='constrained')
  red, blue = COLOURS.values()
  for row, label in enumerate(('clipped fraction', 'mean clip coefficient')):
    axis = axes[row, 0]
    for method in METHODS:
      for when, style in (('first', '-o'), ('last', '--s')):
        axis.plot(
          GAUGES, of('clip', method, label.replace(' clip', ''), step=when)[0],
          style, color=COLOURS[method],
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
    low, middle, high, closed = of(
      'noise', name, 'low', 'median', 'high', 'closed form'
    )
    axis.fill_between(SWEEP, low, high, color=colour, alpha=0.3, lw=0)
    axis.plot(SWEEP, middle, color=colour)
    axis.plot(SWEEP, closed, 'k:', linewidth=1)
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
  dp, ours = (of('noise', x, 'median')[0] for x in METHODS)
  axis.plot(SWEEP, dp / ours, color=red)
  axis.axhline(1, color=blue)
  axis.set(
    xscale='log', yscale='log', xlabel='gauge c',
    ylabel='noise in Z: factors / PRISM',
  )  # fmt: skip
  _named(axis, ('equal', (1.3e-3, 1.15), blue))
  for method, style in zip(METHODS, ('-o', '--s'), strict=True):
    raw, out = of('preconditioned', method, 'in', 'out')
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
