"""Gauges, noise in Z, and what whitening and orthogonalisation lose."""

from collections.abc import Iterator

from tests.docs.claims.data import stored
from tests.docs.claims.register import Claim, lines, of

GAUGES = ['PRISM', 'PRISM, paper mode', 'DP-AdamW on factors']


def ends_of_gauges() -> dict[str, dict[str, float]]:
  """Percent at the last step, by method and by condition of the gauge."""
  found = stored('three_gauges')['methods']
  return {
    method: {gauge: curve[-1] for gauge, curve in x['curves'].items()}
    for method, x in found.items()
  }


@of('three-gauges')
def _():
  found, ends = stored('three_gauges')['methods'], ends_of_gauges()
  names = {
    'DP-AdamW on the factors': 'DP-AdamW on the factors',
    'canonicalised first': 'the same after `lora.canonicalize`',
    'PRISM': '`prism` without decay',
  }
  gauges = list(ends['PRISM'])
  return lines(
    ['condition', *(f'{int(x):,}' for x in gauges)],
    [
      [f'{text}, rate {found[name]["rate"]:g}',
       *(f'{ends[name][x]:.1f} %' for x in gauges)]
      for name, text in names.items()
    ],
  )  # fmt: skip


@of('clip')
def _():
  found = stored('paper_diagnostics')
  rows = []
  for name in ('factors', 'PRISM'):
    for key, note in (('first', 'first step'), ('last', 'after 60 steps')):
      pairs = found['clipping'][name][key]
      rows.append(
        [f'{name}, {note}', *(f'{a:.2f} / {b:.2f}' for a, b in pairs)]
      )
  return lines(['$c$', *(f'{c:g}' for c in found['gauges'])], rows)


@of('amplification')
def _():
  found = stored('amplification')
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
    ['noise multiplier', *(f'{x:g}' for x in found['noise multipliers'])],
    [
      [text, *(f'{x["out"]:,.1f}' for x in found['methods'][name])]
      for name, text in names.items()
    ],
  )


@of('noise')
def _():
  found = stored('paper_diagnostics')
  wanted = (1e-3, 10**-1.5, 0.25, 1, 4, 10**1.5, 1e3)
  at = [
    min(
      range(len(found['sweep'])),
      key=lambda i: abs(found['sweep'][i] / c - 1),
    )
    for c in wanted
  ]
  names = {
    'factors': 'on the factors, first order',
    'bilinear': 'on the factors, bilinear (over the variance)',
    'PRISM': 'PRISM',
  }

  def cell(x):
    return f'{x:.1f}' if x < 100 else f'{x:,.0f}'

  return lines(
    ['$c$', *(f'{found["sweep"][i]:.2g}' for i in at[:-1]), '1000'],
    [
      [text, *(cell(found['noise'][name][1][i]) for i in at)]
      for name, text in names.items()
    ],
  )


def _power(x: float) -> str:
  """9e-15 as it is, 0.54, 3.8, 160,000."""
  if x < 0.1:
    return f'{x:.0e}'.replace('e-0', 'e-')
  return f'{x:#.2g}' if x < 10 else f'{float(f"{x:.1e}"):,.0f}'


def _gauges(of_type: str, method: str, gauges) -> list[str]:
  found = stored('gauge_invariance_cpu')
  all_gauges = list(map(tuple, found['gauges, condition and scale']))
  values = found['largest relative difference of Z'][of_type][method]
  return [_power(values[all_gauges.index(gauge)]) for gauge in gauges]


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
  return lines(
    ['gauge', '`prism`', '`published_prism`', 'DP-AdamW on the factors'],
    [
      [text, *(_gauges('float64', method, [gauge])[0] for method in GAUGES)]
      for gauge, text in texts.items()
    ],
  )


@of('probes')
def _():
  found = stored('probe_accuracy_cpu')

  def cell(x):
    return f'{x:.1e}'.replace('e-0', 'e-') if x < 0.1 else f'{x:#.2g}'

  rows = []
  for name, pairs in found['relative error, whitened and of probes'].items():
    rows += [
      [f'{way}, {name}', *(cell(pair[i]) for pair in pairs)]
      for i, way in enumerate(('whitened', 'probes'))
    ]
  conditions = ['1', '10', *(f'$10^{i}$' for i in (2, 3, 4, 6))]
  return lines(['condition of the gauge', *conditions], rows)


def sentences() -> Iterator[Claim]:
  found = stored('paper_diagnostics')
  yield 'At the best gauge, $c = {:.2f}$,', (found['best_gauge'],)
  dp, ours = (
    [x for _, x in found['preconditioned'][k]] for k in ('factors', 'PRISM')
  )
  yield (
    'multipliers {:g} to {:g}: {:.1f} to {:.1f} for DP-AdamW, {:.1f} to {:.1f}'
    ' for PRISM',
    (
      min(found['noise_multipliers']), max(found['noise_multipliers']),
      min(dp), max(dp), min(ours), max(ours),
    ),
  )  # fmt: skip
  yield 'reaches $Z$ is {:.2f} of DP-AdamW', (ours[-1] / dp[-1],)
  found = stored('amplification')
  ratios = [x['out'] / x['in'] for x in found['methods']['dp-adambc']]
  yield (
    'amplifies the noise {:,.0f} to {:,.0f} times',
    (min(ratios), max(ratios)),
  )
  found = stored('correlated_noise_cpu')
  yield 'flat space has {:.3f}', (found['flat space'],)
  of_start = found['accumulated over independent, fixed and moving coordinates']
  yield (
    'it is {:.2f}: worse than independent noise',
    (of_start['zero'][0][0],),
  )
