"""On many devices the result is that of one, and the noise is drawn once.

The programs run in processes of their own: the number of host devices is fixed
when JAX starts.
"""

import collections
import json
import pathlib
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest

from tests import conftest
from tests.scale_out import training

ROOT = pathlib.Path(__file__).parents[2]
# Three adaptive steps magnify the rounding of sums in another order: about
# 2e-5 of a leaf's largest entry. Another draw of noise would move it by 1.
ROUNDING = 2e-4


def _start(program, devices, *arguments):
  return subprocess.Popen(
    [sys.executable, '-m', f'tests.scale_out.{program}', *map(str, arguments)],
    env=conftest.devices(devices), cwd=ROOT, text=True,
    stdout=subprocess.PIPE, stderr=subprocess.PIPE,
  )  # fmt: skip


def _finish(*processes):
  try:
    done = [process.communicate(timeout=280) for process in processes]
  finally:
    for process in processes:
      process.kill()
  for process, (_, errors) in zip(processes, done, strict=True):
    assert process.returncode == 0, errors[-3000:]
  return [out for out, _ in done]


@pytest.fixture(scope='module')
def reports():
  (out,) = _finish(_start('eight_devices', 8))
  found = collections.defaultdict(list)
  for line in out.splitlines():
    row = json.loads(line)
    found[row['kind']].append(row)
  return found


def _sizes():
  """Entries of all trainable leaves together."""
  leaves = jax.tree.leaves(training.make_params())
  return sum(x.size for x in leaves)


@pytest.mark.slow
def test_eight_devices_give_what_one_gives(reports):
  assert len(reports['layout']) == 5
  for row in reports['layout']:
    assert row['difference'] < ROUNDING, row['name']
  for row in reports['shard_map']:
    assert row['difference'] < ROUNDING, row['name']
    assert row['same_on_all'], row['name']


@pytest.mark.slow
def test_a_private_training_with_sharded_batches(reports):
  assert len(reports['make_private']) == 4
  for row in reports['make_private']:
    assert row['sharded']
    assert row['difference'] < 1e-5


@pytest.mark.slow
def test_no_per_example_gradient_is_moved_or_copied(reports):
  """What moves is at most two integers for each trainable entry."""
  trainable = 2 * _sizes()
  for row in reports['layout']:
    sizes = [size for _, size in row['collectives']]
    assert max(sizes) <= trainable, row['name']
    if ', data, ' in row['name']:
      # One sum of everything, and it is the only thing that moves.
      assert row['collectives'] == [['all-reduce', trainable]], row['name']
    # An eighth of the examples each: the rest of the memory is small here.
    assert row['temporary'] < row['temporary_alone'] / 3, row['name']
  (row,) = reports['one backward pass']
  assert row['collectives'] == []
  assert row['difference'] < 1e-6
  # A program that does gather them is seen by the same reading of it.
  ((planted),) = reports['planted']
  assert max(size for _, size in planted['collectives']) > trainable


@pytest.mark.slow
def test_noise_is_the_same_on_every_mesh(reports):
  """Also for a key of the hardware generator: it only seeds the draws."""
  assert [row['impl'] for row in reports['noise']] == ['threefry2x32', 'rbg']
  for row in reports['noise']:
    assert row['heads_equal'], row
    assert row['difference'] < 1e-5, row  # Projection, in another order.
    assert row['distinct'], row
  (row,) = reports['default']
  assert row['impl'] == 'rbg'  # 128 bits, split by Threefry.
  assert row['partitionable']


@pytest.mark.slow
def test_two_processes_train_one_model_with_one_noise(tmp_path):
  with socket.socket() as free:
    free.bind(('localhost', 0))
    port = free.getsockname()[1]
  names = [tmp_path / f'{i}.npz' for i in range(2)]
  _finish(*(_start('two_processes', 4, port, 2, i, names[i]) for i in range(2)))
  one, other = (dict(np.load(name)) for name in names)
  # A fresh seed, but the same for both.
  seeds = [x.pop('seed') for x in (one, other)]
  np.testing.assert_array_equal(*seeds)
  alone, _ = training.train(training.optimizer_of('prism'))
  for path, value in jax.tree_util.tree_flatten_with_path(alone)[0]:
    found = one[jax.tree_util.keystr(path)]
    np.testing.assert_array_equal(found, other[jax.tree_util.keystr(path)])
    difference = np.max(np.abs(found - value))
    assert difference < ROUNDING * np.max(np.abs(value)), path
