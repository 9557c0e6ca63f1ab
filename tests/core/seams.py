"""What other rooms of the tests need of the inside of the package.

Private names stand here and in the tests of `core` alone: to rename one edits
no other test.
"""

import contextlib
import functools
from unittest import mock

import jax
import numpy as np

from prism_optax import _clip, _exact_sum, _lattice
from prism_optax._randomness import _keys
from prism_optax.accounting import (
  _epsilon,
  _filters,
  _gaussian,
  _ledger,
  _matrix_mechanism,
)
from prism_optax.contrib import _one_shot_release
from prism_optax.fixed_rank import _lifts
from prism_optax.training import (
  _fingerprint,
  _journal,
  _make,
  _private,
  _program,
  _sampling,
  _seen,
  _words,
)
from prism_optax.transforms import _privatizer

FOREIGN_WORDS = _words.FOREIGN
FINGERPRINT = _fingerprint.Fingerprint._fields
digest_of = _fingerprint.release


def gradients_of(private):
  """``gradients(params, frozen, examples)``, one for each record or user."""
  return _program.gradients(private.parts)


def proof_of_records(private, params, frozen, batch):
  """That no record meets another, as a step proves it before it begins."""
  optimizer = jax.eval_shape(private.parts.transformation.init, params)
  traced = private._program.run.trace(
    params, optimizer, frozen, batch.examples, batch.is_padding_example,
    batch.is_present,
  )  # fmt: skip
  return _program.prove_apart(private.parts, traced, batch)


def run_step(private, params, optimizer, frozen, examples, padding,
             present=None, digest=None):  # fmt: skip
  """The compiled step of a training: parameters, state, whether it is held.

  Without the digest that makes the noise of other data another one.
  """
  return private._step(
    params, optimizer, frozen, examples, padding, present, digest
  )


def release_digest(state, batch, params):
  """What the noise of a step depended on besides its key."""
  rows = batch.examples, batch.is_padding_example, batch.is_present
  rows = np.asarray(_fingerprint.of_arrays(rows))
  release = digest_of(state.fingerprint, rows, 0)
  return release ^ _fingerprint.of_arrays(params)


@contextlib.contextmanager
def elsewhere():
  """Within it, trainings that are used first are on another machine."""
  original = _fingerprint.environment

  def other(*args):
    return original(*args) + ' elsewhere'

  with mock.patch.object(_fingerprint, 'environment', other):
    yield


def noise_multiplier_seen(private):
  """The joint one, as it is read from the program of the optimizer."""
  parts = private.parts
  rows = parts.settings.sampling.padded_batch_size
  seen = _seen.look(parts.transformation, parts.shapes, rows)
  return _seen.joint_noise_multiplier(seen, parts.releases_per_step)


# All noise of the package is added by `add_noise(key, tree, stddev, **marks)`,
# to arrays or to sums on a lattice.
add_noise = _lattice.add_noise
gaussian = _privatizer.gaussian
to_float = _lattice.to_float


def is_sum(x):
  return isinstance(x, _exact_sum.LatticeSum)


def in_float64(x):
  """An array, or a sum on the lattice, exactly."""
  if is_sum(x):
    return _exact_sum.integers_of(x) * float(x.unit)
  return np.asarray(x, np.float64)


integers_of = _exact_sum.integers_of
words_of = _keys.key_words


@contextlib.contextmanager
def noise_replaced(by):
  """Within it, what is traced or run adds its noise by another function."""
  with mock.patch.object(_lattice, 'add_noise', by):
    yield


class Spy:
  """Adds the usual noise and remembers the words of the keys."""

  def __init__(self):
    self.keys = []

  def __call__(self, key, *args, **marks):
    self.keys.append(tuple(np.asarray(x).item() for x in words_of(key)))
    return add_noise(key, *args, **marks)


def keys_of_steps(prng_key, count):
  """The words of the keys of some steps of a privatizer."""
  key, used = _keys.resolve_key('key', prng_key, (), words=4), []
  for _ in range(count):
    key, drawn = _keys.split(key)
    used.append(tuple(np.asarray(jax.random.key_data(drawn)).tolist()))
  return used


gaussian_delta = _gaussian.gaussian_delta
gaussian_mu = _gaussian.gaussian_mu
matrix_sensitivity = _matrix_mechanism.matrix_mechanism_sensitivity
release_guarantee = _epsilon.release_guarantee


def renyi_orders(budget):
  return budget._filters['session']['renyi']._orders


@contextlib.contextmanager
def interrupted(where):
  """Within it Ctrl-C comes while a ledger is begun, read or after a row."""
  append = _ledger.Transaction.append

  def stop(*args):
    if where == 'append':
      append(*args)
    raise KeyboardInterrupt

  owner, name = {
    'append': (_ledger.Transaction, 'append'), 'read': (_ledger, 'Account'),
    'start': (_ledger._Chain, 'start'),
  }[where]  # fmt: skip
  with mock.patch.object(owner, name, stop):
    yield


def version_of_rules(number):
  """Within it, ledgers are of another version."""
  return mock.patch.object(_filters, 'VERSION', number)


STEPS_OF_THE_LATTICE = _exact_sum.STEPS  # In a standard deviation of the noise.
lift = _lifts.lift
key_of = functools.partial(_keys.resolve_key, 'prng_key', params=(), words=4)
exact_multiplier = _make.gradients_noise_multiplier


def exact_sum(rows, absent, stddev):
  """Of contributions clipped to one: integers (high, low), and their unit."""
  clipped, _ = _clip.Clip(_clip.FlatClipping()).sum(
    _clip.DENSE, {'w': rows}, is_padding_example=absent
  )
  return clipped.on_lattice(stddev)['w']


def as_floats(tree):
  """Sums on the lattice as the floats that they stand for."""
  return jax.tree.map(
    lambda x: to_float(x) if is_sum(x) else x, tree, is_leaf=is_sum
  )


def gradients_multiplier(clipping, joint, size):
  """Of the noise of gradients, or what `charged_for` says."""
  return _make.gradients_noise_multiplier(clipping, joint, size)


def charged_for(multiplier):
  """Within it, gradients have another part of the noise than they should."""
  return mock.patch.object(_make, 'gradients_noise_multiplier', multiplier)


def nobody_looks():
  """Within it, the noise of a program is not compared with what is charged."""
  return mock.patch.object(_seen, 'check', return_value=None)


def trace_again(private):
  """The step is traced anew when it runs, and nothing is proved of it."""
  program, original = private._program, private._step.__wrapped__
  (digest,) = program.digests.values() or [np.ones(8, np.uint32)]
  program.digest = lambda arguments, batch: digest
  # A function of its own: what JAX has traced of the other one, it keeps.
  private._step = jax.jit(lambda *args: original(*args), donate_argnums=(0, 1))


_digest_of = _private.data_digest


@contextlib.contextmanager
def one_digest():
  """Within it all data and all batches are read, and have the same digest."""

  def release(fingerprint, rows, attempt):
    return digest_of(fingerprint, np.zeros_like(rows), attempt)

  with (
    mock.patch.object(
      _private, 'data_digest', lambda *args: np.ones_like(_digest_of(*args))
    ),
    mock.patch.object(_fingerprint, 'release', release),
  ):
    yield


def noise_of_the_key():
  """Within it noise is of key and step alone, so that machines agree on it."""
  fixed = np.zeros_like(_fingerprint.UNKNOWN)
  return mock.patch.multiple(
    _fingerprint, release=lambda *_: fixed, of_arrays=lambda _: fixed
  )


def releases_of(path):
  """Numbers of steps and of releases in a journal."""
  return tuple(_journal.Journal(path).count())


@contextlib.contextmanager
def one_shot_sums():
  """Yields a list of the noisy sums of the one-shot releases within it."""
  found, release = [], _one_shot_release.release

  def spy(*args, **options):
    released = release(*args, **options)
    found.append(jax.tree.map(np.float64, dict(released.arrays)))
    return released

  with mock.patch.object(_one_shot_release, 'release', spy):
    yield found


def before_each_draw(call):
  """Within it ``call(step)`` comes before a batch is drawn."""
  draw = _sampling.Sampling.draw

  def called(self, seed, step):
    call(step)
    return draw(self, seed, step)

  return mock.patch.object(_sampling.Sampling, 'draw', called)
