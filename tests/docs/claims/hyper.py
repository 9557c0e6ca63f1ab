"""The page on hyper-parameters."""

import statistics
from collections.abc import Iterator
from typing import Any

from tests.docs.claims import data
from tests.docs.claims.data import short, stored
from tests.docs.claims.register import Claim, lines, of

BALANCED = {'start': 'balanced'}
ADAM = {'method': 'dp-adamw'}
OURS = {'bias_correction': False, 'weight_decay': 0.1}


row = data.digits


def at(**change: Any) -> str:
  return short(row(**change)['accuracy'], 3)


def _options() -> list[dict[str, Any]]:
  """The rows of the experiment on options."""
  return [x for x in stored('digits_cpu') if x['seeds'] == 10]


@of('rates')
def _():
  found = row()
  names = {
    '`prism`, its defaults': OURS,
    '`prism`, zero start': {},
    '`prism`, balanced start': BALANCED,
    'DP-AdamW, zero start': ADAM,
    'DP-AdamW, balanced start': ADAM | BALANCED,
  }
  return lines(
    ['', *(f'{rate:g}' for rate in found['rates'])],
    [
      [text, *(short(x, 3) for x in row(**change)['accuracies by rate'])]
      for text, change in names.items()
    ],
  )


@of('weight-decay')
def _():
  rows = []
  for bias, decay in (
    (True, 0), (True, 0.1), (False, 0), (False, 0.1), (False, 0.3), (False, 1.0)
  ):  # fmt: skip
    change = {} if bias else {'bias_correction': False}
    change |= {'weight_decay': decay} if decay else {}
    try:
      longer = at(**change, steps=384)
    except ValueError:
      longer = ''
    cells = ['yes' if bias else 'no', f'{decay:g}']
    if change == OURS:
      cells = [f'**{x}**' for x in cells]
    rows.append([*cells, at(**change), longer])
  return lines(
    ['bias correction', '`weight_decay`', 'accuracy', 'at 384 steps'], rows
  )


@of('moments')
def _():
  def cells(*changes):
    return ' / '.join(at(**change) for change in changes)

  adam = ADAM | BALANCED
  return lines(
    ['changed by itself', 'accuracy'],
    [
      ['`b1` 0 / 0.5 / **0.9** / 0.97',
       cells({'b1': 0.0}, {'b1': 0.5}, {}, {'b1': 0.97})],
      ['`b1` 0.5 / **0.9**, 384 steps',
       cells({'b1': 0.5, 'steps': 384}, {'steps': 384})],
      ['`b1` 0.5 / **0.9**, DP-AdamW, balanced start',
       cells({'b1': 0.5, **adam}, adam)],
      ['`b2` 0.9 / 0.99 / **0.999**', cells({'b2': 0.9}, {'b2': 0.99}, {})],
      ['`floor_factor` 0.1 / **1** / 4',
       cells({'floor_factor': 0.1}, {}, {'floor_factor': 4.0})],
      ['`max_condition_number=1.0`, momentum only',
       cells({'max_condition_number': 1.0})],
    ],
  )  # fmt: skip


def best_of_metric() -> tuple[str, ...]:
  """`prism` at a `b1` of 0.5, and with the mean; AdamW at its best, and so."""
  metrics = {'mean', 'second_moment'}
  adam = [x for x in _options() if x.get('method') == 'dp-adamw']
  with_it, without = (
    max(x['accuracy'] for x in adam if (x.get('metric') in metrics) is y)
    for y in (True, False)
  )
  ours = at(b1=0.5), at(b1=0.5, metric='mean')
  return (*ours, short(without, 3), short(with_it, 3))


@of('metric')
def _():
  rows = []
  for b1 in (0.5, 0.0):
    for text, method in (('`prism`', {}), ('AdamW', ADAM)):
      rows.append([f'{text}, `b1` {b1:g}'])
      for metric in (None, 'mean', 'second_moment'):
        change = {'b1': b1, **method, **({'metric': metric} if metric else {})}
        starts = [change, change | BALANCED] if method else [change]
        rows[-1].append(max(row(**x)['accuracy'] for x in starts))
  best = max(x for cells in rows for x in cells[1:])
  rows = [
    [text, *(f'**{short(x, 3)}**' if x == best else short(x, 3) for x in cells)]
    for text, *cells in rows
  ]
  return lines(['', 'no metric', "`'mean'`", "`'second_moment'`"], rows)


def _points(x: float) -> str:
  return f'{x:+.1f}' if round(x, 1) else '0.0'


@of('text-options')
def _():
  found = {
    change: methods['prism']
    for change, methods in data.varied('options').items()
    if 'prism' in methods and change != data.SPREAD
  }
  names = {
    '`bias_correction=True`, for which this rate is too large': [
      'bias_correction=True'
    ],
    '`weight_decay` 0 / 0.3': ['weight_decay=0.0', 'weight_decay=0.3'],
    '`l2_clip_norm` 0.1 / 10': ['clip=0.1', 'clip=10.0'],
    'rank 2 / 64': ['rank=2', 'rank=64'],
    '`b1` 0.8 / 0.95': ['b1=0.8', 'b1=0.95'],
    '`b2=0.99`': ['b2=0.99'],
    '`floor_factor` 0.1 / 4': ['floor_factor=0.1', 'floor_factor=4.0'],
  }
  return lines(
    ['changed by itself', 'points'],
    [
      [text, ' / '.join(_points(found[x]) for x in changes)]
      for text, changes in names.items()
    ],
  )


def sentences() -> Iterator[Claim]:
  yield (
    'A cosine decay to zero reaches {}; a constant rate, at a third of its'
    ' value, {}. With `b1=0.5` they reach {} and {}.',
    (at(), at(decay=0.0), at(b1=0.5), at(b1=0.5, decay=0.0)),
  )
  yield (
    '(384 to 48 steps) reach {}, {}, {} and {}.',
    (
      at(batch=25, steps=384), at(batch=50, steps=192), at(),
      at(batch=200, steps=48),
    ),
  )  # fmt: skip
  rows = _options()
  spreads = [x['standard deviation over seeds'] for x in rows]
  middle = statistics.median(spreads)
  yield (
    'Its accuracy is {:.3f}. The standard deviation over seeds has a median of'
    ' {:.2f} over all rows ({:.2f} to {:.2f}), so a difference of {:.2f}'
    ' between means is about two standard errors.',
    (
      row()['accuracy'], middle, min(spreads), max(spreads),
      2 * middle * (2 / 10) ** 0.5,
    ),
  )  # fmt: skip
  spreads = [x['standard deviation over seeds'] for x in rows if 'metric' in x]
  yield (
    'The standard deviation over ten seeds is {:.2f} to {:.2f}.',
    (min(spreads), max(spreads)),
  )
  yield (
    '{:g} for 24 and 48 steps, {:g} for 96, {:g} for 192, {:g} for 384',
    tuple(
      row(**change)['learning rate']
      for change in ({'steps': 48}, {}, {'steps': 192}, {'steps': 384})
    ),
  )
  yield (
    'The standard error of a difference is about {:.1f}.',
    (data.error_of_an_option(),),
  )
  counts = 24, 48, None, 192, 384
  runs = [row(steps=n) if n else row() for n in counts]
  yield (
    '24, 48, 96, 192 and 384 steps reach {}, {}, {}, {} and {}, although the'
    ' multiplier rises from {:.2f} to {:.2f}.',
    (
      *(short(x['accuracy'], 3) for x in runs),
      runs[0]['noise multiplier'], runs[-1]['noise multiplier'],
    ),
  )  # fmt: skip
  yield (
    '$C$ of 0.1, 0.3, 1 and 3 reach {}, {}, {} and {}; 10 reaches {}.',
    (at(clip=0.1), at(clip=0.3), at(), at(clip=3.0), at(clip=10.0)),
  )
  yield (
    'takes rank: 1, 2, 4 and 8 reach {}, {}, {} and {}.',
    (at(rank=1), at(rank=2), at(), at(rank=8)),
  )
  yield (
    '`prism` reaches {} from the zero start and {} from a balanced one;'
    ' DP-AdamW {} and {}.',
    (at(), at(**BALANCED), at(**ADAM), at(**ADAM, **BALANCED)),
  )
  yield (
    '{:.3f} and {:.3f} from it, {:.3f} and {:.3f} from a balanced start',
    tuple(
      row(**change)['accuracy']
      for change in ({}, ADAM, BALANCED, ADAM | BALANCED)
    ),
  )
  yield (
    'best accuracy on turned digits is {} in place of {}',
    (at(**OURS), at(bias_correction=False)),
  )
  more = row(b1=0.5, metric='mean')['noise multiplier']
  yield (
    'the training gets {:.1f} % more noise',
    (100 * (more / row()['noise multiplier'] - 1),),
  )
