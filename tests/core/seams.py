"""What other rooms of the tests need of the inside of the package.

Private names stand here and in the tests of `core` alone: to rename one edits
no other test.
"""

import contextlib
from unittest import mock

import jax
import numpy as np

from prism_optax import _lattice
from prism_optax._randomness import _keys
from prism_optax.accounting import _filters, _ledger
from prism_optax.training import _fingerprint, _program, _seen, _words
from prism_optax.transforms import _privatizer

FOREIGN_WORDS = _words.FOREIGN
FINGERPRINT = _fingerprint.Fingerprint._fields
digest_of = _fingerprint.release


def gradients_of(private):
  """``gradients(params, frozen, examples)``, one for each record or user."""
  return _program.gradients(private.parts)


def proof_of_records(private, params, frozen, batch):
  """That no record meets another, as a step proves it before it begins."""
  return _program.prove_apart(private.parts, params, frozen, batch)


def run_step(private, params, optimizer, frozen, examples, padding,
             present=None, digest=None):  # fmt: skip
  """The compiled step of a training: parameters, state, whether it is held.

  Without the digest that makes the noise of other data another one.
  """
  return private._step(
    params, optimizer, frozen, examples, padding, present, digest
  )


def release_digest(state, params):
  """What the noise of the last step depended on besides its key."""
  release = digest_of(state.fingerprint, 0)
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


# All noise of the package is added by `add_noise(key, tree, stddev)`, to arrays
# or to sums on a lattice.
add_noise = _lattice.add_noise
gaussian = _privatizer.gaussian
to_float = _lattice.to_float


def is_sum(x):
  return isinstance(x, _lattice.LatticeSum)


def key_words(key):
  return tuple(np.asarray(x).item() for x in _keys.key_words(key))


@contextlib.contextmanager
def noise_replaced(by):
  """Within it, what is traced or run adds its noise by another function."""
  with mock.patch.object(_lattice, 'add_noise', by):
    yield


class Spy:
  """Adds the usual noise and remembers the words of the keys."""

  def __init__(self):
    self.keys = []

  def __call__(self, key, *args):
    self.keys.append(key_words(key))
    return add_noise(key, *args)


def keys_of_steps(prng_key, count):
  """The words of the keys of some steps of a privatizer."""
  key, used = _keys.resolve_key('key', prng_key, (), words=4), []
  for _ in range(count):
    key, drawn = _keys.split(key)
    used.append(tuple(np.asarray(jax.random.key_data(drawn)).tolist()))
  return used


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
