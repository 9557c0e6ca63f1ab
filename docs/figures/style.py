"""What the figures of the documentation share: fonts, colours, how to save.

Each script of this folder draws one figure of its name, in a few seconds:

    python docs/figures/gauge_noise.py
"""

import io
import pathlib
import sys

import matplotlib as mpl

mpl.use('agg')
from matplotlib import pyplot as plt
from PIL import Image

FOLDER = pathlib.Path(__file__).parent
ROOT = str(FOLDER.parents[1])
if ROOT not in sys.path:
  sys.path.insert(0, ROOT)

BLUE, RED, GREEN, ORANGE = 'tab:blue', 'tab:red', 'tab:green', 'tab:orange'
GREY = '0.55'
mpl.rcParams.update(
  {
    'font.size': 9,
    'axes.titlesize': 10,
    'axes.spines.top': False,
    'axes.spines.right': False,
    'legend.frameon': False,
    'figure.dpi': 100,
  }
)


def save(figure: plt.Figure, script: str) -> None:
  """Writes ``<script>.png`` beside it: few colours, no date, no version."""
  path = FOLDER / (pathlib.Path(script).stem + '.png')
  pixels = io.BytesIO()
  figure.savefig(pixels, dpi=120, format='png')
  picture = Image.open(pixels).convert('RGB')
  picture.quantize(200, dither=Image.Dither.NONE).save(path, optimize=True)
  print(path, path.stat().st_size)
