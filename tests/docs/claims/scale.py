"""A step on many chips, as the compiler plans it."""

from collections.abc import Iterator

from tests.docs.claims.data import stored
from tests.docs.claims.register import Claim, lines, of

NAMES = {'adamw, not private': 'AdamW, not private', 'prism': '`prism`'}
WHERE = ('a layer', 'a part', 'a step')
TITLES = ('in a layer', 'in a micro-batch', 'in a step')


def _rows():
  """Of sizes that all methods were compiled for."""
  rows = stored('at_scale')
  sizes = [(x['model'], x['chips']) for x in rows]
  return [
    x for x in rows if sizes.count((x['model'], x['chips'])) == len(NAMES)
  ]


@of('at-scale')
def _():
  rows = []
  for row in _rows():
    at = [row['once in'][x] for x in WHERE]
    rows.append(
      [
        f'{row["frozen, billions"]:.1f}, {row["chips"]}',
        NAMES[row['method']],
        f'{row["arguments GB"]:.2f}',
        f'{row["temporary GB"]:.2f}',
        *(f'{x["GB"]:.3f} in {x["collectives"]}' for x in at),
        f'{sum(x["GB of a step"] for x in at):.1f}',
      ]
    )
  head = ['billions of weights, chips', '', 'arguments', 'temporary']
  return lines([*head, *TITLES, 'in all'], rows)


def sentences() -> Iterator[Claim]:
  plain, private = _rows()[:2]
  step, other = (x['once in']['a step'] for x in (private, plain))
  yield (
    'It takes {:.3f} GB in {} messages for the smaller model, twice what the'
    " factors have ({:.3f} GB), since integers have two words; AdamW's"
    ' gradients take {:.3f} GB in {}.',
    (step['GB'], step['collectives'], private['factors GB'],
     other['GB'], other['collectives']),
  )  # fmt: skip
