"""Poisson batches of one shape, drawn from a secret seed and the step.

The guarantee rests on the batches being random and unseen. Each step's batch
is a function of a secret seed and of the step number, so that a resumed run
draws what the interrupted one would have drawn, without a generator to save.
"""

import math
from typing import NamedTuple

import numpy as np
from jax_privacy import batch_selection, sharding_utils

from . import data


class Batch(NamedTuple):
  """One padded batch; every array has the same shape at every step.

  Attributes:
    inputs: ``(padded size, ...)``, zeros where there is no example.
    labels: ``(padded size,)`` int32, 0 where there is no example; or ``(padded
      size, length)``, ``BLANK`` there.
  """

  inputs: np.ndarray
  labels: np.ndarray


def padded_size(
  expected_batch_size: int, dataset_size: int, microbatch_size: int
) -> int:
  """The fixed size of a batch: a multiple of ``microbatch_size``.

  Six standard deviations above the expected size. Fewer would be cheaper to
  compute, and costs more epsilon: a batch that is cut lets one record push out
  another, and at noise multiplier 0.5, 300 steps of 256 in 67,349, a limit of
  four deviations raises epsilon from 4.98 to 6.17, one of six by 1e-4.
  """
  probability = expected_batch_size / dataset_size
  deviation = math.sqrt(expected_batch_size * max(0.0, 1 - probability))
  limit = min(dataset_size, math.ceil(expected_batch_size + 6 * deviation))
  return -(-limit // microbatch_size) * microbatch_size


def draw(
  seed: np.ndarray,
  step: int,
  *,
  dataset_size: int,
  sampling_probability: float,
  size: int,
) -> np.ndarray:
  """The records of one step.

  Args:
    seed: ``(4,)`` uint32, secret.
    step: Number of the step, from 0.
    dataset_size: Number of places to draw from.
    sampling_probability: Probability of each place, drawn independently.
    size: The batch is cut to so many, by chance.

  Returns:
    ``(size,)`` integers; -1 where there is none.
  """
  rng = np.random.default_rng(
    np.random.SeedSequence([int(word) for word in seed], spawn_key=(step,))
  )
  strategy = batch_selection.CyclicPoissonSampling(
    sampling_prob=sampling_probability,
    iterations=1,
    truncated_batch_size=size,
  )
  (drawn,) = strategy.batch_iterator(dataset_size, rng)
  indices = np.full(size, -1, np.int64)
  indices[: len(drawn)] = drawn
  return indices


def padding_last(indices: np.ndarray, microbatch_size: int) -> np.ndarray:
  """Reorders a batch so that its padding fills whole micro-batches.

  Micro-batches take every so-many-th record: as drawn, padding is spread over
  all of them, and a step takes the same time however many records it has.
  Reordered, micro-batches of nothing but padding can be skipped.
  """
  order = sharding_utils.compute_early_stopping_order(
    len(indices), microbatch_size
  )
  return indices[order]


def gather(
  examples: data.Examples, indices: np.ndarray
) -> tuple[Batch, np.ndarray]:
  """Collects the records of a batch.

  Args:
    examples: The file's records. Places beyond the last row are empty: the
      declared size of a data set may exceed the real one.
    indices: ``(size,)`` from ``draw``.

  Returns:
    The batch, and ``(size,)`` booleans, True where no gradient must be added:
    padding, empty places and blank records. Their inputs are zeros.
  """
  inputs, labels = examples
  present = (indices >= 0) & (indices < len(labels))
  rows = np.where(present, indices, 0)
  chosen = labels[rows]
  present &= (chosen != data.BLANK).reshape(len(chosen), -1).any(axis=1)

  def only_present(values: np.ndarray, fill: int) -> np.ndarray:
    broadcast = present.reshape(-1, *(1,) * (values.ndim - 1))
    return np.where(broadcast, values, fill)

  # A class has to be a number of one; a token may be none at all.
  fill = 0 if labels.ndim == 1 else data.BLANK
  batch = Batch(
    only_present(inputs[rows], 0).astype(inputs.dtype),
    only_present(chosen, fill).astype(np.int32),
  )
  return batch, ~present
