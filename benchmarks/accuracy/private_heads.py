"""Heads from one release, without any training: by method and by noise.

    python -m benchmarks.accuracy.private_heads --data FOLDER [--cache FOLDER]

Sentence vectors of all-MiniLM-L6-v2, as it is; the share of other rows that
``heads.ridge`` and ``heads.class_means`` read, and what it costs. The constants
of both were found on rows set aside for tuning. Two minutes, and some more for
the vectors where they are not in the cache yet.
"""

import statistics
from typing import Any

import jax
import numpy as np

from benchmarks.accuracy import problems, sentences
from benchmarks.common import runner
from prism_optax import accounting
from prism_optax.contrib import heads

METHODS = {'ridge': heads.ridge, 'class means': heads.class_means}
SEEDS = 5


def accuracies(
  problem: problems.Problem, method: str, noise_multiplier: float, seeds: int
) -> list[float]:
  """Of the rows of the table, one for each draw of the noise."""
  shown, _, right = problem.test
  found = []
  for seed in range(seeds if noise_multiplier else 1):
    head = sentences.head_of(
      METHODS[method], problem, noise_multiplier, jax.random.key(seed)
    )
    guesses = np.argmax(shown @ np.asarray(head.kernel), 1)
    found.append(float(np.mean(guesses == right)))
  return found


def measure(
  folders: runner.Folders, seeds: int = SEEDS, **setting: Any
) -> runner.Row:
  """One row."""
  probe = sentences.Setting(setting['task'], 'linear probe')
  problem = sentences.problem_of(probe, folders)
  noise_multiplier = setting['noise multiplier']
  found = accuracies(problem, setting['method'], noise_multiplier, seeds)
  event = accounting.dpsgd_event(noise_multiplier, 1.0, 1)
  epsilon = accounting.epsilon(event, sentences.DELTA)
  return {
    'epsilon': epsilon if noise_multiplier else None,
    'private rows': len(problem.train[0]),
    'classes': problem.classes,
    'rows': len(problem.test[0]),
    'accuracy': statistics.mean(found),
    'accuracies': found,
  }


if __name__ == '__main__':
  runner.main(
    __doc__,
    'private_heads',
    [
      {'task': task, 'method': method, 'noise multiplier': noise_multiplier}
      for task in ('sst2', 'clinc150', 'banking77')
      for method in METHODS
      for noise_multiplier in (0.0, 2.0, 3.0, 5.0, 8.0)
    ],
    measure,
    smoke={'task': 'banking77', 'seeds': 1},
    reads_text=True,
  )
