"""Attacks on the bits of a release, against the noise as it was and as it is.

An attacker knows the two sums that a release may come from. Floating-point
noise tells them apart with certainty: for most outputs no float n leads there
from the wrong sum (Mironov 2012). Each attack is shown to succeed against noise
that is added as a float.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import prism_optax
from prism_optax import _lattice, inference

RUNS, ENTRIES = 100, 1000


def _float_noise(x, stddev):
  """The former release: a normal number in float32, scaled and added."""
  normal = np.random.default_rng(0).normal(size=(RUNS, *x.shape))
  return x + np.float32(stddev) * normal.astype(np.float32)


def _unexplained(out, x, stddev):
  """For how many entries no float n near the right one gives ``out``."""
  stddev = np.float32(stddev)
  n = ((np.float64(out) - np.float64(x)) / np.float64(stddev)).astype(
    np.float32
  )
  found = np.zeros(out.shape, bool)
  for step in range(-4, 5):
    near = (n.view(np.int32) + step).view(np.float32)
    found |= x + stddev * near == out
  return np.sum(~found, -1)


def _advantage(release, with_it, without, stddev):
  """How much better than by a coin the attacker tells a record's presence.

  The answer is yes where the sum with it explains at least as many entries.
  """

  def says_yes(outs):
    return np.mean(
      _unexplained(outs, with_it, stddev) <= _unexplained(outs, without, stddev)
    )

  return says_yes(release(with_it)) - says_yes(release(without))


# Of RUNS answers with and without: five standard errors of their difference.
CHANCE = 5 * np.sqrt(0.5 / RUNS)


def _sums(seed, norm=1.0, others=31):
  """With and without a record of that norm, exact in float32 and not."""
  rng = np.random.default_rng(seed)
  rows = rng.normal(size=(others + 1, ENTRIES))
  rows *= norm / np.linalg.norm(rows, axis=1, keepdims=True)
  rows = rows.astype(np.float32)
  return rows.sum(0), rows[1:].sum(0)


@pytest.mark.parametrize('others', [0, 31])
def test_low_bits_name_no_member(others):
  sums = _sums(0, others=others)
  former = functools.partial(_float_noise, stddev=4.0)
  assert _advantage(former, *sums, 4.0) >= 0.95
  keys = jax.random.split(jax.random.key(0), RUNS)

  @jax.jit
  def release(x):
    return jax.vmap(lambda key: _lattice.add_noise(key, x, 4.0))(keys)

  assert abs(_advantage(release, *sums, 4.0)) < CHANCE


def test_low_bits_of_a_hidden_state_tell_nothing():
  states = np.random.default_rng(1).normal(size=(2, 1536))
  states /= np.linalg.norm(states, axis=-1, keepdims=True)
  states = (0.99 * states).astype(np.float32)  # The clip leaves these alone.
  former = functools.partial(_float_noise, stddev=4.8)
  assert _advantage(former, *states, 4.8) >= 0.95
  one = functools.partial(
    inference.privatize_hidden_states, l2_clip_norm=1.0, stddev=4.8
  )
  keys = jax.random.split(jax.random.key(1), RUNS)
  release = jax.jit(lambda x: jax.vmap(lambda key: one(x, key))(keys))
  assert abs(_advantage(release, *states, 4.8)) < CHANCE


# One module whose frames are unit vectors, and a bias: coordinates of gradients
# are the gradients, and those of norm below one stay as they are.
PARAMS = {
  'bias': jnp.zeros(ENTRIES),
  'm': {'lora_a': jnp.eye(5, 2), 'lora_b': jnp.eye(2, 4)},
}


def _examples(rows):
  zeros = jax.tree.map(lambda x: np.zeros((len(rows), *x.shape)), PARAMS)
  return jax.tree.map(jnp.float32, zeros | {'bias': rows})


@functools.cache
def _release(stddev, fused=True):
  parts = (
    prism_optax.intrinsic_clip(1.0),
    prism_optax.tangent_privatizer(stddev, prng_key=0),
  )

  @jax.jit
  def release(key, rows):
    tx = prism_optax.chain(*parts)
    state = tx.init(PARAMS)
    state = (state[0], state[1]._replace(prng_key=key))
    return tx.update(_examples(rows), state, PARAMS)[0]['bias']

  return release


def _key(seed):
  return jax.random.key(seed, impl='rbg')


def test_low_bits_behind_a_clip_tell_nothing():
  rng = np.random.default_rng(2)
  rows = rng.normal(size=(32, ENTRIES)).astype(np.float32)
  rows *= 0.9 / np.linalg.norm(rows, axis=1, keepdims=True)

  def release(x):
    records = rows if x is with_it else rows[1:]
    return np.stack([_release(4.0)(_key(i), records) for i in range(RUNS)])

  with_it, without = rows.sum(0), rows[1:].sum(0)
  assert abs(_advantage(release, with_it, without, 4.0)) < CHANCE


def test_the_noise_behind_a_clip_has_its_size():
  rows = np.zeros((4, ENTRIES), np.float32)
  outs = np.stack([_release(2.0)(_key(i), rows) for i in range(20)])
  # Relative standard error of 20,000 entries: half a per cent.
  assert outs.std() == pytest.approx(2.0, rel=0.02)


def test_sums_behind_a_clip_are_exact_in_any_order():
  """Integers of each record's own, whatever comes before and behind it."""
  rng = np.random.default_rng(3)
  rows = rng.normal(size=(512, ENTRIES)) * 10.0 ** rng.integers(-4, 0, (512, 1))
  rows *= 0.9 / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 0.9)
  rows = rows.astype(np.float32)
  unit = 2.0**-18  # A power of two, so that the test divides without rounding.
  release, key = _release(unit * _lattice.STEPS), _key(0)
  noise = np.float64(release(key, np.zeros_like(rows))) / unit
  terms = np.trunc(np.float64(rows) / unit)
  outs = {release(key, rows).tobytes()}
  for seed in range(10):
    order = np.random.default_rng(seed).permutation(len(rows))
    outs.add(np.asarray(release(key, rows[order])).tobytes())
  assert len(outs) == 1
  steps = np.frombuffer(outs.pop(), np.float32) / np.float64(unit)
  exact = noise + terms.sum(0)
  # The release is a float: sums of 24 bits are exact, and so is the noise.
  assert (abs(exact) < 2**24).all()
  np.testing.assert_array_equal(steps, exact)
