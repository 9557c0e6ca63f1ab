"""One style for all plots: size, fonts, and a name and colour for each method.

A page of the documentation is 700 pixels wide. A plot that is ``WIDTH`` inches
wide is shown there at 100 pixels per inch, so its text is as large as the
page's.
"""

import io
import pathlib
from collections.abc import Iterable
from typing import Any

import matplotlib as mpl
import matplotlib.ticker
from matplotlib.figure import Figure
from PIL import Image

WIDTH = 7.0
mpl.rcParams.update(
  {
    'font.size': 9,
    'axes.titlesize': 10,
    'axes.titlelocation': 'left',
    'axes.spines.top': False,
    'axes.spines.right': False,
    'legend.frameon': False,
    'figure.dpi': 100,
    'savefig.dpi': 160,
  }
)

# Stored results name methods as the scripts do; pages and plots, like this.
NAMES = {
  'prism, paper mode': 'published_prism',
  'prism, decayed': 'prism, weight decay 1',
  'prism, muon': 'contrib.prism_muon',
  'dp-adamw': 'DP-AdamW',
  'dp-adamw, decayed': 'DP-AdamW, weight decay 1, warm-up',
  'dp-adambc': 'DP-AdamBC',
  'dp-muon': 'dp_muon, full matrices',
  'lora+': 'LoRA+',
  'ffa': 'FFA-LoRA',
  'lamb': 'LAMB',
  'lora-rite': 'LoRA-RITE',
  'lora-rite, spectral start': 'LoRA-RITE, spectral start',
}
# Okabe and Ito, for all eyes.
BLUE, RED, ORANGE, PURPLE = '#0072B2', '#D55E00', '#E69F00', '#CC79A7'
GREY = '#777777'
# One colour a method, the same in all plots.
COLOURS = {
  'prism': '#0072B2',
  'prism, paper mode': '#009E73',
  'prism, muon': '#44AA99',
  # With more decay: the same colour, dashed.
  'prism, decayed': '#0072B2',
  'dp-adamw, decayed': '#D55E00',
  'dp-adamw': '#D55E00',
  'lora+': '#E69F00',
  'ffa': '#CC79A7',
  'linear probe': '#000000',
  'lamb': '#7F3C8D',
  'lora-rite': '#A6761D',
  'lora-rite, spectral start': '#D8B365',
  'dp-adambc': '#666666',
  'dp-muon': '#B2182B',
}


def name(method: str) -> str:
  """The name of a method on pages."""
  return NAMES.get(method, method)


def colour(method: str) -> str:
  """The colour of a method, grey for one that has none."""
  return COLOURS.get(method, '#999999')


def look(method: str) -> dict[str, Any]:
  """Colour, line and marker of a method, arguments of ``Axes.plot``."""
  dashed = method.endswith(', decayed')
  return {
    'color': colour(method),
    'linestyle': '--' if dashed else '-',
    'marker': 's' if dashed else 'o',
    'markerfacecolor': 'white' if dashed else colour(method),
  }


def finish(axes: Iterable[Any]) -> None:
  """What all axes share: no frame above and right, a faint grid."""
  for axis in axes:
    axis.grid(alpha=0.25, linewidth=0.6)
    axis.set_axisbelow(True)


def panels(
  height: float, rows: int = 1, columns: int = 1, **options: Any
) -> tuple[Any, Any]:
  """A figure as wide as a page, and its axes; for ``Figure.subplots``."""
  figure = Figure(figsize=(WIDTH, height), layout='constrained')
  return figure, figure.subplots(rows, columns, **options)


def legend(figure: Any, axis: Any, place: str, **options: Any) -> None:
  """Each label of an axis once, above or below the figure."""
  found = dict(zip(*axis.get_legend_handles_labels()[::-1], strict=True))
  figure.legend(found.values(), found, loc=f'outside {place}', **options)


def numbers(axis: Any, form: str) -> None:
  """Ticks of an axis as plain numbers, ``'{x:g}'``."""
  axis.set_major_formatter(mpl.ticker.StrMethodFormatter(form))
  axis.set_minor_locator(mpl.ticker.NullLocator())


def save(figure: Any, path: pathlib.Path) -> None:
  """Writes a PNG of at most 200 colours, a third of the bytes."""
  pixels = io.BytesIO()
  figure.savefig(pixels, format='png')
  picture = Image.open(pixels).convert('RGB')
  picture.quantize(200, dither=Image.Dither.NONE).save(path, optimize=True)


def apart(places: Iterable[float], gap: float) -> list[float]:
  """Places of labels that are at least ``gap`` apart, in the same order.

  Groups of labels that are too near are spread about their mean.
  """
  places = list(places)
  order = sorted(range(len(places)), key=places.__getitem__)
  groups: list[list[float]] = []  # Sum of wanted first places, count.
  for rank, i in enumerate(order):
    groups.append([places[i] - rank * gap, 1])
    while (
      len(groups) > 1
      and groups[-2][0] / groups[-2][1] > groups[-1][0] / groups[-1][1]
    ):
      total, count = groups.pop()
      groups[-1][0] += total
      groups[-1][1] += count
  bases = [total / count for total, count in groups for _ in range(int(count))]
  out = [0.0] * len(places)
  for rank, (i, base) in enumerate(zip(order, bases, strict=True)):
    out[i] = base + rank * gap
  return out
