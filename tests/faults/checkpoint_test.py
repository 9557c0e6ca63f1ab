"""A checkpoint is gone on with as it is, or not at all."""

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from finetuning import checkpoints, training

RELEASE = {'plan': {'noise_multiplier': 2.0}, 'settings': {'l2_clip_norm': 1.0}}


def _checkpoint(step=0, key=7, rank=2):
  state = training.TrainState(
    {'lora_a': jnp.ones((4, rank)), 'lora_b': jnp.full((rank, 3), 0.5)},
    ({'prng_key': jax.random.key(key)}, jnp.zeros(())),
    jnp.int32(step),
    jnp.int32(0),
  )
  seed = np.arange(4, dtype=np.uint32)
  return checkpoints.Checkpoint(state, seed, np.zeros(32, np.uint8))


@pytest.fixture
def store(tmp_path):
  found = checkpoints.Checkpoints(tmp_path)
  found.save(_checkpoint(3), checkpoints.Ledger(RELEASE, 5))
  yield found
  found.close()


def test_what_was_saved_comes_back(store):
  found, ledger = store.restore(_checkpoint(key=0), RELEASE)
  assert ledger == (RELEASE, 5)
  assert int(found.state.step) == 3
  assert found.state.optimizer[0]['prng_key'] == jax.random.key(7)
  np.testing.assert_array_equal(found.sampling_seed, np.arange(4))


def test_another_model_is_refused_with_what_differs(store):
  with pytest.raises(
    ValueError,
    match=r"does not fit.*'lora_a'.*float32\(4, 2\) for float32\(4, 3\)",
  ):
    store.restore(_checkpoint(rank=3), RELEASE)


def test_a_checkpoint_without_the_noise_key_is_refused(tmp_path):
  store = checkpoints.Checkpoints(tmp_path)
  whole = _checkpoint(1)
  bare = whole._replace(
    state=whole.state._replace(optimizer=({}, whole.state.optimizer[1]))
  )
  store.save(bare, checkpoints.Ledger(RELEASE, 1))
  with pytest.raises(ValueError, match=r'no noise key \(.*prng_key'):
    store.restore(_checkpoint(), RELEASE)
  store.close()


@pytest.mark.parametrize(
  'changed',
  [
    RELEASE | {'plan': {'noise_multiplier': 1.0}},
    RELEASE | {'settings': {'l2_clip_norm': 2.0}},
    RELEASE | {'settings': {}},
  ],
)
def test_the_same_noise_at_another_scale_is_refused(store, changed):
  """Two releases that differ in scale alone: their difference is the data."""
  with pytest.raises(ValueError, match='belongs to another release.*second'):
    store.restore(_checkpoint(), changed)


def test_the_ledger_never_goes_back(store):
  with pytest.raises(ValueError, match='has 5 steps, and cannot go back to 4'):
    store.save(_checkpoint(4), checkpoints.Ledger(RELEASE, 4))
  store.save(_checkpoint(4), checkpoints.Ledger(RELEASE, 6))
  assert store.restore(_checkpoint(), RELEASE)[1].spent_steps == 6


def test_a_checkpoint_without_ledger_is_refused(store):
  shutil.rmtree(store.folder / '3' / 'ledger')
  with pytest.raises(ValueError, match='step 3 in .* has no ledger'):
    store.restore(_checkpoint(), RELEASE)


def test_damaged_arrays_are_refused(store):
  """Every file of the arrays cut in half: no zeros in place of the key."""
  damaged = [
    path
    for path in (store.folder / '3' / 'state').rglob('*')
    if path.is_file() and path.stat().st_size > 200
  ]
  assert damaged
  for path in damaged:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
  with pytest.raises(ValueError, match='step 3 in .* cannot be read'):
    store.restore(_checkpoint(), RELEASE)
