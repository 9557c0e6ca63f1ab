"""Regret: what a method loses when nothing is tuned on the private task.

    python -m benchmarks.accuracy.regret --data FOLDER [--minutes N] [--table]

A recipe is the learning rate, the weight decay and the start of the head that
are best on average over the texts at epsilon 3, without the task that it is
used on and without other labels of the same texts (clinc150 has 10 domains and
150 intents). 120 steps of 256 rows are the advice of ``training.plan`` for each
text. A head starts at random, or from a private release that has four fifths of
the budget. All methods have b1 = .9 and a warm-up by 1 - b1^t, and DP-AdamW
starts in the gauge of ``lora.canonicalize``. Regret is the accuracy of the best
of all methods, each tuned on the task itself, less that of a method with its
recipe. ``prism`` is tuned with a fixed rate. Its recipe is ``prism, adapted``,
which has no rate of its own: only the first steps and the start of the head are
chosen.

Digits choose no recipe. They are pictures for a small network that was trained
on turned ones (``digits_network.py``): its units are poor features of upright
ones, and its weights have to go far.

A row is the mean of its tokens below the top layer of MiniLM, with adapters on
all six matrices of this layer and a head (``sentences.py``), so that a run
takes seconds. Some cells are checked with all tokens, at the choices of the
means. ``ridge`` is one private release of a head of the same rows and has
nothing to tune. Rows set aside choose, with one seed (on digits with three);
accuracies are those of other rows and five other seeds. DP-Muon, on full
matrices, is tuned on digits alone: on texts a run takes minutes with the
gradients of each example.
"""

import contextlib
import dataclasses
import functools
import itertools
import statistics
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from scipy import stats

from benchmarks.accuracy import problems, sentences
from benchmarks.accuracy.sentences import Setting
from benchmarks.common import runner
from prism_optax import accounting

# Tasks that choose, and their texts.
TEXTS = {
  'sst2': 'sst2', 'clinc150': 'clinc150', 'banking77': 'banking77',
  'intents': 'clinc150',
}  # fmt: skip
DIGITS = 'digits'
# The first one chooses recipes.
EPSILONS, SEEDS = (3.0, 1.0, 8.0), tuple(range(5))
# Seeds that choose: a text needs one, because it has thousands of rows for it.
# Of pictures there are 199.
TUNING_SEED, MORE_SEEDS = 100, {DIGITS: (101, 102)}
FIXED, ADAPTED = 'prism', 'prism, adapted'
RIVAL, PROBE, MUON = 'dp-adamw', 'linear probe', 'dp-muon'
# The head starts at random, or from a release, which is a method by itself too.
HEADS, RIDGE = ('trained', 'ridge'), 'ridge'
DECAYS, LOWER, HIGHER = (0.1, 1.0), (3e-3, 1e-2, 3e-2), (1e-2, 3e-2, 1e-1)
# Learning rates with weight decays, for each start of the head. DP-AdamW alone
# gained by less decay. A probe has no adapters that could decay; adapted steps
# begin short, and decay loses the same share in each of them.
OPTIONS = {
  FIXED: [[(x, DECAYS[1]) for x in rates] for rates in (HIGHER, LOWER)],
  ADAPTED: [[(1e-2, 3.0), (3e-2, 1.0)]] * 2,
  RIVAL: [list(itertools.product(LOWER, DECAYS))] * 2,
  PROBE: [[(x, DECAYS[0]) for x in rates] for rates in (HIGHER, LOWER)],
}
# Of digits, with both decays for adapters.
WIDER = (1e-2, 3e-2, 1e-1, 3e-1)
# Expected batches where the advice is not 256: there are 1,200 pictures.
BATCHES = {(DIGITS, 1.0): 58, (DIGITS, 3.0): 157}
# Adapted steps have no rate that could be tuned on a task.
TUNED, BY_RECIPE = (FIXED, RIVAL, PROBE), (ADAPTED, RIVAL, PROBE)
# Tasks, epsilons, and whether a row is the mean of its tokens.
CELLS = [
  *((task, EPSILONS[0], pooled) for pooled in (True, False) for task in TEXTS),
  *((task, epsilon, True) for epsilon in EPSILONS[1:] for task in TEXTS),
  *((DIGITS, epsilon, True) for epsilon in sorted(EPSILONS)),
]


def options(task: str, method: str) -> list[list[tuple[float, float]]]:
  """Rates and decays of a method on a task, for each start of the head."""
  if task in TEXTS:
    return OPTIONS[method]
  decays = {PROBE: DECAYS[:1], MUON: (0.0,)}.get(method, DECAYS)
  return [list(itertools.product(WIDER, decays))] * len(HEADS)


def tuned_on(task: str) -> tuple[str, ...]:
  """The methods that are tuned on a task."""
  return TUNED if task in TEXTS else (*TUNED, MUON)


def settings(task: str, method: str, epsilon: float) -> list[Setting]:
  """The choices of a method, as settings of the tuning seed."""
  return [
    Setting(
      task=task,
      method=method,
      rate=rate,
      epsilon=epsilon,
      seed=TUNING_SEED,
      head=head,
      b1=None if method == MUON else 0.9,
      weight_decay=decay,
      start='canonical' if method == RIVAL else 'default',
      batch=BATCHES.get((task, epsilon), 256),
      pooled=True,
    )
    for head, numbers in zip(HEADS, options(task, method), strict=True)
    for rate, decay in numbers
  ]


def with_seeds(setting: Setting) -> list[Setting]:
  """A choice with all seeds that decide on it."""
  more = MORE_SEEDS.get(setting.task, ())
  return [setting, *(dataclasses.replace(setting, seed=x) for x in more)]


def score(find: runner.Find, setting: Setting) -> float | None:
  rows = [find(dataclasses.asdict(x)) for x in with_seeds(setting)]
  if not all(rows):
    return None
  return statistics.mean(row['tuning accuracy'] for row in rows if row)


def tuned(find: runner.Find, *which: Any) -> Setting:
  """The best choice of a method on a task.

  Raises:
    runner.Missing: If some were not run.
  """
  return runner.best(settings(*which), functools.partial(score, find))


def recipe(
  find: runner.Find, method: str, unseen: str
) -> tuple[float, float, str]:
  """Rate, decay and head, best on average over other texts than these.

  Raises:
    runner.Missing: If some were not run.
  """
  each = [
    settings(task, method, EPSILONS[0])
    for task, texts in TEXTS.items()
    if texts != unseen
  ]
  missing = [x for cell in each for x in cell if score(find, x) is None]
  if missing:
    raise runner.Missing(missing)
  scores = [[score(find, x) for x in cell] for cell in each]
  best = each[0][int(np.argmax(np.mean(scores, 0)))]
  return best.rate, best.weight_decay, best.head


def by_recipe(
  find: runner.Find, task: str, method: str, epsilon: float
) -> Setting:
  """A method on a task with the recipe of other texts."""
  rate, decay, head = recipe(find, method, TEXTS.get(task, task))
  chosen = settings(task, method, epsilon)[0]
  return dataclasses.replace(chosen, rate=rate, weight_decay=decay, head=head)


def plan(find: runner.Find) -> Iterator[dict[str, Any]]:
  """All runs that are known to be wanted; those that choose come first."""
  for task, epsilon, pooled in CELLS:
    chosen = [ridge_of(task, epsilon)]
    for choose, method in [
      *((tuned, x) for x in tuned_on(task)),
      *((by_recipe, x) for x in BY_RECIPE),
    ]:
      try:
        chosen.append(choose(find, task, method, epsilon))
      except runner.Missing as missing:
        for setting in missing.settings:
          yield from map(dataclasses.asdict, with_seeds(setting))
    for seed, setting in itertools.product(SEEDS, chosen):
      setting = dataclasses.replace(setting, seed=seed, pooled=pooled)
      yield dataclasses.asdict(setting)
  for task, epsilon, pooled in CELLS:
    if pooled and task in TEXTS:
      yield from map(dataclasses.asdict, by_share(task, epsilon))
  for seed, epsilon in itertools.product(SEEDS, EPSILONS):
    for setting in by_growth(epsilon) + by_scale(epsilon):
      yield dataclasses.asdict(dataclasses.replace(setting, seed=seed))


def by_share(task: str, epsilon: float) -> list[Setting]:
  """One training from a head that has half of the budget, and from ours."""
  usual = settings(task, ADAPTED, epsilon)[len(OPTIONS[ADAPTED][0])]
  return [dataclasses.replace(usual, head_share=0.5), usual]


def by_growth(epsilon: float) -> list[Setting]:
  """Digits without a release: ``prism`` with one first rate, fixed or adapted.

  The decays are the better one of two and that of the recipe.
  """
  fixed = settings(DIGITS, FIXED, epsilon)[0]
  return [fixed, dataclasses.replace(fixed, method=ADAPTED, weight_decay=3.0)]


def by_scale(epsilon: float) -> list[Setting]:
  """Digits without a release: ``prism`` with usual and with shorter logits.

  The shorter they are, the less a step of the head changes them.
  """
  usual = settings(DIGITS, FIXED, epsilon)[0]
  usual = dataclasses.replace(usual, rate=WIDER[-1])
  return [usual, dataclasses.replace(usual, temperature=3.0)]


def ridge_of(task: str, epsilon: float) -> Setting:
  return Setting(task=task, method=RIDGE, epsilon=epsilon, pooled=True)


def measure(setting: Setting, folders: runner.Folders) -> dict[str, Any]:
  """One row."""
  if setting.method != RIDGE:
    found = sentences.execute(setting, folders)
    del found['scores']
    return found
  given = sentences.problem_of(
    dataclasses.replace(setting, method='linear probe'), folders
  )
  sigma = accounting.calibrate_noise_multiplier(
    setting.epsilon, sentences.DELTA, 1.0, 1
  )
  head = sentences.ridge(given, sigma, jax.random.key(setting.seed))

  def right(rows: problems.Rows) -> float:
    guesses = np.argmax(rows[0] @ np.asarray(head.kernel), 1)
    return float(np.mean(guesses == rows[2]))

  return {
    'noise multiplier': sigma,
    'tuning accuracy': right(given.tuning),
    'test accuracy': right(given.test),
  }


def accuracies(find: runner.Find, setting: Setting) -> list[float]:
  """Of all seeds.

  Raises:
    runner.Missing: If some were not run.
  """
  each = [dataclasses.replace(setting, seed=seed) for seed in SEEDS]
  found = [find(dataclasses.asdict(x)) for x in each]
  missing = [x for x, row in zip(each, found, strict=True) if row is None]
  if missing:
    raise runner.Missing(missing)
  return [row['test accuracy'] for row in found if row]


@dataclasses.dataclass(frozen=True)
class Cell:
  """A task at an epsilon.

  Attributes:
    task: Its name.
    epsilon: At ``sentences.DELTA``.
    pooled: Whether a text is the mean of its tokens.
    tuned: Mean accuracy of each method that is tuned on this task.
    untuned: Accuracies of each method with its recipe, by seed.
  """

  task: str
  epsilon: float
  pooled: bool
  tuned: dict[str, float]
  untuned: dict[str, list[float]]

  @property
  def is_counted(self) -> bool:
    """Whether it is a text."""
    return self.task in TEXTS

  @property
  def best(self) -> float:
    """Accuracy of the best method; one release of a head is tuned as it is."""
    ridge = [statistics.mean(y) for x, y in self.untuned.items() if x == RIDGE]
    return max(*self.tuned.values(), *ridge)

  @property
  def regrets(self) -> dict[str, float]:
    """Points that each method loses by its recipe."""
    return {
      x: 100 * (self.best - statistics.mean(y)) for x, y in self.untuned.items()
    }

  @property
  def lead(self) -> tuple[float, float]:
    """Points of ``prism`` less DP-AdamW, both by recipe; p of paired seeds."""
    first, second = self.untuned[ADAPTED], self.untuned[RIVAL]
    found = stats.ttest_rel(first, second)
    points = 100 * (statistics.mean(first) - statistics.mean(second))
    return points, float(found.pvalue)


def cells(find: runner.Find) -> list[Cell]:
  """All whose rows are there."""
  found = []
  for task, epsilon, pooled in CELLS:
    with contextlib.suppress(runner.Missing):
      found.append(cell(find, task, epsilon, pooled))
  return found


def cell(find: runner.Find, task: str, epsilon: float, pooled: bool) -> Cell:
  """From its rows.

  Raises:
    runner.Missing: If some are not there.
  """

  def reported(setting: Setting) -> list[float]:
    return accuracies(find, dataclasses.replace(setting, pooled=pooled))

  best = {
    x: statistics.mean(reported(tuned(find, task, x, epsilon)))
    for x in tuned_on(task)
  }
  untuned = {x: reported(by_recipe(find, task, x, epsilon)) for x in BY_RECIPE}
  untuned[RIDGE] = reported(ridge_of(task, epsilon))
  return Cell(task, epsilon, pooled, best, untuned)


def named(word: str, pooled: bool) -> str:
  return word if pooled else f'{word}, all tokens'


def table(found: list[Cell]) -> str:
  """Regrets, then their mean and worst over the texts.

  The last columns say how far ``prism`` is ahead of DP-AdamW, both by their
  recipes, with Holm's p of the paired tests over all cells.
  """
  names = (*BY_RECIPE, RIDGE)
  corrected = holm([x.lead[1] for x in found])

  rows = [
    [
      named(x.task, x.pooled),
      x.epsilon,
      f'{x.best:.3f}',
      # Plus zero, because a little less than zero would be -0.0.
      *(f'{round(x.regrets[y], 1) + 0:.1f}' for y in names),
      f'{round(x.lead[0], 1) + 0:+.1f}',
      f'{p:.3f}' if p >= 0.001 else '<.001',
    ]
    for x, p in zip(found, corrected, strict=True)
  ]
  for pooled in (True, False):
    counted = [x.regrets for x in found if x.is_counted and x.pooled == pooled]
    for word, reduce in (('mean', statistics.mean), ('worst', max)):
      if counted:
        numbers = [f'{reduce([x[y] for x in counted]):.1f}' for y in names]
        rows.append([named(word, pooled), '', '', *numbers, '', ''])
  return runner.markdown(
    ['task', 'epsilon', 'best', *names, 'prism - dp-adamw', 'p'], rows
  )


def holm(values: list[float]) -> list[float]:
  """p values that hold for all tests together (Holm 1979)."""
  order = np.argsort(values)
  out, least = np.zeros(len(values)), 0.0
  for rank, i in enumerate(order):
    least = max(least, min(1.0, values[i] * (len(values) - rank)))
    out[i] = least
  return out.tolist()


def main() -> None:
  args = runner.add_data(runner.parser_of(__doc__)).parse_args()
  store = runner.store_of(
    args, 'regret', by_device=False, defaults=sentences.DEFAULTS
  )
  if not args.table:
    if args.data is None:
      raise SystemExit('--data is needed: the folder of the data sets.')
    folders = runner.Folders(args.data, args.cache)
    runner.run(
      store, plan, lambda x: measure(Setting(**x), folders), args.minutes
    )
  print(table(cells(store.find)))


if __name__ == '__main__':
  main()
