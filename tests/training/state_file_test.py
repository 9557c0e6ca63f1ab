"""A state that is read from a file has the same bits."""

import os
import stat

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prism_optax import training
from tests import cases

TREE = {
  'a': jnp.arange(6, dtype=jnp.bfloat16).reshape(2, 3),
  'b': [np.asarray(3), jnp.zeros((), bool), jnp.zeros((0, 2))],
  'key': jax.random.split(jax.random.key(1, impl='rbg')),
  'placed': jax.device_put(jax.random.key(2), jax.devices()[0]),
}


def test_every_leaf_comes_back_and_only_its_owner_reads_it(tmp_path):
  path = tmp_path / 'x'
  path.write_text('old')
  os.chmod(path, 0o644)
  # As another user may have put it there.
  unfinished = tmp_path / f'x.{os.getpid()}.tmp'
  unfinished.write_text('')
  os.chmod(unfinished, 0o666)
  opened = len(os.listdir('/dev/fd'))
  training.save_state(path, TREE)
  assert len(os.listdir('/dev/fd')) == opened
  assert stat.S_IMODE(path.stat().st_mode) == 0o600
  assert list(tmp_path.iterdir()) == [path]  # Nothing half written is left.
  found = training.load_state(path, TREE)
  for x, y in zip(*map(jax.tree.leaves, (TREE, found)), strict=True):
    assert (type(x), x.dtype) == (type(y), y.dtype)
    assert getattr(x, 'committed', None) == getattr(y, 'committed', None)
  cases.assert_same_bits(*map(cases.saved, (TREE, found)))


def test_the_bytes_are_on_the_disk_before_the_name(tmp_path, monkeypatch):
  done = []
  for name in ('fsync', 'replace'):
    monkeypatch.setattr(os, name, lambda *x: done.append(len(x)))
  training.save_state(tmp_path / 'x', TREE)
  assert done == [1, 2, 1]  # The folder, which holds the name.


def test_an_error_that_comes_after_the_name_is_said(tmp_path, monkeypatch):
  def fsync(file):
    if stat.S_ISDIR(os.fstat(file).st_mode):
      raise OSError('no such disk')

  monkeypatch.setattr(os, 'fsync', fsync)
  with pytest.raises(OSError, match='no such disk'):
    training.save_state(tmp_path / 'x', TREE)


def test_one_process_writes(tmp_path, monkeypatch):
  monkeypatch.setattr(jax, 'process_index', lambda: 1)
  training.save_state(tmp_path / 'x', TREE)
  assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
  ('like', 'message'),
  [
    (TREE | {'a': TREE['a'].astype('float32')}, r"\['a'\]: .*bfloat16.* for"),
    (TREE | {'c': jnp.zeros(())}, r"\['c'\]: absent for"),
    ({'a': TREE['a'], 'b': TREE['b']}, r"\['key'\]: .* for nothing"),
    (TREE | {'key': jax.random.key(1)}, r'key<fry>'),
  ],
)
def test_another_state_is_named(like, message, tmp_path):
  training.save_state(tmp_path / 'x', TREE)
  with pytest.raises(ValueError, match=message):
    training.load_state(tmp_path / 'x', like)


def test_a_file_that_is_cut_or_foreign_is_refused(tmp_path):
  path = tmp_path / 'x'
  with pytest.raises(FileNotFoundError):
    training.load_state(path, TREE)
  training.save_state(path, TREE)
  whole = path.read_bytes()
  np.savez(tmp_path / 'other.npz', a=np.zeros(3))
  other = (tmp_path / 'other.npz').read_bytes()
  with np.load(path) as stored:
    arrays = dict(stored)
  arrays['header'] = str(arrays['header']).replace('state 1', 'state 0')
  np.savez(tmp_path / 'old.npz', **arrays)
  old = (tmp_path / 'old.npz').read_bytes()
  path.write_bytes(old)
  with pytest.raises(ValueError, match="its format is 'prism_optax state 0'"):
    training.load_state(path, TREE)
  for data in (whole[: len(whole) // 2], b'', b'text', other, old):
    path.write_bytes(data)
    with pytest.raises(ValueError, match='a file of save_state'):
      training.load_state(path, TREE)
