"""Tables, tests and plots of what ``utility.py`` has run.

    python benchmarks/utility_report.py [--runs runs/utility]

Writes ``benchmarks/results/utility.md``, ``.json`` and plots. Methods are
compared on the same rows and seeds.
"""

import json
import pathlib
import sys

import numpy as np
from scipy import stats

ROOT = pathlib.Path(__file__).parents[1]
for folder in (str(ROOT), str(ROOT / 'examples')):
  if folder not in sys.path:
    sys.path.insert(0, folder)

from benchmarks.private_runs import Run  # noqa: E402


def load(folder: pathlib.Path) -> dict[Run, dict]:
  """All finished runs."""
  out = {}
  for path in sorted(folder.glob('*.json')):
    result = json.loads(path.read_text('utf-8'))
    fields = dict(result['run'])
    fields['options'] = tuple(map(tuple, fields['options']))
    out[Run(**fields)] = result
  return out


def hits(result: dict) -> np.ndarray:
  """Which test rows were right, as 0 and 1."""
  bits = np.unpackbits(np.frombuffer(bytes.fromhex(result['test hits']), 'u1'))
  return bits[: result['test rows']].astype(float)


def paired(first: list[np.ndarray], second: list[np.ndarray]) -> dict:
  """Difference of two methods on the same rows and seeds.

  The variance of the mean difference has a part from the choice of rows and
  one from the randomness of training (initial factors, batches, noise); both
  are estimated and added, so the second counts the first's share within a seed
  once more: the test errs to the careful side. Degrees of freedom by
  Satterthwaite's formula.
  """
  difference = np.stack(first) - np.stack(second)
  seeds, rows = difference.shape
  by_rows = difference.mean(0).var(ddof=1) / rows
  by_seeds = difference.mean(1).var(ddof=1) / seeds
  variance = by_rows + by_seeds
  freedom = variance**2 / (by_rows**2 / (rows - 1) + by_seeds**2 / (seeds - 1))
  mean, error = difference.mean(), variance**0.5
  return {
    'difference': float(mean),
    'standard error': float(error),
    'p': float(2 * stats.t.sf(abs(mean) / error, freedom)),
    'seeds': seeds,
  }
