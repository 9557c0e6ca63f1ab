"""Weights and sums of clipped examples, in units of the clip norm."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prism_optax import _clip, _clipped_sum, _exact_sum


def _weights(norms):
  squared = jnp.square(jnp.asarray(norms, jnp.float32))
  return _clip.clip_weight(squared)


def test_weights_are_min_of_one_and_inverse_norm():
  weights, counts = _weights([0.0, 0.5, 1.0, 4.0, 1e10])
  np.testing.assert_allclose(weights, [1, 1, 1, 0.25, 1e-10], rtol=2e-6)
  assert counts.all()


def _double(example):
  return {'out': 2 * example['a'], 'more': example['b']}


@pytest.mark.parametrize('microbatch_size', [None, 500])
def test_compensation_leaves_one_rounding(microbatch_size):
  """Each small number alone would be lost against the large one."""
  x = jnp.asarray([1e6] + [0.01] * 3999, jnp.float32)[:, None]

  @jax.jit
  def add(x):
    parts = _exact_sum.LazyGradients(x, lambda g: g, microbatch_size)
    return _exact_sum.sum_of_examples(lambda e: e, parts, None)

  got = add(x)
  exact = float(np.sum(np.float64(x)))
  assert abs(float(got[0]) / exact - 1) < 1e-7
  plain = np.float32(0)
  for y in np.asarray(x)[:, 0]:
    plain += y
  assert abs(float(plain) / exact - 1) > 1e-6  # It can fail.


def _lattice_sum(x, unit=2.0**-20):
  unit = jnp.float32(unit)
  sums = _exact_sum.sum_of_examples(lambda e: e, x, None, lambda _: [unit])
  assert isinstance(sums, _exact_sum.LatticeSum)
  return _exact_sum.integers_of(sums)


def test_side_by_side_gives_the_same_integers(monkeypatch):
  """As on accelerators and on several devices."""
  x = jnp.asarray(np.random.default_rng(0).normal(size=(300, 7)), jnp.float32)
  want = _lattice_sum(x)
  monkeypatch.setattr(jax, 'device_count', lambda: 8)
  np.testing.assert_array_equal(_lattice_sum(x), want)


def test_one_record_moves_the_sum_by_its_bound_in_any_order():
  """Records against rounding: floats in turn are off by half a bound."""
  count = 65_536
  x = np.full((count, 1), 1 - 2.0**-7, np.float32)
  x[0] = 1.0
  with_it = _lattice_sum(jnp.asarray(x))
  for place in (0, 1, count - 1):
    without = _lattice_sum(jnp.asarray(np.delete(x, place, 0)))
    assert abs(with_it - without)[0] <= 2**20


@pytest.mark.parametrize('count', [1, 8])
def test_no_example_at_all_is_a_sum_of_zero(monkeypatch, count):
  monkeypatch.setattr(jax, 'device_count', lambda: count)
  np.testing.assert_array_equal(_lattice_sum(jnp.zeros((0, 3))), [0, 0, 0])


def test_a_number_aside_is_there_for_whoever_asks_first():
  total = _clipped_sum.ClippedSum(
    lambda x: (x, 2 * x), jnp.ones(3), None, 1.0, _clipped_sum.Aside(2.0, 0.5)
  )
  number = total.number()
  found = _exact_sum.integers_of(number) * float(number.unit)
  assert found == pytest.approx(6, rel=1e-6)


def test_padding_of_another_length_is_refused():
  with pytest.raises(ValueError, match=r'is_padding_example.*\(3,\).*\(2,\)'):
    _exact_sum.sum_of_examples(
      lambda e: e, jnp.zeros((3, 1)), jnp.zeros(2, bool)
    )


@pytest.mark.parametrize('padded', [False, True])
def test_a_batch_split_along_an_explicit_axis_of_a_mesh(padded):
  """Of one device; tests/scale_out has eight."""
  axis_types = (jax.sharding.AxisType.Explicit,)
  mesh = jax.make_mesh((1,), ('data',), axis_types)
  rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec('data'))
  tree = {'a': jnp.arange(12.0).reshape(4, 3), 'b': jnp.arange(4.0)}
  padding = jnp.asarray([False, True, False, True]) if padded else None
  # By another name in the oldest version.
  use = getattr(jax, 'set_mesh', None) or jax.sharding.use_mesh
  with use(mesh):
    split = jax.device_put((tree, padding), rows)
    got = jax.jit(functools.partial(_exact_sum.sum_of_examples, _double))(
      *split
    )
  kept = slice(None, None, 2 if padded else 1)
  np.testing.assert_array_equal(got['out'], 2 * tree['a'][kept].sum(0))
  np.testing.assert_array_equal(got['more'], tree['b'][kept].sum(0))
