"""Audits and low bits."""

import math
from collections.abc import Iterator

from tests.docs.claims import data
from tests.docs.claims.data import stored
from tests.docs.claims.register import Claim, lines, of


def _epsilon(x: float | None) -> str:
  return '' if x is None else f'{x:#.3g}'


@of('audit')
def _():
  names = {
    'orthonormal': '`prism`',
    'factor': '`published_prism`',
    'momentum': 'momentum only',
    'muon': '`contrib.prism_muon`',
    'prism': '`prism`',
    'published_prism': '`published_prism`',
    'prism, momentum only': 'momentum only',
    'prism_muon': '`contrib.prism_muon`',
    'dp_muon': '`dp_muon`',
  }
  keys = 'claim', 'bound', 'bound with half the noise'
  found = stored('audit')

  def cells(row):
    return [_epsilon(row[key]) for key in keys]

  rows = [
    [f'{row["attack"]}, {names[row["what"]]}', *cells(row)]
    for kind in ('white box', 'black box')
    for row in found
    if row['attack'] == kind
  ]
  sweep = [row for row in found if row['attack'] == 'sweep']
  steps = ' / '.join(f'{row["what"]:g}' for row in sweep)
  rows.append([f'one step at multiplier {steps}'])
  rows[-1] += [
    ' / '.join(x) for x in zip(*(map(cells, sweep)), strict=True)
  ]  # fmt: skip
  rows += [
    [f'planted: {row["what"]}', *cells(row)]
    for row in found
    if row['attack'] == 'planted bug'
  ]
  return lines(
    ['attack', 'claimed', 'proved', 'proved with half the noise'], rows
  )


def advantage(pair, digits: int = 3) -> str:
  """An advantage with its standard error."""
  mean, error = (round(x, digits) for x in pair)
  text = f'{mean:+.{digits}f}' if mean else f'{0:.{digits}f}'
  return f'{text} ± {error:.{digits}f}'


@of('low-bits')
def _():
  names = {
    'intrinsic_clip, tangent_privatizer': 'noisy coordinates (`intrinsic_clip`,'
    ' `tangent_privatizer`)',
    'prism, moments': 'first moments of `prism` after a step',
    'prism, parameters': 'a bias after the first step of `prism`, without'
    ' moments',
    'prism_muon, moments': 'moments of `contrib.prism_muon` after a step',
    'dp_muon, moments': 'moments of `dp_muon` after a step',
    "jax-privacy's clip, prism": 'moments of `prism` after'
    ' `jax_privacy.clipped_grad`',
    'hidden states': 'hidden states of 1,536 entries, blocks of 65',
  }
  rows = []
  for route, text in names.items():
    four = data.low_bits(route)
    low, high = (f(row['floats'][0] for row in four) for f in (min, max))
    floats = f'{low:.3f}' if f'{low:.3f}' == f'{high:.3f}' else (
      f'{low:.3f} to {high:.3f}'
    )  # fmt: skip
    ratio = f'{four[0]["now, likelihood ratio"][0]:.3f}'
    rows.append([text, floats, *(advantage(x['now']) for x in four), ratio])
  return lines(
    ['released', 'floats', 'now, 1,000, alone', '1,000, others',
     '100,000, alone', '100,000, others', 'likelihood ratio'],
    rows,
  )  # fmt: skip


def sentences() -> Iterator[Claim]:
  yield from _audits()
  yield from _low_bits()


def _audits() -> Iterator[Claim]:
  found = {row['what']: row for row in stored('audit')}
  divisor = found['divided by the realised batch size']
  yield (
    'it is at least {:.2f} where {:.2f} was',
    (divisor['bound'], divisor['claim']),
  )
  frame = found['zero factor, frame completed']
  yield (
    'epsilon {:.1f} where {:.2f} was claimed',
    (frame['bound'], frame['claim']),
  )


def _low_bits() -> Iterator[Claim]:
  rows = stored('low_bits')
  now = [row['now'] for row in rows if row['runs'] < 40_000]
  yield 'The largest of the {} figures', (len(now),)
  largest = max(abs(mean) / error for mean, error in now if error)
  yield 'in standard errors, is {:.1f}, after', (largest,)
  chance = len(now) * math.erfc(largest / 2**0.5)
  yield 'reaches this by chance in one of {:.0f} benchmarks', (1 / chance,)
  errors = {
    runs: max(row['now'][1] for row in rows if row['runs'] == runs)
    for runs in (1000, 10_000)
  }
  yield (
    'none below {:.2f} would have been seen (four standard errors); with'
    ' 10,000, none below {:.2f}',
    (4 * errors[1000], 4 * errors[10_000]),
  )
  again = [row['now'] for row in rows if row['runs'] == 40_000]
  yield (
    '{:+.3f} ± {:.3f} alone, {:+.3f} ± {:.3f} with others',
    (*again[0], *again[1]),
  )
  first = data.low_bits('intrinsic_clip, tangent_privatizer')[0]
  yield (
    'the claimed epsilon permits: {:.3f} at noise multiplier 4',
    (first['allowed'],),
  )
  steps = [row['now, steps']['classes'] for row in rows if 'now, steps' in row]
  worst = max(steps, key=lambda pair: abs(pair[0]))
  yield (
    'advantage of at most {:.3f} ± {:.3f} in size',
    (abs(worst[0]), worst[1]),
  )
