"""Regret: what a method loses when nothing is tuned on the private task.

    python benchmarks/accuracy/regret.py --data FOLDER [--minutes N] [--table]

A recipe is the learning rate and the weight decay of adapters that are best on
average over the tasks of ``CHOOSE`` at all epsilons; steps and batch come from
``training.plan``. All methods have b1 = .9 and a warm-up by 1 - b1^t, and
DP-AdamW starts in the gauge of ``lora.canonicalize``. Regret is the accuracy of
the best of all methods, each tuned on the task itself, less that of a method
with its recipe. Only the tasks of ``REPORT`` count, whose rows chose no recipe;
intents are of the same texts as the domains of clinc150.

A row is the mean of its tokens below the top layer of MiniLM, with adapters on
all six matrices of this layer and a trained head (``sentences.py``), so that a
run takes seconds. ``ridge`` is one private release of a head and has nothing
to tune. Rates are chosen on rows set aside by one seed, accuracies are those of
other rows and five other seeds. DP-Muon is left out: the gradients of full
matrices of each example take minutes a run.
"""

import dataclasses
import functools
import itertools
import pathlib
import statistics
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.accuracy import problems, sentences  # noqa: E402
from benchmarks.accuracy.sentences import Setting  # noqa: E402
from benchmarks.common import runner  # noqa: E402
from prism_optax import accounting, training  # noqa: E402
from prism_optax.contrib import heads  # noqa: E402

CHOOSE, REPORT = ('sst2', 'clinc150'), ('banking77', 'intents')
EPSILONS, SEEDS, TUNING_SEED = (3.0, 1.0, 8.0), tuple(range(5)), 100
GRADIENTS = 30_720
RATES = {
  'prism': (1e-2, 3e-2, 1e-1, 3e-1),
  'dp-adamw': (3e-3, 1e-2, 3e-2, 1e-1),
  'linear probe': (1e-2, 3e-2, 1e-1, 3e-1),
}
DECAYS = (0.1, 1.0)
# Methods that have something to choose; and a head by itself.
METHODS, RIDGE = tuple(RATES), 'ridge'


@functools.lru_cache(maxsize=32)
def planned(rows: int, epsilon: float) -> tuple[int, int]:
  """Steps and batch."""
  found = training.plan(
    rows,
    target_epsilon=epsilon,
    delta=sentences.DELTA,
    example_gradients=GRADIENTS,
  )
  return found.chosen.steps, found.chosen.expected_batch_size


def settings(
  sizes: Callable[[str], int], task: str, method: str, epsilon: float
):
  """The choices of a method, as settings of the tuning seed."""
  steps, batch = planned(sizes(task), epsilon)
  return [
    Setting(
      task=task,
      method=method,
      rate=rate,
      epsilon=epsilon,
      seed=TUNING_SEED,
      steps=steps,
      batch=batch,
      head='trained',
      b1=0.9,
      weight_decay=decay,
      start='canonical' if method == 'dp-adamw' else 'default',
      pooled=method != 'linear probe',
    )
    for rate, decay in itertools.product(RATES[method], DECAYS)
    # A probe has no adapters that could decay.
    if method != 'linear probe' or decay == DECAYS[0]
  ]


def score(find: runner.Find, setting: Setting) -> float | None:
  row = find(dataclasses.asdict(setting))
  return None if row is None else row['tuning accuracy']


def tuned(find: runner.Find, *which: Any) -> Setting:
  """The best choice of a method on a task.

  Raises:
    runner.Missing: If some were not run.
  """
  return runner.best(settings(*which), functools.partial(score, find))


def recipe(
  find: runner.Find, sizes: Callable[[str], int], method: str
) -> tuple[float, float]:
  """Rate and weight decay, best on average over the tasks that choose.

  Raises:
    runner.Missing: If some were not run.
  """
  cells = [
    settings(sizes, task, method, epsilon)
    for epsilon in EPSILONS
    for task in CHOOSE
  ]
  scores = [[score(find, x) for x in cell] for cell in cells]
  missing = [
    x
    for cell, row in zip(cells, scores, strict=True)
    for x, y in zip(cell, row, strict=True)
    if y is None
  ]
  if missing:
    raise runner.Missing(missing)
  best = cells[0][int(np.argmax(np.mean(scores, 0)))]
  return best.rate, best.weight_decay


def by_recipe(find: runner.Find, *which: Any) -> Setting:
  """A method on a task as its recipe has it."""
  sizes, _, method, _ = which
  rate, decay = recipe(find, sizes, method)
  chosen = settings(*which)[0]
  return dataclasses.replace(chosen, rate=rate, weight_decay=decay)


def plan(
  find: runner.Find, sizes: Callable[[str], int]
) -> Iterator[dict[str, Any]]:
  """All runs that are known to be wanted; those that choose come first."""
  chosen = []
  for epsilon, task, method in itertools.product(
    EPSILONS, CHOOSE + REPORT, METHODS
  ):
    for choose in (tuned, by_recipe):
      try:
        chosen.append(choose(find, sizes, task, method, epsilon))
      except runner.Missing as missing:
        yield from map(dataclasses.asdict, missing.settings)
  for seed, setting in itertools.product(SEEDS, chosen):
    yield dataclasses.asdict(dataclasses.replace(setting, seed=seed))
  for task, epsilon, seed in itertools.product(
    CHOOSE + REPORT, EPSILONS, SEEDS
  ):
    yield dataclasses.asdict(ridge_of(task, epsilon, seed))


def ridge_of(task: str, epsilon: float, seed: int) -> Setting:
  return Setting(task=task, method=RIDGE, epsilon=epsilon, seed=seed)


def measure(setting: Setting, folders: runner.Folders) -> dict[str, Any]:
  """One row."""
  if setting.method != RIDGE:
    found = sentences.execute(setting, folders)
    del found['scores']
    return found
  probe = dataclasses.replace(setting, method='linear probe')
  given = sentences.problem_of(probe, folders)
  vectors, _, labels = given.train
  parts = np.array_split(np.arange(len(labels)), 1 + len(labels) // 2000)
  sigma = accounting.calibrate_noise_multiplier(
    setting.epsilon, sentences.DELTA, 1.0, 1
  )
  head = heads.ridge(
    [(vectors[rows], labels[rows]) for rows in parts],
    num_classes=given.classes,
    noise_multiplier=sigma,
    dataset_size=len(labels),
    prng_key=jax.random.key(setting.seed),
  )

  def right(rows: problems.Rows) -> float:
    guesses = np.argmax(rows[0] @ np.asarray(head.kernel), 1)
    return float(np.mean(guesses == rows[2]))

  return {
    'noise multiplier': sigma,
    'tuning accuracy': right(given.tuning),
    'test accuracy': right(given.test),
  }


def accuracies(find: runner.Find, setting: Setting) -> list[float] | None:
  """Of all seeds, None while some are missing."""
  found = [
    find(dataclasses.asdict(dataclasses.replace(setting, seed=seed)))
    for seed in SEEDS
  ]
  if None in found:
    return None
  return [row['test accuracy'] for row in found if row]


def regrets(
  find: runner.Find, sizes: Callable[[str], int], task: str, epsilon: float
) -> dict[str, float] | None:
  """Points that each method loses; ``'best'`` is the best tuned accuracy."""
  try:
    best = [
      accuracies(find, tuned(find, sizes, task, x, epsilon)) for x in METHODS
    ]
    mine = {
      x: accuracies(find, by_recipe(find, sizes, task, x, epsilon))
      for x in METHODS
    }
  except runner.Missing:
    return None
  mine[RIDGE] = accuracies(find, ridge_of(task, epsilon, 0))
  if None in best or None in mine.values():
    return None
  top = max(statistics.mean(x) for x in (*best, mine[RIDGE]) if x)
  return {'best': top} | {
    x: 100 * (top - statistics.mean(y)) for x, y in mine.items() if y
  }


def table(find: runner.Find, sizes: Callable[[str], int]) -> str:
  """Regret by task and epsilon, then its mean and worst over ``REPORT``."""
  names = (*METHODS, RIDGE)
  rows, counted = [], []
  for task, epsilon in itertools.product(CHOOSE + REPORT, sorted(EPSILONS)):
    found = regrets(find, sizes, task, epsilon)
    if found is not None:
      points = [found[x] for x in names]
      counted += [points] if task in REPORT else []
      rows.append(
        [task, epsilon, f'{found["best"]:.3f}', *(f'{x:.1f}' for x in points)]
      )
  for word, reduce in (('mean', np.mean), ('worst', np.max)):
    if counted:
      ends = (f'{x:.1f}' for x in reduce(counted, 0))
      rows.append([word, '', '', *ends])
  return runner.markdown(['task', 'epsilon', 'best tuned', *names], rows)


def main() -> None:
  args = runner.add_data(runner.parser_of(__doc__)).parse_args()
  store = runner.store_of(
    args, 'regret', by_device=False, defaults=sentences.DEFAULTS
  )
  folders = runner.Folders(args.data, args.cache)
  if args.data is None:
    raise SystemExit('--data is needed: the folder of the data sets.')

  @functools.cache
  def sizes(task: str) -> int:
    given = sentences.problem_of(Setting(task, pooled=True), folders)
    return len(given.train[0])

  if not args.table:
    wanted = functools.partial(plan, sizes=sizes)
    runner.run(
      store, wanted, lambda x: measure(Setting(**x), folders), args.minutes
    )
  print(table(store.find, sizes))


if __name__ == '__main__':
  main()
