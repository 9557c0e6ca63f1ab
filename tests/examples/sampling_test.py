"""Batches: Poisson, of one shape, a function of seed and step."""

import math

import numpy as np
import pytest
from finetuning import data, randomness, sampling
from optax import microbatching

SEED = np.arange(4, dtype=np.uint32)


def _draw(step, *, size=40, dataset_size=97, probability=0.2):
  return sampling.draw(
    SEED,
    step,
    dataset_size=dataset_size,
    sampling_probability=probability,
    size=size,
  )


def test_every_place_is_drawn_independently_with_the_probability():
  steps, places, q = 4000, 97, 0.2
  counts = np.zeros(places)
  sizes = []
  for step in range(steps):
    indices = _draw(step, size=places)
    real = indices[indices >= 0]
    assert len(set(real)) == len(real)  # Each place at most once.
    counts[real] += 1
    sizes.append(len(real))
  # Four to five standard errors, for 97 places at once.
  assert np.abs(counts / steps - q).max() < 4.5 * math.sqrt(q * (1 - q) / steps)
  # The number of records is binomial: a fixed size would have variance 0.
  variance = places * q * (1 - q)
  assert abs(np.mean(sizes) - places * q) < 4 * math.sqrt(variance / steps)
  assert abs(np.var(sizes) / variance - 1) < 4 * math.sqrt(2 / steps)


def test_a_batch_is_a_function_of_seed_and_step():
  assert np.array_equal(_draw(3), _draw(3))
  assert not np.array_equal(_draw(3), _draw(4))
  other = sampling.draw(
    SEED + np.uint32(1),
    3,
    dataset_size=97,
    sampling_probability=0.2,
    size=40,
  )
  assert not np.array_equal(_draw(3), other)


def test_a_batch_has_one_shape_and_is_cut_by_chance():
  draws = [_draw(step, size=10) for step in range(2000)]
  assert {indices.shape for indices in draws} == {(10,)}
  # Nearly every batch of 19 on average is cut: the ones that stay are drawn
  # from all places alike, not from the first.
  real = np.concatenate([indices[indices >= 0] for indices in draws])
  counts = np.bincount(real, minlength=97)
  expected = len(real) / 97
  assert np.abs(counts - expected).max() < 4.5 * math.sqrt(expected)


@pytest.mark.parametrize(
  ('batch', 'dataset', 'micro'), [(256, 67349, 32), (128, 900, 52), (8, 9, 4)]
)
def test_padded_size_is_rarely_exceeded_and_is_divisible(batch, dataset, micro):
  size = sampling.padded_size(batch, dataset, micro)
  deviation = math.sqrt(batch * (1 - batch / dataset))
  assert size % micro == 0
  assert size >= min(dataset, batch + 6 * deviation)
  assert size < min(dataset, batch + 6 * deviation) + micro + 1


def test_padding_is_spread_unless_it_is_to_be_skipped():
  microbatches = 5
  indices = np.full(40, -1)
  indices[:23] = np.arange(23)
  for arrange, used in ((lambda x: x, 5), (_last, 3)):
    groups = microbatching.reshape_batch_axis(
      arrange(indices), 40 // microbatches
    )
    assert (groups >= 0).any(axis=1).sum() == used
  assert sorted(_last(indices)) == sorted(indices)


def _last(indices):
  return sampling.padding_last(indices, 8)


def test_padding_empty_places_and_blank_records_are_all_zeros():
  examples = data.Examples(
    np.arange(1, 13, dtype=np.float32).reshape(4, 3),
    np.array([2, data.BLANK, 0, 1], np.int32),
  )
  # Record 3, a blank one, padding, a place beyond the file, record 0.
  batch, is_padding = sampling.gather(examples, np.array([3, 1, -1, 7, 0]))
  assert list(is_padding) == [False, True, True, True, False]
  assert np.array_equal(batch.inputs[[0, 4]], examples.inputs[[3, 0]])
  assert not batch.inputs[1:4].any()
  assert list(batch.labels) == [1, 0, 0, 0, 2]
  assert batch.inputs.dtype == np.float32
  assert batch.labels.dtype == np.int32


def test_secrets_are_fresh_unless_a_seed_is_given():
  draw = randomness.sampling_seed
  assert not np.array_equal(draw(None), draw(None))
  assert np.array_equal(draw(7), draw(7))
  assert not np.array_equal(draw(7), draw(8))
  assert randomness.noise_key(None) != randomness.noise_key(None)
  assert randomness.noise_key(7) == randomness.noise_key(7)
  assert randomness.noise_key(7) != randomness.noise_key(8)
