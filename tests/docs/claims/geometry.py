"""Gauges, noise in Z, and what whitening and orthogonalisation lose."""

from collections.abc import Iterator

from tests.docs.claims import data
from tests.docs.claims.data import stored
from tests.docs.claims.register import Claim, lines, of

GAUGES = ['PRISM', 'PRISM, paper mode', 'DP-AdamW on factors']


def ends_of_gauges() -> dict[str, dict[str, float]]:
  """Percent at the last step, by method and by condition of the gauge."""
  out: dict[str, dict[str, float]] = {}
  for row in stored('three_gauges'):
    out.setdefault(row['method'], {})[f'{row["condition"]:g}'] = row['curve'][
      -1
    ]
  return out


@of('three-gauges')
def _():
  ends = ends_of_gauges()
  rates = {row['method']: row['rate'] for row in stored('three_gauges')}
  names = {
    'DP-AdamW on the factors': 'DP-AdamW on the factors',
    'canonicalised first': 'the same after `lora.canonicalize`',
    'PRISM': '`prism` without decay',
  }
  gauges = list(ends['PRISM'])
  return lines(
    ['condition', *(f'{int(x):,}' for x in gauges)],
    [
      [f'{text}, rate {rates[name]:g}',
       *(f'{ends[name][x]:.1f} %' for x in gauges)]
      for name, text in names.items()
    ],
  )  # fmt: skip


@of('clip')
def _():
  rows = []
  for name in ('factors', 'PRISM'):
    for key, note in (('first', 'first step'), ('last', 'after 60 steps')):
      found = data.rows('paper_diagnostics', method=name, step=key)
      cells = (
        f'{x["clipped fraction"]:.2f} / {x["mean coefficient"]:.2f}'
        for x in found
      )
      rows.append([f'{name}, {note}', *cells])
  return lines(['$c$', *(f'{x["gauge"]:g}' for x in found)], rows)


@of('amplification')
def _():
  levels = dict.fromkeys(x['noise multiplier'] for x in stored('amplification'))
  names = {
    'prism': '`prism`',
    'prism, paper mode': '`published_prism`',
    'dp-adamw': 'DP-AdamW',
    'lora+': 'LoRA+',
    'lora-rite': 'LoRA-RITE',
    'lamb': 'LAMB',
    'dp-adambc': 'DP-AdamBC',
  }
  return lines(
    ['noise multiplier', *(f'{x:g}' for x in levels)],
    [
      [
        text,
        *(f'{x["out"]:,.1f}' for x in data.rows('amplification', method=name)),
      ]
      for name, text in names.items()
    ],
  )


@of('noise')
def _():
  wanted = (1e-3, 10**-1.5, 0.25, 1, 4, 10**1.5, 1e3)
  names = {
    'factors': 'on the factors, first order',
    'bilinear': 'on the factors, bilinear (over the variance)',
    'PRISM': 'PRISM',
  }

  def cell(x):
    return f'{x:.1f}' if x < 100 else f'{x:,.0f}'

  rows = []
  for name, text in names.items():
    found = data.rows('paper_diagnostics', issue='noise', method=name)
    at = [min(found, key=lambda x, c=c: abs(x['gauge'] / c - 1))
          for c in wanted]  # fmt: skip
    rows.append([text, *(cell(x['median']) for x in at)])
  return lines(['$c$', *(f'{x["gauge"]:.2g}' for x in at[:-1]), '1000'], rows)


def _power(x: float) -> str:
  """9e-15 as it is, 0.54, 3.8, 160,000."""
  if x < 0.1:
    return f'{x:.0e}'.replace('e-0', 'e-')
  return f'{x:#.2g}' if x < 10 else f'{float(f"{x:.1e}"):,.0f}'


def _gauges(of_type: str, method: str, gauges) -> list[str]:
  return [
    _power(
      data.row(
        'gauge_invariance_cpu', arithmetic=of_type, method=method,
        condition=condition, scale=scale,
      )['difference']
    )
    for condition, scale in gauges
  ]  # fmt: skip


@of('gauges')
def _():
  gauges = [(1, 1), (10, 1), (1e3, 1), (1e6, 1), (1, 1e-3), (1, 1e3)]
  rows = [
    ['`prism`, float64', *_gauges('float64', GAUGES[0], gauges)],
    ['`published_prism`', *_gauges('float64', GAUGES[1], gauges)],
    ['DP-AdamW on the factors', *_gauges('float64', GAUGES[2], gauges)],
    ['`prism`, float32', *_gauges('float32', GAUGES[0], gauges)],
    [
      '`prism`, float32, after `lora.canonicalize`',
      *_gauges('float32, canonical', GAUGES[0], gauges),
    ],
  ]
  head = ['', 'condition 1', '10', '$10^3$', '$10^6$']
  return lines([*head, 'scale $10^{-3}$', 'scale $10^3$'], rows)


@of('gauges-short')
def _():
  texts = {
    (1, 1): 'orthogonal',
    (10, 1): 'condition 10',
    (1e3, 1): 'condition $10^3$',
    (1e6, 1): 'condition $10^6$',
  }
  head = ['gauge', '`prism`', '`published_prism`']
  return lines(
    [*head, 'DP-AdamW on the factors'],
    [
      [text, *(_gauges('float64', method, [gauge])[0] for method in GAUGES)]
      for gauge, text in texts.items()
    ],
  )


@of('probes')
def _():
  def cell(x):
    return f'{x:.1e}'.replace('e-0', 'e-') if x < 0.1 else f'{x:#.2g}'

  rows = [
    [
      f'{way}, {name}',
      *(cell(x[way]) for x in data.rows('probe_accuracy_cpu', arithmetic=name)),
    ]
    for name in ('float32', 'bfloat16')
    for way in ('whitened', 'probes')
  ]
  conditions = ['1', '10', *(f'$10^{i}$' for i in (2, 3, 4, 6))]
  return lines(['condition of the gauge', *conditions], rows)


def sentences() -> Iterator[Claim]:
  best = data.row('paper_diagnostics', issue='best gauge')['gauge']
  yield 'At the best gauge, $c = {:.2f}$,', (best,)
  dp, ours = (
    data.rows('paper_diagnostics', issue='preconditioned', method=name)
    for name in ('factors', 'PRISM')
  )
  levels = [x['noise multiplier'] for x in dp]
  ends = [
    f(x['out'] for x in found) for found in (dp, ours) for f in (min, max)
  ]
  yield (
    'multipliers {:g} to {:g}: {:.1f} to {:.1f} for DP-AdamW, {:.1f} to {:.1f}'
    ' for PRISM',
    (min(levels), max(levels), *ends),
  )
  yield 'reaches $Z$ is {:.2f} of DP-AdamW', (ours[-1]['out'] / dp[-1]['out'],)
  ratios = [
    x['out'] / x['in'] for x in data.rows('amplification', method='dp-adambc')
  ]
  yield (
    'amplifies the noise {:,.0f} to {:,.0f} times',
    (min(ratios), max(ratios)),
  )
  found = stored('correlated_noise_cpu')
  yield 'flat space has {:.3f}', (found[0]['flat space'],)
  zero = data.row('correlated_noise_cpu', start='zero')
  yield 'it is {:.2f}: worse than independent noise', (zero['fixed'],)
