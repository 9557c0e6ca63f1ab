"""Batches: Poisson, of one shape, a function of the seed and the step."""

import math

import numpy as np
import pytest

from prism_optax import training
from prism_optax.training._sampling import Sampling

SEED = np.arange(4, dtype=np.uint32)
USUAL = Sampling(8, 40, 40, None, None)


def test_each_record_is_drawn_by_itself_with_the_probability():
  """Counts of records and sizes of batches against their binomial laws."""
  steps = 4000
  hits = np.zeros((steps, 40), bool)
  for step in range(steps):
    places = USUAL.draw(SEED, step)
    assert len(set(places[places >= 0])) == (places >= 0).sum()
    hits[step, places[places >= 0]] = True
  # Five standard deviations of 40 binomials.
  assert abs(hits.mean(0) - 0.2).max() < 5 * math.sqrt(0.16 / steps)
  assert hits.sum(1).var() == pytest.approx(40 * 0.16, rel=0.15)
  # No pair of records goes together: covariances are zero.
  covariance = np.cov(hits.T) - 0.16 * np.eye(40)
  assert abs(covariance).max() < 6 * 0.16 / math.sqrt(steps)


def test_a_batch_is_a_function_of_seed_and_step():
  one = USUAL.draw(SEED, 3)
  np.testing.assert_array_equal(one, USUAL.draw(SEED, 3))
  assert not np.array_equal(one, USUAL.draw(SEED, 4))
  assert not np.array_equal(one, USUAL.draw(SEED + 1, 3))


def test_large_batches_are_cut_by_chance():
  sampling = Sampling(30, 40, 10, None, None)
  assert sampling.truncated_batch_size == 10
  assert USUAL.truncated_batch_size is None
  counts = np.zeros(40)
  for step in range(800):
    places = sampling.draw(SEED, step)
    assert places.shape == (10,)
    assert (places >= 0).all()
    counts[places] += 1
  assert abs(counts / 800 - 0.25).max() < 5 * math.sqrt(0.1875 / 800)


def test_padding_fills_whole_microbatches():
  sampling = Sampling(8, 40, 24, 4, None)
  for step in range(20):
    parts = sampling.draw(SEED, step).reshape(4, 6).T  # Every sixth row.
    full = (parts >= 0).sum(1)
    assert sorted(full, reverse=True) == list(full)
    assert sum((full > 0) & (full < 4)) <= 1


def test_default_sizes_leave_room():
  def rows(expected, microbatch_size=None):
    execution = training.Execution(microbatch_size=microbatch_size)
    return Sampling.of(expected, 200, execution, None).padded_batch_size

  assert rows(20) == 46
  assert rows(20, 8) == 48
  assert rows(200) == 200


def test_records_of_a_user_are_chosen_by_chance():
  """Uniformly, each once at most; another choice for each user and step."""
  sampling = Sampling(3, 3, 4, None, 3)
  counts = np.zeros(5)
  for step in range(800):
    chosen = sampling.choose(SEED, step, 2, 5)
    assert len(set(chosen)) == len(chosen) == 3
    counts[chosen] += 1
  # Five standard deviations.
  assert abs(counts / 800 - 0.6).max() < 5 * math.sqrt(0.24 / 800)
  assert sorted(sampling.choose(SEED, 0, 2, 2)) == [0, 1]
  others = {
    tuple(sampling.choose(SEED, step, place, 50))
    for step in range(3)
    for place in range(3)
  }
  assert len(others) == 9
