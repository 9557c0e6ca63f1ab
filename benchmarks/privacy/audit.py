"""What attacks on the whole chain prove about epsilon, beside the claim.

    python benchmarks/privacy/audit.py

The attacks of ``tests/audit``, with more draws: white-box (the attacker sees
the noised coordinates of three steps), black-box (the trained parameters
alone), and chains with a planted bug. For each the library's claim and the
largest epsilon that is proved to be too small, at delta 1e-5, in one of a
thousand audits wrongly. A bound below the claim is what an honest mechanism
must give; one above it convicts.

Two minutes on two CPU cores.
"""

import pathlib
import sys

import jax
import jax.numpy as jnp
import matplotlib as mpl
import matplotlib.ticker

mpl.use('agg')
from matplotlib import pyplot as plt

ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.common import plots, runner  # noqa: E402
from tests.audit import black_box_test as black_box  # noqa: E402
from tests.audit import chains, harness  # noqa: E402

NOISES = (1.0, 0.5)
WHITE_BOX_STEPS, SIGMA = 3, 2.0
SIGMAS = (0.5, 1.0, 2.0, 4.0, 8.0)


def white_box(sigma, draws, steps, where=None, **options):
  """Bounds with all of the noise and with half of it."""
  play = harness.white_box(
    where or harness.setting(),
    lambda key, noise: chains.prism_chain(sigma, key, noise, **options),
    steps=steps,
    position=chains.RECORDER,
  )
  return harness.attacked(play, draws, NOISES)


def planted(draws):
  """Functions from names to bounds, of chains that are wrong with all noise."""
  where = harness.setting()
  against = jax.tree.map(
    lambda x: jnp.stack([-x] * harness.OTHERS), where.canary
  )
  first_rows = jnp.arange(6)[:, None] < 2
  zero = harness.setting(left_scale=0.0)
  zero = zero._replace(
    canary=([g * first_rows for g in zero.canary[0]], jnp.zeros(3))
  )
  return {
    'a module is not clipped': lambda: white_box(
      SIGMA, draws, 1, clip_with=chains.clip_that_forgets_a_module()
    ),
    'divided by the realised batch size': lambda: white_box(
      SIGMA, draws, 1, where._replace(others=against),
      clip_with=chains.clip_divided_by_the_realised_size(),
    ),
    'zero factor, frame completed': lambda: white_box(
      SIGMA, draws, 1, zero,
      privatizer=chains.noise_projected_by_a_completed_frame,
    ),
  }  # fmt: skip


def measure(attack, what, draws):
  """The claim, and the bounds with all and with half of the noise."""
  if attack == 'white box':
    claim = harness.claims(SIGMA, WHITE_BOX_STEPS)
    bounds = white_box(SIGMA, draws, WHITE_BOX_STEPS, kind=what)
  elif attack == 'sweep':
    claim, bounds = harness.claims(what, 1), white_box(what, draws, 1)
  elif attack == 'black box':
    claim = harness.claims(black_box.SIGMA, black_box.STEPS)
    play = harness.black_box(
      harness.setting(), black_box.OPTIMIZERS[what], steps=black_box.STEPS
    )
    bounds = harness.attacked(play, draws, NOISES)
  else:
    claim, bounds = harness.claims(SIGMA, 1), planted(draws)[what]()
  return {
    'claim': claim.gdp,
    'bound': bounds[0].gdp,
    'bound with half the noise': (
      None if attack == 'planted bug' else bounds[1].gdp
    ),
  }


def settings():
  """All attacks."""
  attacks = {
    'white box': ('orthonormal', 'factor', 'momentum', 'muon'),
    'sweep': SIGMAS,
    'black box': black_box.OPTIMIZERS,
    'planted bug': planted(0),
  }
  return [
    {'attack': attack, 'what': what, 'draws': 20_000}
    for attack, found in attacks.items()
    for what in found
  ]


PROVED, WRONG = '#0072B2', '#D55E00'


def plot(rows, path):
  """Left: one step over the noise. Right: every other attack."""
  figure, (left, right) = plt.subplots(
    1, 2, figsize=(10.5, 4.4), width_ratios=(2, 3), layout='constrained'
  )
  sweep = [row for row in rows if row['attack'] == 'sweep']
  sigmas = [row['what'] for row in sweep]
  for key, label, style, colour in (
    ('bound with half the noise', 'proved with\nhalf the noise', 's--', WRONG),
    ('claim', 'claimed', '-', 'black'),
    ('bound', 'proved', 'o-', PROVED),
  ):
    values = [row[key] for row in sweep]
    left.loglog(sigmas, values, style, color=colour)
    left.annotate(
      label,
      (1.12 * sigmas[-1], values[-1]),
      color=colour,
      va='bottom' if '\n' in label else 'center',
      annotation_clip=False,
    )
  left.set_xticks(SIGMAS)
  left.set_yticks([0.2, 0.5, 1, 2, 5, 10, 20])
  left.set(xlabel='noise multiplier', ylabel='epsilon at delta 1e-5')
  left.set_title('One step, white box', loc='left')
  others = [row for row in rows if row['attack'] != 'sweep']
  names = [f'{row["attack"]}: {row["what"]}' for row in others]
  places = range(len(others))[::-1]
  for place, row in zip(places, others, strict=True):
    wrong = row['attack'] == 'planted bug'
    right.plot(row['claim'], place, 'k|', ms=15, mew=2)
    right.plot(row['bound'], place, 'X' if wrong else 'o',
               color=WRONG if wrong else PROVED, ms=7)  # fmt: skip
    if row['bound with half the noise']:
      right.plot(row['bound with half the noise'], place, 's',
                 color=WRONG, ms=6)  # fmt: skip
  # Each mark is named where it stands first.
  first, planted = others[0], next(
    r for r in others if r['attack'] == 'planted bug'
  )  # fmt: skip
  top, middle = places[0] + 0.75, places[others.index(planted)] + 0.5
  for label, at, height, side, colour in (
    ('proved', first['bound'], top, 'right', PROVED),
    ('claim', first['claim'], top, 'left', 'black'),
    ('  proved with half the noise', first['bound with half the noise'],
     places[0] - 0.2, 'left', WRONG),
    ('proved against the bug', planted['bound'], middle, 'right', WRONG),
  ):  # fmt: skip
    right.annotate(label, (at, height), ha=side, color=colour)
  right.set_yticks(list(places), names)
  right.set_ylim(-0.7, places[0] + 1.5)
  right.set(xlabel='epsilon at delta 1e-5', xscale='log', xlim=(1.7, 70))
  right.set_xticks([2, 5, 10, 20, 50])
  right.set_title('Whole chains', loc='left')
  plots.finish((left, right))
  for axis in (left.xaxis, left.yaxis, right.xaxis):
    axis.set_major_formatter(mpl.ticker.StrMethodFormatter('{x:g}'))
    axis.set_minor_locator(mpl.ticker.NullLocator())
  plots.save(figure, path, 120)
  plt.close(figure)


if __name__ == '__main__':
  runner.main(
    __doc__,
    'audit',
    settings(),
    measure,
    smoke={'draws': 300},
    plot=plot,
    by_device=False,
  )
