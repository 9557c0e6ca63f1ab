"""Plot of ``paper_diagnostics.py``, and the axes of its settings."""

import pathlib
from typing import Any

import numpy as np

from benchmarks.common import plots

GAUGES = (0.25, 0.5, 1.0, 2.0, 4.0)
SWEEP = np.logspace(-3, 3, 61)
SIGMAS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
METHODS = ('factors', 'PRISM')
COLOURS = {'factors': plots.RED, 'PRISM': plots.BLUE}
NAMES = {'factors': 'on the factors', 'PRISM': 'prism'}


def plot(rows: list[dict[str, Any]], path: pathlib.Path) -> None:
  """The three issues side by side, each in one panel."""

  def of(issue: str, method: str, *names: str, **more: str) -> np.ndarray:
    """Columns of the rows of an issue and a method."""
    wanted = {'issue': issue, 'method': method, **more}
    found = [x for x in rows if all(x.get(k) == v for k, v in wanted.items())]
    return np.array([[x[name] for x in found] for name in names])

  figure, (clip, noise, step) = plots.panels(3.4, columns=3)
  for method, colour in COLOURS.items():
    for when, look in (('first', 'o-'), ('last', 's--')):
      clip.plot(
        GAUGES, 100 * of('clip', method, 'clipped fraction', step=when)[0],
        look, color=colour, ms=5, mfc=colour if when == 'first' else 'white',
        label=f'{NAMES[method]}, {when} step',
      )  # fmt: skip
    low, middle, high = of('noise', method, 'low', 'median', 'high')
    noise.fill_between(SWEEP, low, high, color=colour, alpha=0.3, lw=0)
    noise.plot(SWEEP, middle, color=colour)
    (out,) = of('preconditioned', method, 'out')
    step.plot(SIGMAS, out, 'o-', color=colour, ms=5)
  clip.set(
    xscale='log', xlabel='gauge $c$', ylim=(0, 80),
    title='clipped examples, %',
  )  # fmt: skip
  noise.set(
    xscale='log', yscale='log', xlabel='gauge $c$',
    title='noise in Z / stddev',
  )  # fmt: skip
  noise.set_xticks([1e-3, 1, 1e3], ['0.001', '1', '1,000'])
  plots.numbers(noise.yaxis, '{x:,.0f}')
  step.set(
    xscale='log', xlabel='noise multiplier', ylim=(0, 10),
    title='after the preconditioner',
  )  # fmt: skip
  for axis, ticks in ((clip, GAUGES), (step, SIGMAS)):
    axis.set_xticks(ticks, [f'{t:g}' for t in ticks])
  for axis in (clip, noise, step):
    axis.minorticks_off()
  plots.finish((clip, noise, step))
  figure.legend(loc='outside upper center', ncols=2)
  plots.save(figure, path)
