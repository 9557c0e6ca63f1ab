"""A copy of a released head is known wherever it is; nothing else is."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prism_optax import _identity, contrib, training
from prism_optax.contrib import heads

check = training._releases.check_declared
# A cast to bfloat16 leaves less: it takes more numbers. As many as a head with
# sixty features has.
LARGE = _identity.marked(np.random.default_rng(2).normal(size=(60, 3)) / 20)


@functools.cache
def head_of(make=heads.ridge, prng_key=None):
  """A release, with noise."""
  rng = np.random.default_rng(1)
  labels = rng.integers(3, size=200)
  features = rng.normal(size=(200, 16)) + 2 * np.eye(3, 16)[labels]
  return make(
    [(features, labels)], num_classes=3, noise_multiplier=1.0,
    dataset_size=200, prng_key=prng_key,
  )  # fmt: skip


@functools.cache
def large_head():
  return dataclasses.replace(
    head_of(), kernel=jnp.asarray(LARGE), digest='large', key_digest='large'
  )


COPIES = {
  'as it is': lambda x: x,
  'device_put': lambda x: jax.device_put(jnp.copy(x), jax.devices()[0]),
  'times 10': lambda x: 10 * x,
  'times -0.37, in place': lambda x: np.negative(0.37 * np.asarray(x)),
  'bfloat16': lambda x: x.astype(jnp.bfloat16),
  'float16': lambda x: x.astype(jnp.float16),
  'float64': lambda x: np.float64(x),
  'bfloat16, and back': lambda x: x.astype(jnp.bfloat16).astype(jnp.float32),
  'bfloat16, twice': lambda x: 1.37 * x.astype(jnp.bfloat16),
  'transposed': lambda x: x.T,
  'columns apart': lambda x: x * np.exp2(np.arange(3) / 3 / _identity._POINTS),
  'a column': lambda x: x[:, 1],
}


@pytest.mark.parametrize('copy', COPIES)
def test_a_copy_of_a_head_has_to_be_accounted_for(copy):
  """In parameters and in frozen weights; declared, it is used at will."""
  head = large_head() if 'bfloat16' in copy else head_of()
  tree = {'layer': jnp.ones((2, 3)), 'head': COPIES[copy](head.kernel)}
  with pytest.raises(
    ValueError, match=r"frozen\['head'\] .*prior_releases=\[head\]"
  ):
    check('frozen', tree, [])
  other = dataclasses.replace(head, kernel=jnp.ones((2, 2)), digest='other')
  with pytest.raises(ValueError, match='not accounted for'):
    check('frozen', tree, [other])
  check('frozen', tree, [other, head])


def test_another_head_than_the_declared_one_is_refused():
  """Of the same records, with other noise: two releases, one declared."""
  for found in (head_of(heads.class_means), head_of(prng_key=5)):
    with pytest.raises(ValueError, match='not accounted for'):
      check('params', [found.kernel], [head_of()])


def test_no_copy_has_a_column_of_its_own():
  """Whatever the signs of the numbers that differ."""
  kernel = np.array([[0.3, -1.7, 2.2], [1.0, -0.9, 4.1]])
  assert _identity.is_copy(-kernel.T, kernel)
  assert _identity.is_copy(kernel * [2, -0.3, 1], kernel)
  assert not _identity.is_copy(kernel * [[1, 2, 1], [1, -3, 1]], kernel)


def test_three_numbers_are_enough_to_know_a_release():
  # A third of a step off the grid.
  kernel = _identity.marked(np.array([[0.3, -1.7, 2.2]])) * np.float32(1.0061)
  for same in (kernel, kernel[None], kernel.T):  # Of one layer, of one class.
    assert _identity.is_marked(same)
  assert not _identity.is_marked(kernel[:, :2])
  assert not _identity.is_marked(kernel[:, :0])
  with np.errstate(all='raise'):
    assert not _identity.marked(np.zeros(3)).any()


def test_entries_of_something_else_hide_no_release():
  x = np.random.default_rng(0).normal(size=80)
  assert _identity.is_marked(np.r_[_identity.marked(x[:48]), x[48:]])


def test_what_is_no_copy_passes():
  """And says so: `LinearHead` has the table."""
  kernel = large_head().kernel
  other = np.random.default_rng(0).normal(size=kernel.shape)
  other = jnp.asarray(other, jnp.float32)
  tree = [
    jax.random.key(0),
    np.arange(9),
    jax.ShapeDtypeStruct((3,), jnp.float32),
    *(other, jnp.zeros((5, 5)), jnp.eye(7), np.nan * other, 1.0, 'text'),
    *(kernel + 0.1 * other, kernel.T @ kernel),
    # Quantised weights, windows, all numbers of a type.
    np.round(127 * np.asarray(other)) * np.float32(0.003),
    *(np.linspace(-1, 1, 100), 1 / np.arange(1.0, 200), np.hanning(64)),
    np.arange(2**16, dtype=np.uint16).view(jnp.bfloat16),
    *(other.astype(x) for x in (jnp.bfloat16, jnp.float16, jnp.float8_e4m3fn)),
    head_of().kernel_for_other_records(),
  ]
  check('frozen', tree, [])


def test_no_table_of_positions_is_taken_for_a_release():
  """Frequencies are geometric sequences, of which some have whole steps."""
  whole = 2.0 ** (7 / _identity._POINTS)
  for base in (500.0, 1e4, 1e5, 1.6e5, 5e5, 1e6, 1e7, 10.0, 1e3, 2.0**8):
    for size in (3, 4, 8, 16, 20, 32, 40, 48, 56, 64, 128, 256):
      for table in (
        base ** -(np.arange(size) / size),
        base ** -(np.arange(size) / (size - 1)),
        whole ** -np.arange(size),
      ):
        for dtype in (np.float64, np.float32, np.float16, jnp.bfloat16):
          twice = np.stack([table, table]).astype(dtype)
          assert not _identity.is_marked(twice), (base, size, dtype)


def test_no_array_of_random_numbers_is_taken_for_a_release():
  """Of any size and type, by the evidence that is asked for: exp(-18)."""
  rng = np.random.default_rng(0)
  for size in (4, 5, 8, 20, 50, 200, 1000):
    sizes = 10.0 ** rng.uniform(-3, 3, (30, 1))
    for dtype in (np.float32, np.float16, jnp.bfloat16, jnp.float8_e4m3fn):
      for x in rng.normal(size=(30, size)) * sizes:
        assert not _identity.is_marked(x.astype(dtype))


def test_what_a_loss_closes_over_is_found_as_a_literal_too():
  """In a program inside of another, in the form that JAX is changing to."""
  kernel = jnp.arange(6.0)
  inner = jax.jit(lambda x: x + kernel)
  jax.config.update('jax_use_simplified_jaxpr_constants', True)
  try:
    program = jax.make_jaxpr(lambda x: inner(2 * x))(kernel)
  finally:
    jax.config.update('jax_use_simplified_jaxpr_constants', False)
  found = training._releases.constants_of(program)
  assert any(np.array_equal(x, kernel) for x in found)


def test_a_release_object_among_the_weights_is_known_by_its_digest():
  metric = contrib.InputMetric(
    {'q': jnp.eye(3, 1)}, {'q': jnp.ones(1)}, 5.0, 6, 9, digest='d'
  )
  assert not metric.seeded
  with pytest.raises(ValueError, match=r"frozen\['metric'\]"):
    check('frozen', {'metric': metric}, [head_of()])
  check('frozen', {'metric': metric}, [metric])
