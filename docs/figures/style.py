"""What the figures of the documentation share: the style of all plots.

Each script of this folder draws one figure of its name, in a few seconds:

    python docs/figures/gauge_noise.py
"""

import pathlib
import sys

import matplotlib as mpl

mpl.use('agg')
from matplotlib import pyplot as plt

FOLDER = pathlib.Path(__file__).parent
ROOT = str(FOLDER.parents[1])
if ROOT not in sys.path:
  sys.path.insert(0, ROOT)

from benchmarks.common import plots  # noqa: E402

WIDTH = plots.WIDTH
BLUE, RED, ORANGE, PURPLE = plots.BLUE, plots.RED, plots.ORANGE, plots.PURPLE
GREY = plots.GREY
# Fills that black text is read on.
PRIVATE, PUBLIC, PLAIN = '#F8DCCB', '#D3E6F2', '#EEEEEE'


def save(figure: plt.Figure, script: str) -> None:
  """Writes ``<script>.png`` beside it."""
  path = FOLDER / (pathlib.Path(script).stem + '.png')
  plots.save(figure, path)
  print(path, path.stat().st_size)
