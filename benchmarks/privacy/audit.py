"""What attacks on the whole chain prove about epsilon, beside the claim.

    python -m benchmarks.privacy.audit

The attacks of ``tests/audit``, with more draws: white-box (the attacker sees
the noised coordinates of three steps), black-box (the trained parameters
alone), and chains with a planted bug. For each the library's claim and the
largest epsilon that is proved to be too small, at delta 1e-5, in one of a
thousand audits wrongly. A bound below the claim is what an honest mechanism
must give; one above it convicts.

Two minutes on two CPU cores.
"""

import jax
import jax.numpy as jnp

from benchmarks.common import plots, runner
from tests.audit import black_box_test as black_box
from tests.audit import chains, harness

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
    'white box': ('orthonormal', 'published', 'momentum', 'muon'),
    'sweep': SIGMAS,
    'black box': black_box.OPTIMIZERS,
    'planted bug': planted(0),
  }
  return [
    {'attack': attack, 'what': what, 'draws': 20_000}
    for attack, found in attacks.items()
    for what in found
  ]


NAMES = {
  'orthonormal': 'prism',
  'published': 'published_prism',
  'momentum': 'prism, momentum only',
  'muon': 'contrib.prism_muon',
  'prism_muon': 'contrib.prism_muon',
}
GROUPS = {
  'white box': 'the attacker reads the noisy coordinates of three steps',
  'black box': 'the attacker reads the trained parameters',
  'planted bug': 'a planted bug',
}


def plot(rows, path):
  """Every attack, and one step over the noise: what is claimed and proved."""
  figure, (top, bottom) = plots.panels(6.4, 2, height_ratios=(5, 3))
  place, ticks = 0, {}
  marks = {
    'claimed': ('claim', '|', 'k'),
    'proved': ('bound', 'o', plots.BLUE),
    'proved with half the noise': (
      'bound with half the noise', 's', plots.RED,
    ),
  }  # fmt: skip
  for attack, text in GROUPS.items():
    place -= 1
    top.annotate(text, (1.62, place), va='center', style='italic')
    for row in rows:
      if row['attack'] != attack:
        continue
      place -= 1
      ticks[place] = NAMES.get(row['what'], row['what'])
      for label, (key, marker, colour) in marks.items():
        if row[key] is None:
          continue
        if attack == 'planted bug' and key == 'bound':
          label, marker, colour = 'proved against the bug', 'X', plots.RED
        top.plot(
          row[key], place, marker, color=colour, label=label,
          **({'ms': 13, 'mew': 2} if marker == '|' else {'ms': 6}),
        )  # fmt: skip
  top.set_yticks(list(ticks), list(ticks.values()))
  top.set(xscale='log', xlim=(1.55, 70), ylim=(place - 0.7, -0.4))
  top.set_xticks([2, 3, 5, 10, 20, 50])
  top.set_xlabel('epsilon at delta 1e-5')
  plots.legend(figure, top, 'upper center', ncols=4, fontsize=8)
  sweep = [row for row in rows if row['attack'] == 'sweep']
  sigmas = [row['what'] for row in sweep]
  for label, (key, marker, colour) in marks.items():
    values = [row[key] for row in sweep]
    bottom.loglog(
      sigmas, values, '-' if marker == '|' else f'{marker}-', color=colour, ms=6
    )
    bottom.annotate(
      label, (1.1 * sigmas[-1], values[-1]), color=colour,
      va='top' if marker == '|' else 'center', annotation_clip=False,
    )  # fmt: skip
  bottom.set_xticks(SIGMAS)
  bottom.set_yticks([0.2, 0.5, 1, 2, 5, 10, 20])
  bottom.set(
    xlabel='noise multiplier', ylabel='epsilon at delta 1e-5',
    title='prism, one step, the noisy coordinates',
  )  # fmt: skip
  plots.finish((top, bottom))
  for axis in (top.xaxis, bottom.xaxis, bottom.yaxis):
    plots.numbers(axis, '{x:g}')
  plots.save(figure, path)


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
