"""The examples import each other: as for a script that lies there."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / 'examples'))
