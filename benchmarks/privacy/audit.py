"""What attacks on the whole chain prove about epsilon, beside the claim.

    python benchmarks/privacy/audit.py [--draws 20000] [--output FOLDER]
        [--plot-only]

The attacks of ``tests/audit``, with more draws: white-box (the attacker sees
the noised coordinates of three steps), black-box (the trained parameters
alone), and chains with a planted bug. For each the library's claim and the
largest epsilon that is proved to be too small, at delta 1e-5, in one of a
thousand audits wrongly. A bound below the claim is what an honest mechanism
must give; one above it convicts.

Prints a table, writes ``audit.json`` and ``audit.png``. Two minutes on two CPU
cores.
"""

import argparse
import json
import pathlib
import sys

import jax
import jax.numpy as jnp
import matplotlib as mpl
import matplotlib.ticker
import tqdm

mpl.use('agg')
from matplotlib import pyplot as plt

ROOT = pathlib.Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / 'examples')]

from benchmarks.common import plots, results  # noqa: E402
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
  """(name, bounds) of chains that are wrong with all of their noise."""
  where = harness.setting()
  against = jax.tree.map(
    lambda x: jnp.stack([-x] * harness.OTHERS), where.canary
  )
  yield (
    'a module is not clipped',
    white_box(SIGMA, draws, 1, clip_with=chains.clip_that_forgets_a_module())[
      0
    ],
  )
  yield (
    'divided by the realised batch size',
    white_box(
      SIGMA,
      draws,
      1,
      where._replace(others=against),
      clip_with=chains.clip_divided_by_the_realised_size(),
    )[0],
  )
  zero = harness.setting(left_scale=0.0)
  first_rows = jnp.arange(6)[:, None] < 2
  yield (
    'zero factor, frame completed',
    white_box(
      SIGMA,
      draws,
      1,
      zero._replace(
        canary=([g * first_rows for g in zero.canary[0]], jnp.zeros(3))
      ),
      privatizer=chains.noise_projected_by_a_completed_frame,
    )[0],
  )


def measure(draws):
  """All rows: what, which noise, claim, bounds with all and half of it."""
  rows = []

  def add(attack, what, claim, honest, halved=None):
    rows.append(
      {
        'attack': attack,
        'what': what,
        'claim': claim._asdict(),
        'bound': honest._asdict(),
        'bound with half the noise': halved and halved._asdict(),
      }
    )

  for kind in tqdm.tqdm(
    ('orthonormal', 'factor', 'momentum', 'muon'), 'white box'
  ):
    bounds = white_box(SIGMA, draws, WHITE_BOX_STEPS, kind=kind)
    add('white box', kind, harness.claims(SIGMA, WHITE_BOX_STEPS), *bounds)
  for sigma in tqdm.tqdm(SIGMAS, 'white box, sigma'):
    bounds = white_box(sigma, draws, 1)
    add('sweep', sigma, harness.claims(sigma, 1), *bounds)
  for name, optimizer in tqdm.tqdm(black_box.OPTIMIZERS.items(), 'black box'):
    play = harness.black_box(
      harness.setting(), optimizer, steps=black_box.STEPS
    )
    bounds = harness.attacked(play, draws, NOISES)
    claim = harness.claims(black_box.SIGMA, black_box.STEPS)
    add('black box', name, claim, *bounds)
  for name, bounds in tqdm.tqdm(planted(draws), 'planted bugs', 3):
    add('planted bug', name, harness.claims(SIGMA, 1), bounds)
  return rows


def table(rows):
  head = f'{"attack":12}{"what":36}{"claim":>8}{"bound":>8}{"half":>8}'
  lines = [head, '-' * len(head)]
  for row in rows:
    halved = row['bound with half the noise']
    shown = f'{halved["gdp"]:8.2f}' if halved else ''
    what = f'sigma {row["what"]:g}' if row['attack'] == 'sweep' else row['what']
    lines.append(
      f'{row["attack"]:12}{what:36}{row["claim"]["gdp"]:8.2f}'
      f'{row["bound"]["gdp"]:8.2f}{shown}'
    )
  return '\n'.join(lines)


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
    values = [row[key]['gdp'] for row in sweep]
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
    right.plot(row['claim']['gdp'], place, 'k|', ms=15, mew=2)
    right.plot(row['bound']['gdp'], place, 'X' if wrong else 'o',
               color=WRONG if wrong else PROVED, ms=7)  # fmt: skip
    if row['bound with half the noise']:
      right.plot(row['bound with half the noise']['gdp'], place, 's',
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
    right.annotate(label, (at['gdp'], height), ha=side, color=colour)
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


def main():
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('--draws', type=int, default=20_000)
  parser.add_argument('--output', type=pathlib.Path, default=results.FOLDER)
  parser.add_argument(
    '--plot-only', action='store_true', help='draw audit.json again'
  )
  options = parser.parse_args()
  if options.plot_only:
    stored = json.loads((options.output / 'audit.json').read_text('utf-8'))
    plot(stored['rows'], options.output / 'audit.png')
    return
  rows = measure(options.draws)
  print(table(rows))
  options.output.mkdir(parents=True, exist_ok=True)
  result = {'draws': options.draws, 'rows': rows}
  (options.output / 'audit.json').write_text(json.dumps(result, indent=2))
  plot(rows, options.output / 'audit.png')


if __name__ == '__main__':
  main()
