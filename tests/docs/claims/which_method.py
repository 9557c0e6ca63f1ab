"""Figures of the page on methods, and of the README."""

from collections.abc import Iterator

from tests.docs.claims import data, geometry, hyper
from tests.docs.claims.data import short
from tests.docs.claims.register import Claim


def sentences() -> Iterator[Claim]:
  nuisances = data.varied('nuisances')['gauge=100.0']
  yield (
    'condition 100 DP-AdamW loses {:.1f} points at the rate that was best'
    ' without it, {:.1f} with its rate tuned again, and {:.1f} with weight'
    ' decay and warm-up',
    (
      -nuisances['dp-adamw'],
      data.lost_in_a_gauge_when_tuned_again(),
      -nuisances['dp-adamw, decayed'],
    ),
  )
  ends = geometry.ends_of_gauges()
  adam, ours = ends['DP-AdamW on the factors'], ends['PRISM']
  canonical = ends['canonicalised first']
  yield (
    'DP-AdamW reads {:.0f}, {:.0f} and {:.0f} % as they are given, and then'
    ' {:.0f}, {:.0f} and {:.0f} %; PRISM reads {:.0f} % in all three',
    (
      *(adam[x] for x in ('1', '100', '1000')),
      *(canonical[x] for x in ('1', '100', '1000')),
      ours['1'],
    ),
  )
  yield (
    'At condition 1 DP-AdamW is {:.1f} points ahead',
    (adam['1'] - ours['1'],),
  )
  tuned = data.row(
    'three_gauges', method='DP-AdamW on the factors', condition=1000.0
  )
  yield (
    'own ({:g}) for the gauge of condition 1,000 it comes to {:.1f} %',
    (tuned['best rate'], tuned['accuracy at the best rate']),
  )
  three = data.utility('SST-2, epsilon 3')['dp-adamw']
  yield (
    'rate `prism` is {:.1f} points ahead of DP-AdamW (p = {})',
    (100 * three.difference, short(three.p, 3)),
  )
  yield (
    'a small digits network from {} to {} at epsilon 2 (best DP-AdamW: {}'
    ' without, {} with)',
    hyper.best_of_metric(),
  )
  ridge = data.row(
    'private_heads_cpu', task='sst2', method='ridge', noise_multiplier=5.0
  )
  yield (
    'already classifies {} of SST-2 correctly at epsilon {:.2f}.',
    (short(ridge['accuracy'], 3), ridge['epsilon']),
  )
  yield (
    'takes {:.2f} times as long as with DP-AdamW at rank 8, {:.2f} at rank 64',
    tuple(
      data.row('step_time_cpu', rank=r, method='prism')['to dp-adamw']
      for r in (8, 64)
    ),
  )
  rows = data.rows('correlated_noise_cpu', start='condition 1')
  left = [rows[i]['fixed'] for i in (0, 2, 4)]
  yield (
    'well-conditioned start leave {}, {} and {:.2f} of',
    (short(left[0], 2), short(left[1], 2), left[2]),
  )
