"""Plots of the runs of ``utility.py``, drawn from what is stored."""

import json
import pathlib
from typing import Any

import matplotlib as mpl
import numpy as np

from benchmarks.accuracy import utility_tables
from benchmarks.common import plots, runner

mpl.use('agg')
from matplotlib import pyplot as plt

# A method this many points below the best is named at the edge, not drawn: it
# would flatten all the others.
FAR = 20.0


def draw(find: runner.Find, folder: pathlib.Path) -> None:
  """All plots, from the rows of runs and of comparisons in a folder."""
  found = {x: utility_tables.rows_of(find, x) for x in utility_tables.TITLES}
  found = {part: rows for part, rows in found.items() if rows}
  accuracies(
    {utility_tables.TITLES[x]: rows for x, rows in found.items()},
    folder / 'utility_accuracy.png',
  )
  by_epsilon = ('core-1', 'core-3', 'core-6', 'nonprivate')
  epsilons([found[x] for x in by_epsilon], folder / 'utility_epsilon.png')
  rates(found['core-3'], folder / 'utility_rates.png')
  path = folder / 'accuracy_compared.json'
  compared = json.loads(path.read_text('utf-8'))['rows']
  for part in ('nuisances', 'options'):
    points: dict[str, dict[str, Any]] = {}
    for row in compared:
      if row['part'] == part:
        of_method = points.setdefault(row['method'], {})
        of_method[row['change']] = row['points'] / 100
    changes(points, folder / f'utility_{part}.png')


def accuracies(parts: dict[str, list], path: pathlib.Path) -> None:
  """Test accuracy of every method in every part, all seeds and their mean."""
  across = min(3, len(parts))
  down = -(-len(parts) // across)
  figure, axes = plt.subplots(
    down, across, figsize=(4.4 * across, 2.9 * down), squeeze=False,
    layout='constrained',
  )  # fmt: skip
  for ax in axes.flat[len(parts) :]:
    ax.axis('off')
  for ax, (part, rows) in zip(axes.flat, parts.items(), strict=False):
    best = max(100 * np.mean(row.accuracies) for row in rows)
    for place, row in enumerate(reversed(rows)):
      values = 100 * np.asarray(row.accuracies)
      shown = plots.colour(row.method)
      if values.mean() < best - FAR:
        ax.annotate(f'◀ {values.mean():.1f} %', (0.02, place), color=shown,
                    xycoords=ax.get_yaxis_transform(), va='center')  # fmt: skip
        continue
      ax.plot(values, [place] * len(values), 'o', ms=4, alpha=0.4, color=shown)
      ax.plot(values.mean(), place, '|', ms=14, mew=3, color=shown)
    ax.set_yticks(range(len(rows)), [row.method for row in reversed(rows)])
    # Few methods do not fly apart.
    ax.set_ylim(-0.7, max(len(rows), 4) - 0.3)
    low, high = ax.get_xlim()
    ax.set_xlim(min(low, high - 1), high)
    ax.set_title(part, fontsize=10, loc='left')
    ax.set_xlabel('accuracy, %')
  plots.finish(axes.flat)
  plots.save(figure, path, 100)
  plt.close(figure)


def epsilons(parts: list[list], path: pathlib.Path) -> None:
  """Mean accuracy against epsilon, with its standard error over seeds.

  What is not private stands in a panel of its own: it has no place on the axis.
  """
  found: dict[str, dict] = {}
  for rows in parts:
    for row in rows:
      epsilon = next(iter(row.runs.values())).get('epsilon', 3.0)
      found.setdefault(row.method, {})[epsilon] = 100 * np.asarray(
        row.accuracies
      )
  figure, axes = plt.subplots(
    1, 2, figsize=(8.2, 4.8), width_ratios=(4, 1), sharey=True,
    layout='constrained',
  )  # fmt: skip
  for ax, private in zip(axes, (True, False), strict=True):
    ends = {}
    for method, row in found.items():
      at = sorted(e for e in row if e is not None) if private else [None]
      at = [e for e in at if e in row]
      if not at:
        continue
      means = [row[e].mean() for e in at]
      error = [
        row[e].std(ddof=1) / len(row[e]) ** 0.5 if len(row[e]) > 1 else 0.0
        for e in at
      ]
      ax.errorbar([e or 0 for e in at], means, error, capsize=3, ms=5,
                  **plots.look(method))  # fmt: skip
      ends[method] = at[-1] or 0, means[-1]
    heights = plots.apart([y for _, y in ends.values()], 0.36)
    for (method, (x, _)), y in zip(ends.items(), heights, strict=True):
      ax.annotate(
        method, (1.08 * x if private else 0.15, y), va='center', fontsize=9,
        color=plots.colour(method), annotation_clip=False,
      )  # fmt: skip
  axes[0].set(xscale='log', xlabel='epsilon', ylabel='accuracy, %')
  axes[0].set_xticks([1, 2, 3, 6], ['1', '2', '3', '6'])
  axes[0].minorticks_off()
  axes[0].annotate(
    'bars: one standard error\nof the mean over seeds', (1, 79.2),
    color='0.3', fontsize=9,
  )  # fmt: skip
  axes[1].set(xlim=(-0.4, 1.2), xlabel='not private')
  axes[1].set_xticks([])
  plots.finish(axes)
  plots.save(figure, path, 130)
  plt.close(figure)


def rates(rows: list, path: pathlib.Path) -> None:
  """Tuning accuracy against the learning rate: all of it, and the top."""
  figure, axes = plt.subplots(1, 2, figsize=(9.6, 4), layout='constrained')
  for ax in axes:
    for row in rows:
      x = sorted(row.tuning)
      ax.plot(x, [100 * row.tuning[rate] for rate in x], label=row.method,
              ms=5, **plots.look(row.method))  # fmt: skip
    ticks = sorted({rate for row in rows for rate in row.tuning})
    ax.set(xscale='log', xlabel='peak learning rate')
    ax.set_xticks(ticks, [f'{x:g}' for x in ticks])
    ax.minorticks_off()
  best = max(100 * max(row.tuning.values()) for row in rows)
  axes[0].set_title('all', loc='left')
  axes[0].set_ylabel('accuracy on the tuning rows, %')
  axes[1].set_title('the best four points, enlarged', loc='left')
  axes[1].set_ylim(best - 4, best + 0.3)
  plots.finish(axes)
  handles, labels = axes[0].get_legend_handles_labels()
  figure.legend(handles, labels, loc='outside right center', frameon=False)
  plots.save(figure, path, 120)
  plt.close(figure)


def changes(found: dict[str, dict], path: pathlib.Path) -> None:
  """Points that each change makes: bars of one method, a table of several.

  The largest changes are ten times the usual ones: on one axis either these or
  those would not be seen, so they are written out.
  """
  names = list(dict.fromkeys(name for row in found.values() for name in row))
  if len(found) == 1:
    ((method, row),) = found.items()
    figure, ax = plt.subplots(
      figsize=(6.8, 0.36 * len(names) + 1.2), layout='constrained'
    )
    values = [100 * row[name] for name in names]
    bars = ax.barh(names, values, color=plots.colour(method))
    ax.bar_label(bars, [f'{x:+.2f}' for x in values], padding=3)
    ax.margins(x=0.15)
    ax.invert_yaxis()
    ax.axvline(0, color='k', lw=0.8)
    ax.set(xlabel=f'change of the accuracy of {method}, points')
    plots.finish([ax])
    plots.save(figure, path, 120)
    plt.close(figure)
    return
  figure, ax = plt.subplots(
    figsize=(2 + 1.25 * len(found), 0.42 * len(names) + 1.6),
    layout='constrained',
  )
  table = np.array(
    [[100 * row.get(name, np.nan) for row in found.values()] for name in names]
  )

  def written(value):  # Without the zero below zero.
    return '-' if np.isnan(value) else f'{round(value, 1) + 0.0:+.1f}'

  # Orange loses, blue gains; three points and more have the full colour.
  image = ax.imshow(table, 'PuOr', vmin=-3, vmax=3, aspect='auto')
  for (i, j), value in np.ndenumerate(table):
    shade = 'white' if abs(value) > 2 else 'black'
    ax.text(j, i, written(value), ha='center', va='center', color=shade)
  ax.set_yticks(range(len(names)), names)
  ax.set_xticks(range(len(found)), [x.replace(', ', ',\n') for x in found])
  ax.xaxis.tick_top()
  ax.tick_params(length=0)
  ax.spines[:].set_visible(False)
  bar = figure.colorbar(image, ax=ax, extend='both', pad=0.02)
  bar.set_label('change of accuracy, points')
  plots.save(figure, path, 120)
  plt.close(figure)
