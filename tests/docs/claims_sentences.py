"""Figures in sentences, with what they are computed from.

A sentence has a field for each of its figures, as in ``str.format``. More are
in ``claims_times`` and ``claims_hyper``.
"""

import functools
import math
import statistics
from collections.abc import Iterator
from typing import Any

from tests.docs import claims_data as data
from tests.docs import claims_hyper, claims_tables, claims_times
from tests.docs.claims_data import short, stored

Claim = tuple[str, tuple[Any, ...]]


@functools.cache
def computed() -> list[Claim]:
  """All sentences with their figures."""
  return [
    claim
    for part in (
      _noise,
      _utility,
      _readme,
      _audits,
      _low_bits,
      _clipping,
      _language_model,
      claims_times.sentences,
      claims_hyper.sentences,
    )
    for claim in part()
  ]


def _noise() -> Iterator[Claim]:
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
  last = {name: rows[-1]['out'] for name, rows in found['methods'].items()}
  yield (
    '{:.0f} with `prism`, {:.0f} as published, {:.0f} with DP-AdamW, {:.0f}'
    ' with LoRA+, {:.0f} with LoRA-RITE, {:.1f} with LAMB',
    tuple(
      last[name]
      for name in ('prism', 'prism, paper mode', 'dp-adamw', 'lora+',
                   'lora-rite', 'lamb')
    ),
  )  # fmt: skip
  yield 'at noise multiplier {:g} and', (found['noise multipliers'][-1],)
  ratios = [x['out'] / x['in'] for x in found['methods']['dp-adambc']]
  yield 'amplifies it {:,.0f} to {:,.0f} times', (min(ratios), max(ratios))
  found = stored('correlated_noise_cpu')
  yield 'flat space has {:.3f}', (found['flat space'],)
  of_start = found['accumulated over independent, fixed and moving coordinates']
  yield (
    'it is {:.2f}: worse than independent noise',
    (of_start['zero'][0][0],),
  )


def _utility() -> Iterator[Claim]:
  three = {
    name: statistics.mean(found[seed] for seed in range(3))
    for name, found in {
      'none': data.accuracies(
        'prism', epsilon=3.0, rate=0.1, options=[['weight_decay', 0.0]]
      ),
      'prism': data.accuracies('prism', epsilon=3.0, rate=0.1),
      'dp-adamw': data.accuracies('dp-adamw', epsilon=3.0, rate=0.03),
    }.items()
  }
  yield (
    'decay of 0 in place of 0.1 `prism` has {} at epsilon 3 on the first three'
    ' seeds, where it has {} as it is and DP-AdamW {}',
    tuple(short(x, 4) for x in three.values()),
  )
  banking = data.utility('banking77, epsilon 3')['dp-adamw']
  yield (
    'the {:.1f} points on banking77 have p = {}',
    (100 * banking.difference, short(banking.p, 3)),
  )
  words = data.utility('Next tokens of gsm8k and mawps, epsilon 3')['dp-adamw']
  yield "DP-AdamW's lead there has p = {}", (short(words.p, 3),)
  rest = data.utility('SST-2, epsilon 3, other methods')
  for text, method, digits in (
    ('DP-Muon on the full matrices {},', 'dp-muon', 4),
    ('correlated noise {},', 'prism, correlated noise', 4),
    ('LoRA-RITE from a spectral start {}', 'lora-rite, spectral start', 4),
    ('it only guesses: {}', 'lora-rite', 3),
    ('DP-AdamBC {},', 'dp-adambc', 4),
    ("`prism` with Muon's direction {},", 'prism, muon', 4),
    ('LAMB {}', 'lamb', 4),
  ):
    yield text, (short(rest[method].accuracy, digits),)
  lower = data.utility('A third of the rate that was chosen')
  ours, theirs = lower['prism'], lower['dp-adamw']
  yield (
    '`prism` has {} and DP-AdamW {} (p = {}, five seeds)',
    (short(ours.accuracy, 4), short(theirs.accuracy, 4), short(theirs.p, 3)),
  )
  yield from _nuisances()


def _readme() -> Iterator[Claim]:
  """Figures of the README: what is not on it any more goes from here too."""
  nuisances = data.varied('What should not matter')['gauge=100.0']
  yield (
    'condition 100 DP-AdamW loses {:.1f} points at the old rate, `prism` none',
    (-nuisances['dp-adamw'],),
  )
  rates = data.varied('A learning rate that is not the best')
  yield (
    'best learning rate costs DP-AdamW {:.1f} points, `prism` {:.1f}.',
    tuple(-rates[name]['three times it'] for name in ('dp-adamw', 'prism')),
  )
  ends = claims_tables.ends_of_gauges()
  adam, ours = ends['DP-AdamW on the factors'], ends['PRISM']
  yield (
    'DP-AdamW reads {:.0f}, {:.0f} and {:.0f} % of the digits, PRISM {:.0f} %'
    ' in all three',
    (adam['1'], adam['100'], adam['1000'], ours['1']),
  )
  yield (
    'At condition 1 DP-AdamW is {:.1f} points ahead',
    (adam['1'] - ours['1'],),
  )
  tuned = stored('three_gauges')['methods']['DP-AdamW on the factors'][
    'tuned for the gauge'
  ]['1000']
  yield (
    'own ({:g}) for the gauge of condition 1,000 it comes to {:.1f} %',
    (tuned['rate'], tuned['accuracy']),
  )
  three = data.utility('SST-2, epsilon 3')['dp-adamw']
  yield (
    'rate `prism` is {:.1f} points ahead (p = {})',
    (100 * three.difference, short(three.p, 3)),
  )
  yield (
    'a small digits network from {} to {} at epsilon 2 (best AdamW: {} without'
    ' it, {} with it)',
    claims_hyper.best_of_metric(),
  )
  steps = stored('step_time_cpu')['ranks']
  yield (
    'takes {:.2f} times that of DP-AdamW at rank 8, {:.2f} at rank 64',
    tuple(steps[r]['methods']['prism']['to dp-adamw'] for r in ('8', '64')),
  )
  found = stored('correlated_noise_cpu')
  rows = found['accumulated over independent, fixed and moving coordinates']
  left = [rows['condition 1'][i][0] for i in (0, 2, 4)]
  yield (
    'well-conditioned start leave {}, {} and {:.2f} of',
    (short(left[0], 2), short(left[1], 2), left[2]),
  )


def _nuisances() -> Iterator[Claim]:
  found = data.varied('What should not matter')

  def points(method, *changes):
    return tuple(found[change][method] for change in changes)

  scales = 'scale=0.25', 'scale=4.0'
  others = ('rank=4', 'rank=32', 'initialization=balanced',
            'initialization=spectral')  # fmt: skip
  rates = 'rate / 3', 'rate * 3'
  spread = 'largest minus smallest'
  yield (
    'nothing for `prism` ({:.2f} points, {:.2f} and {:.2f}:',
    points('prism', 'gauge=100.0', *scales),
  )
  yield (
    'costs DP-AdamW {:.2f} points and LoRA+ {:.2f};',
    (-found['gauge=100.0']['dp-adamw'], -found['gauge=100.0']['lora+']),
  )
  yield (
    'alpha / r moves DP-AdamW by {:+.2f} and {:+.2f},',
    points('dp-adamw', *scales),
  )
  yield 'LoRA+ by {:+.2f} and {:+.2f};', points('lora+', *scales)
  yield (
    'DP-AdamW loses {:.2f}, {:.2f} and {:.2f}',
    tuple(-x for x in points('dp-adamw, decayed', 'gauge=100.0', *scales)),
  )
  yield (
    '{:+.2f}, {:+.2f}, {:+.2f} and {:+.2f} points for `prism`',
    points('prism', *others),
  )
  yield (
    '({:+.2f}, {:+.2f}, {:+.2f} and {:+.2f} with a decay of 1)',
    points('prism, decayed', *others),
  )
  yield 'change `prism` by {:+.2f} and {:+.2f} points', points('prism', *rates)
  yield (
    '-{:.2f} points, DP-AdamW by {:+.2f} and {:+.2f},',
    (
      -found['rate * 3']['prism'],
      *points('dp-adamw', *rates),
    ),
  )
  yield 'LoRA+ by {:+.2f} and {:+.2f}. Over all', points('lora+', *rates)
  yield (
    'largest minus the smallest is {:.2f} points for `prism` ({:.2f} with a'
    ' decay of 1), {:.2f} for DP-AdamW ({:.2f} with decay and warm-up) and'
    ' {:.2f} for LoRA+',
    tuple(
      found[spread][method]
      for method in ('prism', 'prism, decayed', 'dp-adamw',
                     'dp-adamw, decayed', 'lora+')
    ),
  )  # fmt: skip


def _audits() -> Iterator[Claim]:
  found = {row['what']: row for row in stored('audit')['rows']}
  divisor = found['divided by the realised batch size']
  yield (
    'it is at least {:.2f} where {:.2f} was',
    (divisor['bound']['gdp'], divisor['claim']['gdp']),
  )
  frame = found['zero factor, frame completed']
  yield (
    'epsilon {:.1f} where {:.2f} was claimed',
    (frame['bound']['gdp'], frame['claim']['gdp']),
  )


def _low_bits() -> Iterator[Claim]:
  rows = stored('low_bits')['rows'].values()
  now = [row['now'] for row in rows if row['runs'] < 40_000]
  yield 'The largest of the {} figures', (len(now),)
  largest = max(abs(mean) / error for mean, error in now if error)
  yield 'clip with other records: {:.1f}, which', (largest,)
  chance = len(now) * math.erfc(largest / 2**0.5)
  yield 'reaches by chance in one of {:.0f} benchmarks', (1 / chance,)
  errors = {
    runs: max(row['now'][1] for row in rows if row['runs'] == runs)
    for runs in (1000, 10_000)
  }
  yield (
    'nothing smaller than {:.2f} would have been seen (four standard errors);'
    ' with 10,000, {:.2f}',
    (4 * errors[1000], 4 * errors[10_000]),
  )
  again = [row['now'] for row in rows if row['runs'] == 40_000]
  yield (
    '{:+.3f} ± {:.3f} alone, {:+.3f} ± {:.3f} with others',
    (*again[0], *again[1]),
  )
  first = data.low_bits('intrinsic_clip, tangent_privatizer')[0]
  yield (
    'allows, {:.3f} at noise multiplier 4',
    (first['allowed'],),
  )
  steps = [row['now, steps']['classes'] for row in rows if 'now, steps' in row]
  worst = max(steps, key=lambda pair: abs(pair[0]))
  yield (
    'advantage of at most {:.3f} ± {:.3f} in size',
    (abs(worst[0]), worst[1]),
  )


def _differences(one: dict, other: dict) -> tuple[float, float]:
  """Mean and standard error of a difference on the same seeds, in points."""
  found = [
    100 * (a - b)
    for a, b in zip(
      one['accuracies of the seeds'],
      other['accuracies of the seeds'],
      strict=True,
    )
  ]
  return statistics.mean(found), statistics.stdev(found) / len(found) ** 0.5


def _clipping() -> Iterator[Claim]:
  def row(rule, norm, case, users=1):
    return data.clipping(rule, norm, users, *case)

  cases = [(m, e) for m in ('prism', 'dp-adamw') for e in (2.0, 8.0)]
  chosen = {
    case: max(
      (row('flat', norm, case) for norm in (0.1, 0.3, 1.0, 3.0, 10.0)),
      key=lambda x: x['tuning accuracy'],
    )
    for case in cases
  }
  norms = {chosen[case]['clip norm'] for case in cases[1:]}
  yield (
    'choose {:g} for `prism` at epsilon 2 and {:g} elsewhere',
    (chosen[cases[0]]['clip norm'], *norms),
  )
  lost = [
    x
    for case in cases
    for x in _differences(chosen[case], row('flat', 10.0, case))
  ]
  yield (
    'costs `prism` {:.1f} ± {:.1f} and {:.1f} ± {:.1f} points at the two'
    ' epsilons, and DP-AdamW {:.1f} ± {:.1f} and {:.1f} ± {:.1f}',
    tuple(lost),
  )
  back = [
    _differences(row('quantile', 10.0, case), row('flat', 10.0, case))[0]
    for case in cases
  ]
  yield (
    'gets {:.1f} and {:.1f} of these points back for `prism`, and {:.1f} and'
    ' {:.1f} for DP-AdamW',
    tuple(back),
  )
  automatic = [
    _differences(row('automatic', 1.0, case), chosen[case]) for case in cases
  ]
  yield (
    'within {:.1f} ± {:.1f} points of the chosen flat one',
    max(automatic, key=lambda x: abs(x[0])),
  )
  yield (
    'costs `prism` {:.1f} ± {:.1f} points at epsilon 8; the other three',
    _differences(chosen[cases[1]], row('by module', 1.0, cases[1])),
  )
  users = {
    case: _differences(chosen[case], row('flat', 1.0, case, 8))[0]
    for case in cases
  }
  yield (
    'cost {:.1f} and {:.1f} points at epsilon 2, and {:.1f} and {:.1f} at'
    ' epsilon 8',
    tuple(users[cases[i]] for i in (0, 2, 1, 3)),
  )


def _language_model() -> Iterator[Claim]:
  """The setting that is second on the tuning rows, run on the others."""
  rows = stored('language_model')['rows']
  (methods,) = data.language_model()
  best = methods['prism'][0]['run']
  others = [
    row
    for row in rows
    if not row['run']['is_tuning']
    and row['run']['method'] == 'prism'
    and row['run']['weight_decay'] != best['weight_decay']
  ]
  nats = statistics.mean(map(data.nats, others))
  right = statistics.mean(map(data.share_right, others))
  yield (
    '(decay {:g} in place of {:g}) has {:.3f} and {} here',
    (
      others[0]['run']['weight_decay'], best['weight_decay'],
      math.exp(nats), short(right, 3),
    ),
  )  # fmt: skip
