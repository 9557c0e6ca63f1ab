"""Tables of the documentation, each made from stored results.

``TABLES`` has one function for each ``<!-- results: NAME -->`` of a page. A
function returns the lines of the table, as they stand on the page.
"""

import statistics
from collections.abc import Callable, Iterable

from tests.docs import claims_data as data
from tests.docs.claims_data import short

TABLES: dict[str, Callable[[], list[str]]] = {}
GAUGES = ['PRISM', 'PRISM, no transport', 'PRISM, paper mode']
GAUGES.append('DP-AdamW on factors')
METHOD = {
  'prism': '`prism`',
  'dp-adamw': 'DP-AdamW',
  'lora+': 'LoRA+',
  'prism, paper mode': 'PRISM as published',
  'linear probe': 'linear probe',
  'ffa': 'FFA-LoRA',
  'prism, decayed': '`prism`, weight decay 1',
  'dp-adamw, decayed': 'DP-AdamW, weight decay 1, warm-up',
}


def of(name: str):
  return lambda function: TABLES.setdefault(name, function)


def lines(head: Iterable[str], rows: Iterable[Iterable[object]]) -> list[str]:
  head = list(head)
  body = [head, ['---'] * len(head), *rows]
  text = ['| ' + ' | '.join(map(str, row)) + ' |' for row in body]
  return [line.replace('|  |', '| |').replace('|  |', '| |') for line in text]


def ends_of_gauges() -> dict[str, dict[str, float]]:
  """Percent at the last step, by method and by condition of the gauge."""
  found = data.stored('three_gauges')['methods']
  return {
    method: {gauge: curve[-1] for gauge, curve in x['curves'].items()}
    for method, x in found.items()
  }


@of('three-gauges')
def _():
  found, ends = data.stored('three_gauges')['methods'], ends_of_gauges()
  names = {
    'DP-AdamW on the factors': 'DP-AdamW on the factors',
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
  found = data.stored('paper_diagnostics')
  rows = []
  for name in ('factors', 'PRISM'):
    for key, note in (('first', 'first step'), ('last', 'after 60 steps')):
      pairs = found['clipping'][name][key]
      rows.append(
        [f'{name}, {note}', *(f'{a:.2f} / {b:.2f}' for a, b in pairs)]
      )
  return lines(['$c$', *(f'{c:g}' for c in found['gauges'])], rows)


@of('noise')
def _():
  found = data.stored('paper_diagnostics')
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


@of('utility')
def _():
  parts = [data.utility(f'SST-2, epsilon {e}') for e in (3, 6)]
  rows = []
  for name, text in METHOD.items():
    row = [text]
    for part in parts:
      accuracy = short(part[name].accuracy, 4)
      best = part[name].accuracy == max(x.accuracy for x in part.values())
      row += [f'**{accuracy}**' if best else accuracy, part[name].against()]
    rows.append(row)
  head = ['', 'epsilon 3', '`prism` minus it', 'epsilon 6', '`prism` minus it']
  return lines(head, rows)


@of('elsewhere')
def _():
  names = ('prism', 'dp-adamw', 'lora+', 'dp-adamw, decayed')
  titles = {
    'SST-2, epsilon 1': 'SST-2, epsilon 1',
    'SST-2, not private': 'SST-2, not private',
    'SST-2, 10,000 rows, epsilon 3': 'SST-2, 10,000 rows, epsilon 3',
    'SST-2, 2,000 rows, epsilon 3': 'SST-2, 2,000 rows, epsilon 3',
    'clinc150 domains, epsilon 3': 'clinc150 domains, epsilon 3',
    'banking77, epsilon 3': 'banking77, epsilon 3',
    'Next tokens of gsm8k and mawps, epsilon 3': 'words of problems, epsilon 3',
  }
  rows = []
  for title, text in titles.items():
    part = data.utility(title)
    rows.append([text])
    for name in names:
      found = part.get(name)
      rows[-1].append(found.beside() if found else '')
  return lines(
    ['', '`prism`', 'DP-AdamW', 'LoRA+', 'DP-AdamW, decay 1, warm-up'], rows
  )


@of('language-model')
def _():
  (methods,) = data.language_model()
  names = {
    'zero-shot': 'the model as it was',
    'prism': '`prism`',
    'dp-adamw': 'DP-AdamW',
    'adamw': 'AdamW, not private',
  }
  rows = []
  for name, text in names.items():
    found = methods[name]
    nats = statistics.mean(data.nats(row) for row in found)
    right = statistics.mean(data.share_right(row) for row in found)
    perplexity = data.exp(nats)
    cell = f'{perplexity:,.0f}' if perplexity > 100 else f'{perplexity:.3f}'
    rows.append([text, cell, short(right, 3) if right else '0'])
    if name == 'dp-adamw':
      rows.append(['`prism` less DP-AdamW', *data.language_model_difference()])
  return lines(['', 'perplexity', 'right'], rows)


def _power(x: float) -> str:
  """9e-15 as it is, 0.54, 3.8, 160,000."""
  if x < 0.1:
    return f'{x:.0e}'.replace('e-0', 'e-')
  return f'{x:#.2g}' if x < 10 else f'{float(f"{x:.1e}"):,.0f}'


def _gauges(of_type: str, method: str, gauges) -> list[str]:
  found = data.stored('gauge_invariance_cpu')
  all_gauges = list(map(tuple, found['gauges, condition and scale']))
  values = found['largest relative difference of Z'][of_type][method]
  return [_power(values[all_gauges.index(gauge)]) for gauge in gauges]


@of('gauges')
def _():
  gauges = [(1, 1), (10, 1), (1e3, 1), (1e6, 1), (1, 1e-3), (1, 1e3)]
  rows = [
    ['`prism`, float64', *_gauges('float64', GAUGES[0], gauges)],
    ['without transport', *_gauges('float64', GAUGES[1], gauges)],
    ['paper mode', *_gauges('float64', GAUGES[2], gauges)],
    ['DP-AdamW on the factors', *_gauges('float64', GAUGES[3], gauges)],
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
  head = ['gauge', '`prism`', 'without transport', 'paper mode']
  return lines(
    [*head, 'DP-AdamW on the factors'],
    [
      [text, *(_gauges('float64', method, [gauge])[0] for method in GAUGES)]
      for gauge, text in texts.items()
    ],
  )


def _epsilon(x: dict[str, float] | None) -> str:
  return '' if x is None else f'{x["gdp"]:#.3g}'


@of('audit')
def _():
  names = {
    'orthonormal': '`prism`',
    'factor': 'paper mode',
    'momentum': 'momentum only',
    'muon': 'Muon on the manifold',
    'prism': '`prism`',
    'prism, factor basis': 'paper mode',
    'prism, momentum only': 'momentum only',
    'prism, Muon': 'Muon on the manifold',
    'dp_muon': '`dp_muon`',
  }
  keys = 'claim', 'bound', 'bound with half the noise'
  found = data.stored('audit')['rows']

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
    'prism_muon, moments': 'moments of `prism_muon` after a step',
    'dp_muon, moments': 'moments of `dp_muon` after a step',
    "jax-privacy's clip, prism": 'moments of `prism` behind'
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


@of('clipping')
def _():
  order = [
    *(('flat', c, 1) for c in (0.1, 0.3, 1.0, 3.0, 10.0)),
    ('automatic', 1.0, 1), ('by module', 1.0, 1),
    *(('quantile', c, 1) for c in (0.1, 1.0, 10.0)),
    *(('flat', 1.0, users) for users in (2, 4, 8)),
  ]  # fmt: skip
  rows = []
  for rule, norm, users in order:
    rows.append([rule, f'{norm:g}', users])
    for epsilon in (2.0, 8.0):
      for method in ('prism', 'dp-adamw'):
        found = data.clipping(rule, norm, users, method, epsilon)
        spread = short(found['standard deviation over seeds'], 3)
        rows[-1].append(f'{short(found["accuracy"], 3)} ± {spread}')
  return lines(
    ['clip', 'norm', 'records of a user', '`prism`, epsilon 2',
     'DP-AdamW, epsilon 2', '`prism`, epsilon 8', 'DP-AdamW, epsilon 8'],
    rows,
  )  # fmt: skip


@of('probes')
def _():
  found = data.stored('probe_accuracy_cpu')

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


@of('bias')
def _():
  found = data.stored('orthogonalization_bias_cpu')['rows']
  rows = []
  for plain in found:
    if plain['degree'] == 2 and not plain['probes']:
      same = {x: plain[x] for x in ('degree', 'condition', 'noise')}
      (probed,) = (
        row
        for row in found
        if row['probes'] == 1 and all(row[x] == same[x] for x in same)
      )
      pairs = [f'{plain[x]:.3f} / {probed[x]:.3f}' for x in ('bias', 'RMSE')]
      rows.append([plain['condition'], f'{plain["noise"]:g}', *pairs])
  return lines(
    ['condition', 'noise', 'bias, without / with one probe',
     'RMSE, without / with'],
    rows,
  )  # fmt: skip
