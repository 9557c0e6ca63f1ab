"""Correlated noise and DP-Muon."""

from collections.abc import Iterator

from tests.docs.claims import data
from tests.docs.claims.data import stored
from tests.docs.claims.register import Claim, lines, of


@of('cancels')
def _():
  found = [x for x in stored('correlated_noise_cpu') if x['start'] != 'zero']
  steps = list(dict.fromkeys(x['step over smallest singular value']
                             for x in found))  # fmt: skip
  rows = [
    [f'{start}, {way} coordinates',
     *(f'{x[way]:.3f}' for x in found if x['start'] == start)]
    for start in dict.fromkeys(x['start'] for x in found)
    for way in ('fixed', 'moving')
  ]  # fmt: skip
  return lines(
    ['step / smallest singular value', *(f'{x:g}' for x in steps)], rows
  )


def _muon() -> dict[tuple[str, float], dict]:
  """By method and epsilon."""
  return {
    (x['method'], x.get('epsilon', 2.0)): x
    for x in stored('digits_cpu')
    if x['seeds'] == 6
  }


def _noises() -> dict[tuple[str, float], dict]:
  """By noise and epsilon."""
  return {
    (noise, epsilon): data.digits(
      noise=noise, epsilon=epsilon, decay=0.0, bias_correction=False,
      start='balanced',
    )
    for noise in ('independent', 'prefix sums', 'banded', 'Poisson')
    for epsilon in (2.0, 8.0)
  }  # fmt: skip


@of('muon-digits')
def _():
  names = {
    'DP-Adam': 'DP-Adam, one clip',
    'DP-Muon': 'DP-Muon, equal split',
    'DP-Muon, best polynomials, 3 steps': 'the same, three best polynomials',
    'DP-Muon, best polynomials, 5 steps': 'the same, five best polynomials',
    'DP-Muon, least energy': 'DP-Muon, least energy',
  }
  found = _muon()
  rows = []
  for name, text in names.items():
    rows.append([text])
    for epsilon in (1.0, 3.0):
      row = found[name, epsilon]
      rows[-1].append(f'{row["accuracy"]:.3f} ({row["standard error"]:.3f})')
  return lines(['', 'epsilon 1', 'epsilon 3'], rows)


@of('polynomials')
def _():
  titles = {
    'noise, 384 x 384': 'noise, square',
    'noise, 384 x 1536': 'noise, 1 : 4',
    'signal and noise, 384 x 384': 'with a signal, square',
    'three decades, 384 x 384': 'three decades',
  }
  rows = []
  for row in stored('newton_schulz_polynomials_cpu'):
    found = [row['spectra'][name] for name in titles]
    largest = max(x['largest'] for x in row['spectra'].values())
    rows.append(
      [
        row['polynomials'], row['products'], f'{row["lift"]:.0f}',
        *(f'{x["rms from one"]:.3f}' for x in found), f'{largest:.2f}',
      ]
    )  # fmt: skip
  head = ['', 'products', 'lift', *titles.values(), 'largest']
  return lines(head, rows)


@of('correlated-utility')
def _():
  names = {
    'independent': 'independent, fixed order',
    'prefix sums': 'prefix sums, fixed order',
    'banded': 'banded, fixed order',
    'Poisson': 'independent, Poisson sampling',
  }
  found = _noises()
  rows = []
  for name, text in names.items():
    rows.append([text])
    for epsilon in (2.0, 8.0):
      row = found[name, epsilon]
      spread = row['standard deviation over seeds']
      rows[-1].append(f'{row["accuracy"]:.3f} ({spread:.3f})')
  return lines(['noise', 'epsilon 2', 'epsilon 8'], rows)


def sentences() -> Iterator[Claim]:
  found = {key: 100 * row['accuracy'] for key, row in _muon().items()}

  def more(one, other):
    return tuple(found[one, e] - found[other, e] for e in (1.0, 3.0))

  equal, least = 'DP-Muon', 'DP-Muon, least energy'
  yield (
    'is {:.1f} and {:.1f} points above DP-Adam',
    more(equal, 'DP-Adam'),
  )
  yield 'adds {:.1f} and {:.1f} points to that', more(least, equal)
  yield 'handwritten-digits), by {:.1f} and {:.1f} points.', more(least, equal)
  rows = stored('newton_schulz_polynomials_cpu')
  by_name = {row['polynomials']: row for row in rows}
  best, plain = (
    by_name[name]
    for name in ('best from 0.1, 3 steps', 'DP-Muon, degree 2, 5 steps')
  )
  yield 'with {} products in place of {}', (best['products'], plain['products'])
  ends = [
    by_name[name]['spectra']['noise, 384 x 384']['rms from one']
    for name in ('best from 0.003, 5 steps', 'DP-Muon, degree 2, 5 steps')
  ]
  yield (
    'square noise at {:.3f} from one, where the others leave it at {:.3f}.',
    ends,
  )
  narrow = [
    x['rms of bfloat16 products']
    for row in rows
    for x in row['spectra'].values()
  ]
  yield '{:.3f} to {:.3f} in the same measure', (min(narrow), max(narrow))
  noises = _noises()
  yield (
    'at epsilon 2 it reaches {:.3f} with a banded matrix, against {:.3f} with'
    ' independent noise. Poisson sampling reaches {:.3f} and',
    tuple(
      noises[x, 2.0]['accuracy'] for x in ('banded', 'independent', 'Poisson')
    ),
  )
