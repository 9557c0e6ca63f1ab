"""What leaks where a sum is divided by the realised batch size.

Left: one released coordinate, with and without a record that pulls against the
63 others, for both divisors. Middle: the epsilon of one such release. Right:
where the noise is scaled by the realised size too, its level tells the size.
"""

import numpy as np
import style
from matplotlib import pyplot as plt

from prism_optax.accounting import _gaussian

EXPECTED, SIGMA, DELTA, CLIP = 64, 2.0, 1e-5, 1.0
ENTRIES = 100_000


def means(others, divisor):
  """The mean without and with the record, noise-free; 0 divides nothing."""
  without, with_it = -CLIP * others, -CLIP * others + CLIP
  if divisor == 'expected':
    return without / EXPECTED, with_it / EXPECTED
  return without / max(others, 1), with_it / (others + 1)


def densities(axis):
  stddev = SIGMA * CLIP / EXPECTED
  x = np.linspace(-5, 5, 300)
  density = np.exp(-(x**2) / 2)
  for row, divisor in enumerate(('realised', 'expected')):
    without, with_it = means(EXPECTED - 1, divisor)
    for mean, colour, label in (
      (without, '0.45', 'without the record'),
      (with_it, style.RED, 'with it'),
    ):
      at = (mean - without) / (CLIP / EXPECTED)
      axis.fill_between(
        x * stddev / (CLIP / EXPECTED) + at, 1.5 * row,
        density + 1.5 * row, color=colour, alpha=0.45, linewidth=0,
        label=label if row else None,
      )  # fmt: skip
    moved = (with_it - without) / (CLIP / EXPECTED)
    axis.annotate(
      f'divided by the {divisor} size:\nmoves by {moved:.0f} $C/b$',
      (-8.8, 1.5 * row + 1.05),
    )
  axis.set(
    yticks=[], ylim=(0, 3.3), xlim=(-9, 9),
    xlabel='released coordinate / $(C/b)$',
    title=f'a batch of {EXPECTED}, $\\sigma$ = {SIGMA:g}',
  )  # fmt: skip
  axis.annotate('without\nthe record', (-7.4, 0.3), color='0.3', fontsize=8)
  axis.annotate('with it', (5.2, 0.55), color=style.RED, fontsize=8)


def epsilon(mu):
  """Exact for one Gaussian release, by bisection."""
  low, high = 0.0, 1e5
  for _ in range(80):
    middle = (low + high) / 2
    if _gaussian.gaussian_delta(mu, middle) > DELTA:
      low = middle
    else:
      high = middle
  return high


def costs(axis):
  sizes = np.unique(np.round(np.geomspace(8, 4 * EXPECTED, 60)).astype(int))
  stddev = SIGMA * CLIP / EXPECTED
  for divisor, colour in (('realised', style.RED), ('expected', style.BLUE)):
    spent = []
    for size in sizes:
      without, with_it = means(size - 1, divisor)
      spent.append(epsilon((with_it - without) / stddev))
    axis.loglog(sizes, spent, color=colour)
    axis.annotate(
      f'{divisor} size', (9, 1.2 * spent[0] if divisor == 'expected' else 5.5),
      color=colour,
    )  # fmt: skip
  axis.axvline(EXPECTED, color=style.GREY, linewidth=0.8)
  axis.set(
    xlabel='records in the batch', ylabel='epsilon at delta 1e-5',
    title='the cost of one release',
  )  # fmt: skip
  axis.set_xticks([8, 16, 32, 64, 128, 256], [8, 16, 32, 64, 128, 256])
  axis.minorticks_off()
  axis.set_yticks([1, 3, 10, 30, 100], [1, 3, 10, 30, 100])


def levels(axis):
  rng = np.random.default_rng(0)
  for size, colour in ((EXPECTED, style.RED), (EXPECTED - 1, '0.45')):
    # The root of the mean square of so many normal entries, by its law.
    draws = np.sqrt(rng.chisquare(ENTRIES, 4000) / ENTRIES)
    axis.hist(draws * SIGMA * CLIP / size * 1e3, 60, color=colour, alpha=0.6)
    axis.annotate(
      f'{size} records', (SIGMA * CLIP / size * 1e3, 250), ha='center',
      color=colour,
    )  # fmt: skip
  axis.set(
    yticks=[], xlabel='level of the noise, $10^{-3}$',
    title=f'noise of {ENTRIES // 1000},000 entries', ylim=(0, 280),
  )  # fmt: skip


def main():
  figure, axes = plt.subplots(
    1, 3, figsize=(style.WIDTH, 2.9), layout='constrained'
  )
  densities(axes[0])
  costs(axes[1])
  levels(axes[2])
  style.save(figure, __file__)


if __name__ == '__main__':
  main()
