"""What the tests of the examples import, these do too."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / 'examples'))
