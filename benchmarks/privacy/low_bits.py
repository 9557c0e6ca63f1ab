"""Attacks on the low bits of a release: as it is, and with noise as floats.

    python -m benchmarks.privacy.low_bits

The attacker knows the two sums that a release may come from, with and without
one record, inverts the public post-processing, and asks for each entry whether
any float leads there from either sum (``tests/audit/low_bits.py``; the routes
are in ``routes.py`` beside it). 10,000 runs with 1,000 entries and 1,000 with
100,000, each with no other record and with 31 others, and a fifth more from
which the attacker learns how many entries must speak for the record. His
advantage is the rate of true minus that of false positives. Beside it

- the same attack on noise that is added as floats: it must succeed;
- the attacker who ignores the bits and takes the likelihood ratio, and what he
  may have in theory: this is what the claimed epsilon allows;
- where noisy entries themselves are released, whether they all are whole steps
  of the noise, and what can be learned from the steps modulo 64. Control: noise
  on a lattice that is 64 times as coarse as that of the sum.

Half an hour on a CPU core, in 1 GB.
"""

import functools
import math
import zlib

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.common import plots, runner
from prism_optax import _exact_sum, _lattice
from tests.audit import low_bits, routes

ENTRIES_AT_ONCE = 2_000_000
CLASSES = 64


def coarse_noise(key, tree, stddev):
  """Whole steps, but only every 64th of them: a planted bug."""
  del stddev

  def noisy(x):
    words = jax.random.bits(key, (4, *x.low.shape), jnp.uint32)
    noise = _lattice.integers(list(words)) & -CLASSES
    return _lattice.to_float(x._replace(low=x.low + noise))

  return jax.tree.map(
    noisy, tree, is_leaf=lambda x: isinstance(x, _exact_sum.LatticeSum)
  )


def classes(out, stddev):
  """Counts of the steps modulo 64 in each run, and the share of whole steps."""
  unit = np.float32(stddev) / np.float32(_exact_sum.STEPS)
  steps = np.rint(np.float64(out) / np.float64(unit)).astype(np.int64)
  whole = np.mean(np.float32(steps) * unit == out)
  of_run = (steps % CLASSES) + CLASSES * np.arange(len(out))[:, None]
  counts = np.bincount(of_run.ravel(), minlength=CLASSES * len(out))
  return counts.reshape(-1, CLASSES), whole


def likelihood_ratio(route, out, sums):
  """The ideal attacker's; entries that cannot be inverted say nothing."""
  with np.errstate(invalid='ignore', over='ignore'):
    low, _ = low_bits.preimages(route, out)
  with_it, without = (np.float64(x) for x in sums)
  middle = (with_it + without) / 2
  centred = np.where(np.isfinite(low), np.float64(low) - middle, 0)
  return centred @ (with_it - without)


@functools.lru_cache(maxsize=3)
def program(name, size, noise):
  """A route and its compiled play."""
  route = routes.ROUTES[name](size)
  return route, low_bits.played(route, noise)


def watched(route, play, others, runs, key):
  """What the attackers make of each of some runs, in both worlds.

  Returns:
    The sums; and arrays (2, runs, ...): entries in favour of the record, log
    likelihood ratios, and where noisy entries themselves are released, counts
    of steps modulo 64 and the share of whole steps.
  """
  worlds = low_bits.records(route.width, others)
  block = min(runs, max(1, ENTRIES_AT_ONCE // route.width))
  found = []
  sums = [np.asarray(play(jax.random.split(key, block), x)[1])
          for x in worlds]  # fmt: skip
  for i in range(math.ceil(runs / block)):
    keys = jax.random.split(jax.random.fold_in(key, i), (2, block))
    outs = [
      np.asarray(play(k, x)[0]) for k, x in zip(keys, worlds, strict=True)
    ]
    rows = [
      np.stack([low_bits.favours(route, out, sums) for out in outs]),
      np.stack([likelihood_ratio(route, out, sums) for out in outs]),
    ]
    if route.after is None:
      counts, whole = zip(
        *(classes(x, route.stddev) for x in outs), strict=True
      )
      rows += [np.stack(counts), np.repeat(np.array(whole)[:, None], block, 1)]
    found.append(rows)
  return sums, [
    np.concatenate(x, 1)[:, :runs] for x in zip(*found, strict=True)
  ]


def judged(scores, learning):
  """Advantage and its error at the best threshold of the first runs."""
  learned, rest = np.split(scores, [learning], axis=1)
  thresholds = np.unique(learned)
  ranks = [np.searchsorted(np.sort(x), thresholds) / learning for x in learned]
  gains = ranks[1] - ranks[0]
  first = np.argmax(gains)
  # Halfway to the next lower score: a gap between the worlds is cut in half.
  best = np.mean(thresholds[max(first - 1, 0) : first + 1])
  return low_bits.advantage(*(rest >= best))


def of_classes(counts, whole, learning):
  """What steps modulo 64 tell, by frequencies learned from the first runs."""
  learned = counts[:, :learning].sum(1) + 1.0
  weights = np.log(learned / learned.sum(1, keepdims=True))
  scores = counts @ (weights[0] - weights[1])
  return {
    'whole steps': float(whole.min()),
    'classes': low_bits.advantage(*(scores[:, learning:] > 0)),
  }


def measure(route, entries, others, runs):
  """All attackers on one route: advantages with their standard errors."""
  name, size, learning = route, entries, runs // 5
  cell = f'{name} {size} {others} {runs}'
  row = {}
  noises = {'floats': low_bits.noise_as_floats, 'now': _lattice.add_noise}
  if name == next(iter(routes.ROUTES)):
    noises = {'coarse': coarse_noise} | noises
  for label, noise in noises.items():
    route, play = program(name, size, noise)
    # Draws of its own: cells of the table are independent.
    key = jax.random.key(zlib.crc32((cell + label).encode()))
    sums, (favours, ratios, *steps) = watched(
      route, play, bool(others), runs + learning, key
    )
    row[label] = judged(favours, learning)
    row[f'{label}, likelihood ratio'] = low_bits.advantage(*(ratios > 0))
    if steps:
      row[f'{label}, steps'] = of_classes(*steps, learning)
  distance = np.linalg.norm(np.float64(sums[0]) - sums[1]) / route.stddev
  row['allowed'] = math.erf(distance / math.sqrt(8))
  return row


def show(rows):
  """One line for each row."""

  def cell(pair):
    return f'{pair[0]:+.3f} ± {pair[1]:.3f}'

  lines = [
    [row['route'], row['entries'], row['others'], row['runs'],
     f'{row["floats"][0]:.3f}', cell(row['now']), f'{row["allowed"]:.3f}',
     f'{row["now, likelihood ratio"][0]:.3f}',
     cell(row['now, steps']['classes']) if 'now, steps' in row else '']
    for row in rows
  ]  # fmt: skip
  head = ['route', 'entries', 'others', 'runs', 'floats', 'now', 'allowed',
          'LR now', 'steps']  # fmt: skip
  return runner.markdown(head, lines)


def plot(rows, path):
  """The attacker's advantage now; that with floats is written beside it."""
  figure, axis = plots.panels(5.2)
  names = list(dict.fromkeys(row['route'] for row in rows))
  axis.set_yticks(range(len(names))[::-1], names)
  seen = dict.fromkeys(names, 0)
  for row in rows:
    cells = [x for x in rows if x['route'] == row['route']]
    middle = len(names) - 1 - names.index(row['route'])
    place = middle + 0.36 - 0.72 * (seen[row['route']] + 0.5) / len(cells)
    seen[row['route']] += 1
    few, alone = row['entries'] < 10_000, row['others'] == 0
    value, error = row['now']
    axis.errorbar(
      value, place, xerr=4 * error, fmt='o' if few else 's', ms=5, lw=1.2,
      color=plots.BLUE, mfc='white' if alone else plots.BLUE,
      label=f'{"few" if few else "many"} entries,'
      f' {"the record alone" if alone else "31 other records"}',
    )  # fmt: skip
    axis.plot(row['allowed'], place, '|', color='k', ms=9, mew=1.5,
              label='the most that epsilon allows')  # fmt: skip
  for place, name in enumerate(reversed(names)):
    floats = min(x['floats'][0] for x in rows if x['route'] == name)
    axis.annotate(
      f'{floats:.3f}', (0.165, place), va='center', color=plots.RED
    )  # fmt: skip
  axis.annotate(
    'with noise\nas floats', (0.165, len(names) - 0.55), color=plots.RED,
    va='bottom', annotation_clip=False,
  )  # fmt: skip
  axis.axvline(0, color='k', lw=0.8)
  axis.set(
    xlim=(-0.13, 0.21), ylim=(-0.6, len(names) - 0.4),
    xlabel='advantage of the attacker, with four standard errors',
  )  # fmt: skip
  axis.set_xticks([-0.1, -0.05, 0, 0.05, 0.1])
  plots.finish([axis])
  plots.legend(figure, axis, 'lower center', ncols=2, fontsize=8)
  plots.save(figure, path)


def settings():
  """Few entries in many runs, and many in few; again where sums are floats."""
  grid = [
    (name, entries, runs)
    for name in routes.ROUTES
    for entries, runs in ((1000, 10_000), (100_000, 1000))
  ]
  grid.append(("jax-privacy's clip, prism", 1000, 40_000))
  return [
    {'route': name, 'entries': routes.size_of(name, entries),
     'others': others, 'runs': runs}
    for name, entries, runs in grid
    for others in (0, 31)
  ]  # fmt: skip


if __name__ == '__main__':
  runner.main(
    __doc__,
    'low_bits',
    settings(),
    measure,
    smoke={'runs': 100},
    show=show,
    plot=plot,
    by_device=False,
  )
