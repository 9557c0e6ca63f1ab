"""Plot of the runs of ``language_model.py``, drawn from what is stored."""

import pathlib

import numpy as np

from benchmarks.accuracy import language_tables
from benchmarks.common import plots


def draw(rows: list[language_tables.Row], path: pathlib.Path) -> None:
  """PRISM against DP-AdamW, by task, length and epsilon."""
  groups = language_tables.groups(rows)
  order = list(language_tables.TASKS)
  labels, places = [], []
  figure, axes = plots.panels(3.6, columns=2, sharey=True)
  columns = (
    (language_tables.losses, -1.0, 'lower loss, nats per token'),
    (language_tables.exact, 100.0, 'more right answers in a hundred'),
  )
  keys = sorted(
    groups, key=lambda x: (order.index(x[0]), x[1], -x[4]), reverse=True
  )
  for task, steps, batch, layers, epsilon in keys:
    methods = groups[task, steps, batch, layers, epsilon]
    found = [language_tables.compared(methods, x) for x, *_ in columns]
    if not found[0]:
      continue
    place = len(labels)
    places.append(place)
    labels.append(
      f'{language_tables.TASKS[task]}, {steps} steps, epsilon {epsilon:g}'
    )
    for axis, (_, sign, _), difference in zip(
      axes, columns, found, strict=True
    ):
      axis.errorbar(
        sign * difference['difference'], place,
        xerr=np.abs(sign) * difference['standard error'], ms=5,
        **plots.look('prism'),
      )  # fmt: skip
  axes[0].set_yticks(places, labels)
  axes[0].set_ylim(-0.6, len(labels) - 0.4)
  for axis, (_, _, text) in zip(axes, columns, strict=True):
    axis.set_xlabel(text)
  plots.finish(axes)
  for axis in axes:
    axis.axvline(0, color='k', lw=0.8)
  figure.suptitle(
    'prism compared with DP-AdamW, with one standard error: right is better',
    fontsize=9,
  )
  plots.save(figure, path)
