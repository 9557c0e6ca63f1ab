"""Heads from one release, without any training: by method and by noise.

    python benchmarks/accuracy/private_heads.py --data FOLDER [--cache FOLDER]

Sentence vectors of all-MiniLM-L6-v2, as it is; the share of other rows that
``heads.ridge`` and ``heads.class_means`` read, and what it costs. The constants
of both were found on rows set aside for tuning. Two minutes, and some more for
the vectors where they are not in the cache yet.
"""

import argparse
import pathlib
import statistics
import sys
from typing import Any

import jax
import numpy as np

ROOT = pathlib.Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / 'examples')]

from benchmarks.accuracy import problems, recipe_runs  # noqa: E402
from benchmarks.common import results  # noqa: E402
from prism_optax import accounting  # noqa: E402
from prism_optax.contrib import heads  # noqa: E402

NOISE_MULTIPLIERS = (0.0, 2.0, 3.0, 5.0, 8.0)
METHODS = {'ridge': heads.ridge, 'class means': heads.class_means}
SEEDS = 5


def accuracies(
  problem: problems.Problem, method: str, noise_multiplier: float, seeds: int
) -> list[float]:
  """Of the rows of the table, one for each draw of the noise."""
  vectors, _, labels = problem.train
  parts = np.array_split(np.arange(len(labels)), 1 + len(labels) // 2000)
  shown, _, right = problem.test
  found = []
  for seed in range(seeds if noise_multiplier else 1):
    head = METHODS[method](
      [(vectors[rows], labels[rows]) for rows in parts],
      num_classes=problem.classes,
      noise_multiplier=noise_multiplier,
      dataset_size=len(labels),
      prng_key=jax.random.key(seed),
    )
    guesses = np.argmax(shown @ np.asarray(head.kernel), 1)
    found.append(float(np.mean(guesses == right)))
  return found


def row(
  task: str, method: str, noise_multiplier: float, problem: problems.Problem
) -> dict[str, Any]:
  found = accuracies(problem, method, noise_multiplier, SEEDS)
  event = accounting.dpsgd_event(noise_multiplier, 1.0, 1)
  epsilon = accounting.epsilon(event, recipe_runs.DELTA)
  return {
    'task': task,
    'method': method,
    'noise multiplier': noise_multiplier,
    'epsilon': epsilon if noise_multiplier else None,
    'private rows': len(problem.train[0]),
    'classes': problem.classes,
    'rows': len(problem.test[0]),
    'accuracy': statistics.mean(found),
    'accuracies': found,
  }


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
  parser.add_argument('--data', type=pathlib.Path, required=True)
  parser.add_argument('--cache', type=pathlib.Path, default='runs/encoded')
  args = parser.parse_args()
  rows = []
  for task in recipe_runs.LENGTH:
    problem = recipe_runs.given(task, True, args.data, args.cache)
    for method in METHODS:
      for noise_multiplier in NOISE_MULTIPLIERS:
        rows.append(row(task, method, noise_multiplier, problem))
        print(
          f'{task:10} {method:12} {noise_multiplier:3g} '
          f'{rows[-1]["accuracy"]:.4f}',
          flush=True,
        )
  found = {'environment': results.environment(), 'rows': rows}
  print(f'Written to {results.save("private_heads", found)}')


if __name__ == '__main__':
  main()
