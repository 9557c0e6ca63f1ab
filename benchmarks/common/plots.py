"""One style for all plots of methods."""

import io
import pathlib
from collections.abc import Iterable
from typing import Any

from PIL import Image

# One colour a method, the same in all plots (Okabe and Ito, for all eyes).
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
  'prism, correlated noise': '#66A61E',
  'lamb': '#7F3C8D',
  'lora-rite': '#A6761D',
  'lora-rite, spectral start': '#D8B365',
  'dp-adambc': '#666666',
  'dp-muon': '#B2182B',
}


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
    axis.spines[['top', 'right']].set_visible(False)
    axis.grid(alpha=0.25, linewidth=0.6)
    axis.set_axisbelow(True)


def save(figure: Any, path: pathlib.Path, dpi: int = 130) -> None:
  """Writes a PNG of at most 200 colours: a third of the bytes."""
  pixels = io.BytesIO()
  figure.savefig(pixels, dpi=dpi, format='png')
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
