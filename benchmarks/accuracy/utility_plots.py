"""Plots of the runs of ``utility.py``, drawn from what is stored."""

import json
import pathlib
import statistics
from typing import Any

from benchmarks.accuracy import utility_tables
from benchmarks.common import plots, runner

# Changes in the words of the pages.
CHANGES = {
  'gauge=100.0': 'factorisation of condition 100',
  'scale=0.25': 'alpha / r of 0.25',
  'scale=4.0': 'alpha / r of 4',
  'start=balanced': 'balanced start',
  'start=spectral': 'spectral start',
  'rate / 3': 'a third of the rate',
  'rate * 3': 'three times the rate',
}
REFERENCE = 'dp-adamw'
NEAREST = ('prism', 'prism, decayed', 'dp-adamw, decayed', 'lora+')


def draw(find: runner.Find, folder: pathlib.Path) -> None:
  """All plots, from the rows of runs and of comparisons in a folder."""
  found = {x: utility_tables.rows_of(find, x) for x in utility_tables.TITLES}
  found = {part: found[part] for part in ('core-1', *found) if found[part]}
  others = found.pop('rest-3') + found['core-3']
  accuracies(
    {utility_tables.TITLES[x]: rows for x, rows in found.items()},
    {row.method: row for row in others},
    folder / 'utility_accuracy.png',
  )
  epsilons(
    [found[x] for x in ('core-1', 'core-3', 'core-6')],
    folder / 'utility_epsilon.png',
  )
  rates(found['core-3'], folder / 'utility_rates.png')
  path = folder / 'accuracy_compared.json'
  compared = json.loads(path.read_text('utf-8'))['rows']
  for part in ('nuisances', 'options'):
    points: dict[str, dict[str, float]] = {}
    for row in compared:
      if row['part'] == part:
        points.setdefault(row['method'], {})[row['change']] = row['points']
    changes(points, folder / f'utility_{part}.png')


def above(row: Any, reference: Any) -> tuple[float, float]:
  """Points above another method on the same seeds, and their standard error."""
  points = [
    100 * (run['test accuracy'] - reference.runs[seed]['test accuracy'])
    for seed, run in row.runs.items()
    if seed in reference.runs
  ]
  error = statistics.stdev(points) / len(points) ** 0.5
  return statistics.mean(points), error


def accuracies(
  parts: dict[str, list], others: dict[str, Any], path: pathlib.Path
) -> None:
  """Points above DP-AdamW on one axis: by task, and of the other methods."""
  reference = others.pop(REFERENCE)
  rest = {
    method: above(row, reference)
    for method, row in others.items()
    if method not in NEAREST
  }
  rest = dict(sorted(rest.items(), key=lambda item: item[1]))
  figure, (top, bottom) = plots.panels(
    6.4, 2, sharex=True, height_ratios=(len(parts), 0.55 * len(rest))
  )
  for place, rows in enumerate(reversed(parts.values())):
    of = {row.method: row for row in rows}
    for rank, method in enumerate(NEAREST):
      if method in of:
        points, error = above(of[method], of[REFERENCE])
        top.errorbar(
          points, place + 0.27 - 0.18 * rank, xerr=error, ms=5,
          label=plots.name(method), **plots.look(method),
        )  # fmt: skip
  top.set_yticks(range(len(parts)), list(parts)[::-1])
  top.set_ylim(-0.6, len(parts) - 0.4)
  legend(figure, top)
  for place, (method, (points, error)) in enumerate(rest.items()):
    if points > -9:
      bottom.errorbar(points, place, xerr=error, ms=5, **plots.look(method))
    else:
      bottom.annotate(
        f'◀ {points:.1f}', (-8.9, place), va='center',
        color=plots.colour(method),
      )  # fmt: skip
  bottom.set_yticks(range(len(rest)), map(plots.name, rest))
  bottom.set(
    xlim=(-9, 9), ylim=(-0.6, len(rest) - 0.4),
    title='SST-2, epsilon 3, other methods',
    xlabel=f'points above {plots.name(REFERENCE)}, with one standard error',
  )  # fmt: skip
  plots.finish((top, bottom))
  for axis in (top, bottom):
    axis.axvline(0, color='k', lw=0.8)
  plots.save(figure, path)


def legend(figure: Any, axis: Any) -> None:
  """All methods in one line."""
  plots.legend(
    figure, axis, 'upper center', ncols=5, fontsize=8, columnspacing=1.2,
    handletextpad=0.2,
  )  # fmt: skip


def labelled(
  axis: Any, ends: dict[str, tuple[float, float]], x: float, gap: float
) -> None:
  """Names of methods beside the ends of their lines."""
  heights = plots.apart([y for _, y in ends.values()], gap)
  for method, y in zip(ends, heights, strict=True):
    axis.annotate(
      plots.name(method), (x, y), va='center', color=plots.colour(method),
      annotation_clip=False,
    )  # fmt: skip


def epsilons(parts: list[list], path: pathlib.Path) -> None:
  """Mean accuracy against epsilon, with its standard error over seeds."""
  found: dict[str, dict[float, list[float]]] = {}
  for rows in parts:
    for row in rows:
      epsilon = next(iter(row.runs.values())).get('epsilon', 3.0)
      of_method = found.setdefault(row.method, {})
      of_method[epsilon] = [100 * x for x in row.accuracies]
  figure, axis = plots.panels(3.6)
  ends = {}
  for method, row in found.items():
    at = sorted(row)
    means = [statistics.mean(row[e]) for e in at]
    error = [statistics.stdev(row[e]) / len(row[e]) ** 0.5 for e in at]
    axis.errorbar(at, means, error, capsize=3, ms=5, **plots.look(method))
    ends[method] = at[-1], means[-1]
  labelled(axis, ends, 6.6, 0.42)
  axis.set(xscale='log', xlabel='epsilon', ylabel='accuracy, %')
  axis.set_xticks([1, 2, 3, 6], ['1', '2', '3', '6'])
  axis.minorticks_off()
  axis.annotate(
    'bars: one standard error\nof the mean over seeds', (1, 79.4), color='0.3'
  )
  plots.finish([axis])
  plots.save(figure, path)


def rates(rows: list, path: pathlib.Path) -> None:
  """Tuning accuracy against the learning rate; collapses are written."""
  figure, axis = plots.panels(3.8)
  best = max(100 * max(row.tuning.values()) for row in rows)
  bottom = best - 4
  ticks = sorted({rate for row in rows for rate in row.tuning})
  ends = {}
  fallen: dict[float, int] = {}
  for row in rows:
    points = {rate: 100 * row.tuning[rate] for rate in sorted(row.tuning)}
    if max(points.values()) < bottom:
      continue
    axis.plot(
      list(points), list(points.values()), ms=5, **plots.look(row.method)
    )
    for rate, accuracy in points.items():
      if accuracy < bottom:
        fallen[rate] = fallen.get(rate, 0) + 1
        axis.annotate(
          f'▼ {accuracy:.0f} %', (0.95 * rate, bottom + 0.2 * fallen[rate]),
          ha='right', color=plots.colour(row.method),
        )  # fmt: skip
    seen = {rate: max(x, bottom + 0.7) for rate, x in points.items()}
    ends[row.method] = max(seen), seen[max(seen)]
  labelled(axis, ends, 1.25 * ticks[-1], 0.27)
  axis.set(
    xscale='log', xlabel='peak learning rate', ylim=(bottom, best + 0.3),
    ylabel='accuracy on the tuning rows, %',
  )  # fmt: skip
  axis.set_xticks(ticks, [f'{x:g}' for x in ticks])
  axis.minorticks_off()
  plots.finish([axis])
  plots.save(figure, path)


def changes(found: dict[str, dict[str, float]], path: pathlib.Path) -> None:
  """Points that each change makes, on one axis.

  A change that costs far more than the others would flatten them: it is
  written at the edge.
  """
  names = list(dict.fromkeys(name for row in found.values() for name in row))
  edge = 2.0
  height = (0.42 if len(found) > 1 else 0.25) * len(names) + 1
  figure, axis = plots.panels(height)
  for place, change in enumerate(reversed(names)):
    far = []
    for rank, (method, row) in enumerate(found.items()):
      if change not in row:
        continue
      points = row[change]
      offset = 0.24 - 0.12 * rank if len(found) > 1 else 0
      if points < -edge:
        far.append((points, method))
      else:
        look = {**plots.look(method), 'linestyle': ''}
        axis.plot(
          points, place + offset, ms=6, label=plots.name(method), **look
        )
    for rank, (points, method) in enumerate(far):
      axis.annotate(
        f'◀ {points:.1f}', (-edge + 0.05 + 0.44 * rank, place), va='center',
        color=plots.colour(method),
      )  # fmt: skip
  texts = [CHANGES.get(x, x.replace('=', ' ').replace('_', ' ')) for x in names]
  axis.set_yticks(range(len(names)), texts[::-1])
  axis.set(
    xlim=(-edge, edge), ylim=(-0.6, len(names) - 0.4),
    xlabel='change of the accuracy, points',
  )  # fmt: skip
  if len(found) > 1:
    legend(figure, axis)
  plots.finish([axis])
  axis.axvline(0, color='k', lw=0.8)
  plots.save(figure, path)
