"""The benchmarks use the models of the examples: as for a script there."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / 'examples'))
