"""The noise on the lattice: the right bits, the right law, everywhere."""

import fractions
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from prism_optax import _exact_sum, _lattice
from prism_optax.accounting import _epsilon
from tests import cases

SIZE = 400_000
# The many small operations take longer one by one.
_add_noise = jax.jit(_lattice.add_noise)
_integers = jax.jit(_lattice.integers)


def _draw(key, shape, dtype=jnp.float32):
  return _add_noise(key, np.zeros(shape, dtype), 1.0)


def _words(count, seed=0):
  rng = np.random.default_rng(seed)
  return [
    jnp.asarray(rng.integers(0, 2**32, count, np.uint64).astype(np.uint32))
    for _ in range(4)
  ]


def test_the_table_gives_the_weights_exactly():
  """Columns are equally likely: what stays and what goes to an alias add up."""
  high, low = (np.asarray(x, object) for x in _lattice._alias_table())
  law = [0] * len(high)
  for column, (h, both) in enumerate(zip(high, low, strict=True)):
    threshold, alias = int(h) << 20 | int(both) >> 12, int(both) & 0xFFF
    law[column] += threshold
    law[alias] += 2**52 - threshold
  weights = _lattice.cell_weights()
  assert sum(weights) == 2**64
  # A full column counts one unit less than full, and is its own alias.
  assert law == weights


def test_weights_are_a_discrete_statement():
  """Against exact rational arithmetic, to a unit of 2^-64 and double."""
  weights = _lattice.cell_weights()
  assert weights[0] == 0
  assert weights[1:] == weights[:0:-1]  # Symmetric about the cell 0.
  cells = np.arange(-2047, 2048)
  variance = 224**2 - (1 - 4096.0**-2) / 3
  total = math.fsum(np.exp(-(cells**2) / (2 * variance)))
  for cell in (0, 1, 224, 700, 1500, 2047):
    exact = math.exp(-(cell**2) / (2 * variance)) / total * 2.0**64
    assert abs(weights[2048 + cell] - exact) <= 2**13 + 1e-14 * exact
  second = sum(
    fractions.Fraction(int(w) * int(j) ** 2, 2**64)
    for w, j in zip(weights[1:], cells, strict=True)
  )
  # Four uniform positions of 4096 each: the standard deviation is STEPS.
  steps = 4096**2 * float(second) + 4 * (4096**2 - 1) / 12
  assert math.sqrt(steps) == pytest.approx(_exact_sum.STEPS, rel=1e-13)


def _spline_law(weights, positions):
  """Density in cells at cell + position, by the sum over the four uniforms."""
  weights = np.asarray([float(w) for w in weights], np.longdouble) / 2.0**64

  def spline(x):  # The density of four uniform numbers, centred.
    x = np.abs(x)
    inner = np.longdouble(2) / 3 - x**2 + x**3 / 2
    return np.where(x < 1, inner, np.where(x < 2, (2 - x) ** 3 / 6, 0))

  for t in positions:
    shifted = (spline(t - d) * np.roll(weights, -d) for d in range(-2, 4))
    yield np.arange(-2048, 2048) + np.longdouble(t), sum(shifted)


def test_distance_from_the_statement_is_below_what_is_declared():
  """What `_epsilon.release_guarantee` is made of, by numerical integration.

  Each constant is also at most three times what is measured.
  """
  positions = (np.arange(64) + 0.5) / 64
  reach = 9.13
  ratio = chi_square = excess = 0.0
  for x, law in _spline_law(_lattice.cell_weights(), positions):
    gauss = np.exp(-((x / 224) ** 2) / 2) / (224 * np.sqrt(2 * np.pi))
    near, reached = np.abs(x) < 6 * 224, np.abs(x) < reach * 224
    relative = law / gauss - 1
    ratio = max(ratio, np.abs(np.log1p(relative[near])).max())
    chi_square += np.sum((relative**2 * gauss)[near]) / 64
    excess += np.sum(np.maximum(law - gauss, 0)[~near]) / 64
    # Nothing within reach is less likely than that.
    assert relative[reached].min() > -_epsilon._LARGEST_RATIO
  missed = 2 * scipy.stats.norm.sf(reach)
  for measured, declared in [
    (ratio, _epsilon._LARGEST_RATIO), (chi_square, _epsilon._CHI_SQUARE),
    (excess, _epsilon._EXCESS), (missed, _epsilon._MISSED),
  ]:  # fmt: skip
    assert declared / 3 < measured < declared
  assert 2 * scipy.stats.norm.sf(6) < 2e-9


@pytest.mark.parametrize('platform', ['cpu', 'cuda', 'tpu'])
def test_a_barrier_is_where_the_compiler_would_copy_the_generator(platform):
  """Lowered for machines that need not be there."""
  traced = _add_noise.trace(jax.random.key(0), np.zeros(3, np.float32), 1.0)
  text = traced.lower(lowering_platforms=(platform,)).as_text()
  assert ('optimization_barrier' in text) is (platform == 'tpu')
  assert ('stablehlo.reduce' in text) is (platform == 'cpu')


@cases.fast_first('dtype', ['float32'], ['float32', 'float64'])
def test_law(dtype):
  with jax.enable_x64(dtype == 'float64'):
    draws = _draw(jax.random.key(0), (SIZE,), jnp.dtype(dtype))
  assert draws.dtype == dtype
  z = np.float64(draws)
  assert scipy.stats.kstest(z, 'norm', method='asymp').pvalue > 1e-3
  # Can fail: a scale or a shift that is off by a per cent.
  for wrong in (1.01 * z, 0.99 * z, z + 0.01):
    assert scipy.stats.kstest(wrong, 'norm', method='asymp').pvalue < 0.05
  # Moments: standard errors sqrt(var / SIZE), five of them.
  for power, mean, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
    error = abs(np.mean(z**power) - mean)
    assert error < 5 * np.sqrt(variance / SIZE), power
  # Tails: as many beyond 4 as there should be (Poisson, mean 25).
  expected = SIZE * 2 * scipy.stats.norm.sf(4)
  assert abs(np.sum(abs(z) > 4) - expected) < 4 * np.sqrt(expected)
  # Low bits are uniform: 64 classes, chi-square with 63 degrees of freedom.
  steps = np.round(z * _exact_sum.STEPS).astype(np.int64)
  counts = np.bincount(steps % 64, minlength=64)
  assert scipy.stats.chisquare(counts).pvalue > 1e-3


def test_words_decide_cell_and_position():
  """The table by hand: column, threshold of 52 bits, alias, four positions."""
  a, b, c, d = (np.asarray(x, np.int64) for x in _words(20_000))
  high, low = (np.asarray(x, np.int64) for x in _lattice._alias_table())
  column = a >> 20
  stays = (b << 20 | d >> 12) < (high[column] << 20 | low[column] >> 12)
  cell = np.where(stays, column, low[column] & 4095) - 2048
  within = (a & 4095) + (c & 4095) + (c >> 12 & 4095) + (d & 4095)
  want = cell * 4096 + within - 8190
  np.testing.assert_array_equal(_integers(_words(20_000)), want)
  # Ties of the high words are decided by the low ones, those of both go away.
  d[::2] = (low[column] & ~4095 | d & 4095)[::2]
  words = [jnp.asarray(x, jnp.uint32) for x in (a, high[column], c, d)]
  stays = (d >> 12) < (low[column] >> 12)
  cell = np.where(stays, column, low[column] & 4095) - 2048
  np.testing.assert_array_equal(_integers(words), cell * 4096 + within - 8190)


@pytest.mark.parametrize('block', [1, 200, 5000])
def test_noise_in_blocks_is_the_same(monkeypatch, block):
  """A block for each entry, several with an end, one for all."""
  monkeypatch.setattr(_lattice, '_BLOCK', block)
  shapes = {(7, 1, 8): (3, 37), (2,): (), (5, 4): (0,), (0,): (59,)}
  leaves = [_lattice._Alike(*x) for x in shapes.items()]
  draw = jax.jit(lambda key, f: f(key, leaves), static_argnums=1)
  key = [x[0] for x in _words(4)]
  of_blocks = draw(key, _lattice._drawn_in_blocks)
  cases.assert_same_bits(of_blocks, draw(key, _lattice._drawn))


def test_every_input_reaches_the_same_outputs():
  """Whole numbers of steps, whatever came in: low bits tell nothing of it."""
  for x in (0.0, 0.3, -1.7, 1e3):
    out = _add_noise(jax.random.key(0), np.full(1000, x, np.float32), 4.0)
    steps = np.float64(out) / 4 * _exact_sum.STEPS
    # Two roundings of the result, of the product and of the sum before it.
    slack = 2.0**-22 * abs(steps)
    assert (abs(steps - np.round(steps)) <= slack).all()
    if x == 0:  # Where a step is far more than rounding, nothing lies between.
      near = abs(steps) < 2**16
      assert near.sum() > 30
      assert (abs(steps - np.round(steps))[near] < 0.02).all()


def test_truncation_lengthens_nothing_and_is_the_same_in_every_program():
  """XLA rounds a quotient in one program otherwise than in another."""

  def towards_zero(x, stddev):
    unit = _exact_sum.unit_of(stddev, 1.0, jnp.float32)
    return _exact_sum.towards_zero(x, unit)

  rng, stddev = np.random.default_rng(0), np.float32(3)
  x = rng.normal(size=1000) * 10.0 ** rng.integers(-9, 3, 1000)
  x = np.float32([*x, *np.arange(1000) * (stddev / _exact_sum.STEPS)])
  high, low, unit = found = jax.jit(towards_zero)(x, stddev)
  cases.assert_same_bits(found, towards_zero(x, stddev))
  points = np.float64(high) * 2**14 + np.float64(low)
  exact = np.float64(x) / np.float64(unit)
  assert (abs(points) <= abs(exact) * (1 + 2.0**-22)).all()
  assert (abs(exact - points) <= 1 + 2.0**-22 * abs(exact)).all()
  assert (points * exact >= 0).all()


@pytest.mark.parametrize('terms', [1, 1000, _exact_sum.MOST_TERMS])
def test_sums_of_the_largest_terms_do_not_overflow(terms):
  huge = jnp.asarray([3e38, -3e38, 2.0**40], jnp.float32)
  one = _exact_sum.term(huge, jnp.float32(1.0), terms)
  high, low = (np.asarray(x, np.int64) * terms for x in one[:2])
  # What the largest lower parts and the noise carry over must fit as well.
  assert abs(high).max() + (terms * 2**14 + 2**24 >> 14) < 2**31
  assert abs(high).max() > 2**31 * (1 - 2e-4)  # And no more is cut.
  assert abs(low).max() + 2**24 < 2**31
  cut = _exact_sum.from_integers(np.array([-(2**60), 2**60]), 1.0)
  assert [*_exact_sum.integers_of(cut)] == [-(2**44), 2**44]


def test_too_many_terms_are_refused():
  with pytest.raises(ValueError, match='at most 129024 examples'):
    _exact_sum.term(jnp.zeros(2), jnp.float32(1.0), 2**17)


def test_entries_and_leaves_are_independent():
  """No value twice, no correlation of leaves, shifted entries or keys."""
  like = {
    'a': np.zeros((300, 7), np.float32),
    'b': np.zeros((300, 7), np.float32),
    'c': np.zeros((), np.float32),
  }
  keys = jax.random.split(jax.random.key(1))
  a, b = (_add_noise(k, like, 1.0) for k in keys)
  arrays = [np.ravel(x) for tree in (a, b) for x in (tree['a'], tree['b'])]
  assert len(np.unique(np.concatenate(arrays))) > 0.99 * 4 * 2100
  arrays.append(np.roll(arrays[0], 1))
  correlations = np.corrcoef(arrays) - np.eye(5)
  assert np.max(np.abs(correlations)) < 5 / np.sqrt(2100)


def test_what_is_not_finite_stays_and_so_does_all_without_noise():
  x = np.array([np.nan, np.inf, -np.inf, 0.1], np.float32)
  noisy = _add_noise(jax.random.key(0), x, 1.0)
  np.testing.assert_array_equal(noisy[:3], x[:3])
  assert noisy[3] != x[3]
  np.testing.assert_array_equal(_add_noise(jax.random.key(0), x, 0.0), x)


@pytest.mark.slow
def test_a_leaf_does_not_depend_on_the_others():
  """Noise is that of its number, whatever leaves have its shape."""
  key = jax.random.key(2)
  x, y = np.zeros((2, 3), np.float32), np.zeros(9, np.float32)
  mixed = _add_noise(key, [x, y, x], 1.0)
  others = _add_noise(key, [y, y, x], 1.0)
  np.testing.assert_array_equal(mixed[0], _add_noise(key, [x], 1.0)[0])
  np.testing.assert_array_equal(mixed[1], others[1])
  np.testing.assert_array_equal(mixed[2], others[2])
  assert not np.any(mixed[0] == mixed[2])


@pytest.mark.skipif(
  jax.default_backend() != 'cpu',
  reason='It counts instructions that the compiler for CPUs writes.',
)
def test_the_generator_is_compiled_once():
  """Copies of it take most of a compilation, and twice the time of a step."""

  def read_twice(key, leaves):
    noisy = _lattice.add_noise(key, leaves, 1.0)
    return [x**2 for x in noisy], [jnp.roll(x, 1) for x in noisy]

  leaves = [*[jnp.zeros((4, 3))] * 3, jnp.zeros(5)]
  lowered = jax.jit(read_twice).lower(jax.random.key(0), leaves)
  rounds = lowered.compile().as_text().count(' shift-left(')
  assert 30 < rounds <= 40  # Twenty, each of two words; XLA may save one.


@pytest.mark.parametrize('impl', ['rbg', 'unsafe_rbg', 'threefry2x32'])
def test_keys_of_any_generator(impl):
  z = _draw(jax.random.key(3, impl=impl), (1000,))
  assert scipy.stats.kstest(z, 'norm').pvalue > 1e-3


@pytest.mark.parametrize(
  ('shape', 'dtype', 'stddev', 'match'),
  [
    ((2,), jnp.bfloat16, 1.0, 'float32 or float64'),
    ((2**16, 2**16), jnp.float32, 1.0, 'fewer than 2\\^32'),
    ((2,), jnp.float32, 1e-33, 'stddev = 0 or stddev >= 1.1e-32, got 1e-33'),
  ],
)
def test_what_it_does_not_draw_is_refused(shape, dtype, stddev, match):
  struct = jax.ShapeDtypeStruct(shape, dtype)
  with pytest.raises(ValueError, match=match):
    _lattice.add_noise(jax.random.key(0), struct, stddev)


def test_the_least_noise_is_noise():
  stddev = _lattice._LEAST_STDDEV
  noise = _add_noise(jax.random.key(4), np.zeros(1000, np.float32), stddev)
  z = np.float64(noise) / stddev
  assert scipy.stats.kstest(z, 'norm').pvalue > 1e-3
