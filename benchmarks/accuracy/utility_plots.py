"""Plots of the utility benchmark."""

import pathlib
import statistics

import matplotlib as mpl
import numpy as np

from benchmarks.common import plots

mpl.use('agg')
from matplotlib import pyplot as plt


def accuracies(parts: dict[str, list], path: pathlib.Path) -> None:
  """Test accuracy of every method in every part, all seeds and their mean."""
  across = min(3, len(parts))
  down = -(-len(parts) // across)
  figure, axes = plt.subplots(
    down, across, figsize=(4.2 * across, 2.9 * down), squeeze=False
  )
  for ax in axes.flat[len(parts) :]:
    ax.axis('off')
  for ax, (part, rows) in zip(axes.flat, parts.items(), strict=False):
    for place, row in enumerate(reversed(rows)):
      values = 100 * np.asarray(row.accuracies)
      ax.plot(values, [place] * len(values), 'o', ms=4, alpha=0.4,
              color=plots.colour(row.method))  # fmt: skip
      ax.plot(
        values.mean(), place, '|', ms=16, mew=3, color=plots.colour(row.method)
      )
    ax.set_yticks(range(len(rows)), [row.method for row in reversed(rows)])
    ax.set_title(part, fontsize=9)
    ax.set_xlabel('accuracy, %')
    ax.grid(axis='x', alpha=0.3)
  figure.tight_layout()
  figure.savefig(path, dpi=100)
  plt.close(figure)


def epsilons(parts: list[list], path: pathlib.Path) -> None:
  """Mean accuracy against epsilon, with its standard error over seeds."""
  figure, ax = plt.subplots(figsize=(5.6, 3.8))
  found: dict[str, dict] = {}
  for rows in parts:
    for row in rows:
      epsilon = next(iter(row.runs.values()))['run']['epsilon']
      found.setdefault(row.method, {})[epsilon] = np.asarray(row.accuracies)
  largest = max(e for row in found.values() for e in row if e is not None)
  place = {None: 2.5 * largest}
  for method, row in found.items():
    epsilons = sorted(row, key=lambda e: place.get(e, e))
    error = [
      row[e].std(ddof=1) / len(row[e]) ** 0.5 if len(row[e]) > 1 else 0.0
      for e in epsilons
    ]
    ax.errorbar(
      [place.get(e, e) for e in epsilons],
      [100 * row[e].mean() for e in epsilons],
      [100 * x for x in error],
      fmt='o-', ms=4, capsize=2, label=method, color=plots.colour(method),
    )  # fmt: skip
  ticks = sorted({place.get(e, e) for row in found.values() for e in row})
  names = ['none' if x == place[None] else f'{x:g}' for x in ticks]
  ax.set_xscale('log')
  ax.set_xticks(ticks, names)
  ax.minorticks_off()
  ax.set(xlabel='epsilon', ylabel='accuracy, %')
  ax.grid(alpha=0.3)
  ax.legend(frameon=False, fontsize=8)
  figure.tight_layout()
  figure.savefig(path, dpi=100)
  plt.close(figure)


def rates(rows: list, path: pathlib.Path) -> None:
  """Tuning accuracy against the learning rate."""
  figure, ax = plt.subplots(figsize=(5.6, 3.6))
  for row in rows:
    x = sorted(row.tuning)
    ax.plot(x, [100 * row.tuning[rate] for rate in x], 'o-',
            label=row.method, color=plots.colour(row.method))  # fmt: skip
  ax.set(xscale='log', xlabel='peak learning rate', ylim=(70, None),
         ylabel='accuracy on the tuning rows, %')  # fmt: skip
  ax.grid(alpha=0.3)
  ax.legend(frameon=False, fontsize=8)
  figure.tight_layout()
  figure.savefig(path, dpi=100)
  plt.close(figure)


def curves(rows: list, every: int, path: pathlib.Path) -> None:
  """Loss on public rows, and signal to noise, of the first seed."""
  figure, (left, right) = plt.subplots(1, 2, figsize=(8.6, 3.4))
  for row in rows:
    run = row.runs[min(row.runs)]
    loss = run['tuning loss']
    left.plot(every * np.arange(1, len(loss) + 1), loss, label=row.method,
              color=plots.colour(row.method))  # fmt: skip
    ratio = np.asarray(run['signal']) / max(run['noise'], 1e-30)
    smooth = [statistics.mean(ratio[max(0, t - 9) : t + 1])
              for t in range(len(ratio))]  # fmt: skip
    right.plot(smooth, color=plots.colour(row.method))
  left.set(xlabel='step', ylabel='cross-entropy on public rows, nats')
  right.set(
    xlabel='step',
    ylabel='clipped mean over noise, norms\n(mean of 10 steps)',
    yscale='log',
  )
  left.legend(frameon=False, fontsize=8)
  for ax in (left, right):
    ax.grid(alpha=0.3)
  figure.tight_layout()
  figure.savefig(path, dpi=100)
  plt.close(figure)


def changes(found: dict[str, dict], path: pathlib.Path) -> None:
  """Points that each change of what should not matter makes."""
  names = list(dict.fromkeys(name for row in found.values() for name in row))
  figure, ax = plt.subplots(figsize=(6.4, 0.42 * len(names) + 1.2))
  width = 0.8 / len(found)
  for i, (method, row) in enumerate(found.items()):
    places = np.arange(len(names)) + (i - (len(found) - 1) / 2) * width
    ax.barh(places, [100 * row.get(name, 0) for name in names], width,
            label=method, color=plots.colour(method))  # fmt: skip
  ax.set_yticks(range(len(names)), names)
  ax.invert_yaxis()
  ax.axvline(0, color='k', lw=0.8)
  ax.set(xlabel='change of accuracy, points (linear up to 2)')
  ax.set_xscale('symlog', linthresh=2)
  ax.set_xticks(
    [-20, -10, -5, -2, -1, 0, 1, 2], [-20, -10, -5, -2, -1, 0, 1, 2]
  )
  ax.minorticks_off()
  ax.grid(axis='x', alpha=0.3)
  ax.legend(frameon=False, fontsize=8)
  figure.tight_layout()
  figure.savefig(path, dpi=100)
  plt.close(figure)
