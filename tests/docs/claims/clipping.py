"""Rules of clipping, and users."""

import statistics
from collections.abc import Iterator

from tests.docs.claims import data
from tests.docs.claims.data import short
from tests.docs.claims.register import Claim, lines, of


def clipping(rule, norm, users, method, epsilon) -> dict:
  return data.digits(
    **{
      'rule': rule, 'clip': norm, 'records of a user': users, 'batch': 96,
      'method': method, 'epsilon': epsilon, 'start': 'balanced', 'b1': 0.5,
      'bias_correction': False,
    }
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
        found = clipping(rule, norm, users, method, epsilon)
        spread = short(found['standard deviation over seeds'], 3)
        rows[-1].append(f'{short(found["accuracy"], 3)} ± {spread}')
  return lines(
    ['clip', 'norm', 'records of a user', '`prism`, epsilon 2',
     'DP-AdamW, epsilon 2', '`prism`, epsilon 8', 'DP-AdamW, epsilon 8'],
    rows,
  )  # fmt: skip


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


def sentences() -> Iterator[Claim]:
  def row(rule, norm, case, users=1):
    return clipping(rule, norm, users, *case)

  cases = [(m, e) for m in ('prism', 'dp-adamw') for e in (2.0, 8.0)]
  chosen = {
    case: max(
      (row('flat', norm, case) for norm in (0.1, 0.3, 1.0, 3.0, 10.0)),
      key=lambda x: x['tuning accuracy'],
    )
    for case in cases
  }
  norms = {chosen[case].get('clip', 1.0) for case in cases[1:]}
  yield (
    'choose {:g} for `prism` at epsilon 2 and {:g} elsewhere',
    (chosen[cases[0]].get('clip', 1.0), *norms),
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
