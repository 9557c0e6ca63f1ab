"""Attacks on the bits of a release, against the noise as it was and as it is.

An attacker knows the two sums that a release may come from. Each attack is
shown to succeed where it can: against noise that is added as floats, and
against sums of floats. ``benchmarks/privacy/low_bits.py`` plays them often.
"""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import prism_optax
from tests import cases, conftest
from tests.audit import low_bits, routes, worst_order
from tests.core import seams

RUNS, ENTRIES = 100, 1000
# Of RUNS answers with and without: five standard errors of their difference.
CHANCE = 5 * np.sqrt(0.5 / RUNS)


def _advantage(route, noise, others):
  """Of the answer yes where the sum with the canary explains no less."""
  play = _played(route, noise)
  worlds = low_bits.records(route.width, others)
  keys = jax.random.split(jax.random.key(0), (2, RUNS))
  outs, sums = zip(*map(play, keys, worlds), strict=True)
  sums = [np.asarray(x) for x in sums]
  answers = [
    low_bits.favours(route, np.asarray(out), sums) >= 0 for out in outs
  ]
  return low_bits.advantage(*answers)[0]


# Without and with other records it is one program.
_played = functools.lru_cache(maxsize=2)(low_bits.played)


# The others release what is made of the same noisy sums.
@cases.fast_first('name', ['hidden states'], routes.ROUTES)
def test_low_bits_name_no_member(name):
  """Nor do those of what is made of noisy sums; of noise as floats they do."""
  route = routes.ROUTES[name](routes.size_of(name, ENTRIES))
  for others in (False, True):
    former = _advantage(route, low_bits.noise_as_floats, others)
    assert former >= 0.95
    assert abs(_advantage(route, seams.add_noise, others)) < CHANCE


# One module whose frames are unit vectors, and a bias: coordinates of gradients
# are the gradients, and those of norm below one stay as they are.
PARAMS = {
  'bias': np.zeros(ENTRIES, np.float32),
  'm': {
    'lora_a': np.eye(5, 2, dtype=np.float32),
    'lora_b': np.eye(2, 4, dtype=np.float32),
  },
}


def _examples(rows):
  zeros = jax.tree.map(lambda x: np.zeros((len(rows), *x.shape)), PARAMS)
  return jax.tree.map(jnp.float32, zeros | {'bias': rows})


@functools.cache
def _release(stddev):
  parts = (
    prism_optax.intrinsic_clip(1.0),
    prism_optax.tangent_privatizer(stddev, prng_key=0),
  )

  @jax.jit
  def release(key, rows):
    tx = prism_optax.chain(*parts, retract_elsewhere=True)
    state = tx.init(PARAMS)
    state = (state[0], state[1]._replace(inner=key))
    return tx.update(_examples(rows), state, PARAMS)[0]['bias']

  return release


def _key(seed):
  return jax.random.key(seed, impl='rbg')


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
  release, key = _release(unit * seams.STEPS_OF_THE_LATTICE), _key(0)
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


def test_records_in_the_worst_order_move_sums_of_floats():
  """By more than a clip norm, the more of them the further."""
  counts = np.array([4096, 8192, 65_536])
  moves = [worst_order.float_sum_moves_by(count) for count in counts]
  np.testing.assert_allclose(moves, [1.25, 2, 65], rtol=1e-3)
  # And by no more than the bound of docs/explanation/exact_release.md.
  assert (moves <= 1 + 2 * counts * (counts * 2.0**-24)).all()


@pytest.mark.slow
def test_65_536_records_in_the_worst_order_have_one_sum():
  """In ten orders, under jit and not, on one device and on eight."""
  found = worst_order.exact_sums()
  assert len(found['sums']) == 1
  # By no more than the clip norm, and by all of it but the clip's margin.
  assert 0.9999 < found['moves'][0] <= found['moves'][1] <= 1
  printed = conftest.python('-m', 'tests.audit.worst_order', count=8)
  assert json.loads(printed) == {'devices': 8, **found}


def test_a_long_seed_is_not_found_by_trying_short_ones():
  """As it was when an integer kept its low 32 bits."""
  zeros = np.zeros(4, np.float32)
  seed = 2**40 + 1234

  @jax.jit
  def releases(words):
    keys = jax.random.wrap_key_data(words, impl='rbg')
    return jax.vmap(lambda key: seams.add_noise(key, zeros, 1.0))(keys)

  def of(number):
    return np.asarray(jax.random.key_data(seams.key_of(number)))

  tried = np.asarray(releases(np.stack([of(i) for i in range(2048)])))

  def found(number):
    secret = np.asarray(releases(of(number)[None]))
    return np.flatnonzero((tried == secret).all(-1))

  np.testing.assert_array_equal(found(seed % 2**32), [1234])  # The former key.
  assert not found(seed).size
