"""The figures of the documentation."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[3] / 'examples'))
