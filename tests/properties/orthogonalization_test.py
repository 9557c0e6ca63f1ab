"""Laws of the Newton-Schulz iteration, and of its parts."""

import fractions
import functools
import math

import hypothesis.strategies as st
import jax
import ml_dtypes
import numpy as np
import optax
import pytest
from hypothesis import given

from prism_optax import muon, transforms
from prism_optax._linalg import _products
from prism_optax.muon import _newton_schulz, _polynomials
from tests.oracles import muon_oracle, oracles
from tests.properties import cases

NORMALIZATIONS = ('max1', 'frobenius', 'none')

DTYPES = {'float32': np.float32, 'bfloat16': ml_dtypes.bfloat16}
# Type, matrices in a stack.
VARIANTS = [('float32', True), ('bfloat16', True), ('bfloat16', False)]
x64 = pytest.mark.usefixtures('x64')


@cases.settings
@given(st.integers(1, 25))
def test_coefficients_are_those_of_the_inverse_root(degree):
  """Their square is the series of 1 / (1 - u), to the last bit."""
  c = _polynomials.coefficients(degree)
  exact = list(map(fractions.Fraction, c))
  assert len(c) == degree + 1
  for k in range(degree + 1):
    assert sum(exact[j] * exact[k - j] for j in range(k + 1)) == 1
  slope = sum(_polynomials.coefficients(degree))
  assert math.isclose(slope, math.fsum(c), rel_tol=1e-14)


@cases.settings
@given(st.floats(1e-4, 0.99), st.integers(1, 7), st.integers(1, 4), cases.seeds)
def test_best_polynomials_raise_and_never_pass_one(least, steps, degree, seed):
  """The more steps the nearer; smaller values by no less than the least one."""
  table = muon.minimax_coefficients(least, steps, degree=degree)
  assert [len(row) for row in table] == [degree + 1] * steps
  rng = np.random.default_rng(seed)
  x = np.r_[least, 1.0, rng.uniform(0, 1, 50), rng.uniform(0, least, 20)]
  found = muon_oracle.by_rows(x, table)
  assert (found <= 1 + 1e-10).all()
  inside = x >= least
  assert (found[~inside] >= x[~inside] * found[0] / least - 1e-10).all()
  more = muon.minimax_coefficients(least, steps + 1, degree=degree)
  nearer = muon_oracle.by_rows(x[inside], more).min()
  assert nearer >= found[inside].min() - 1e-10


@functools.cache
def _normalized(normalize):
  @jax.jit
  def run(x, y):
    x, y = map(_products.at_least_float32, (x, y))
    norm = _newton_schulz.frobenius_norm(x, y)
    divisor = _newton_schulz.divisor(normalize, norm)
    return norm, _newton_schulz.frobenius_norm(x / divisor, y / divisor)

  return run


@cases.settings
@given(
  cases.seeds,
  st.sampled_from([0.0, 1e-36, 1e-8, 1.0, 1e18, 1e36]),
  st.sampled_from(sorted(DTYPES)),
  st.sampled_from(NORMALIZATIONS),
)
def test_norms_do_not_overflow_and_normalize(seed, size, dtype, normalize):
  rng = np.random.default_rng(seed)
  x, y = (
    (size * rng.normal(size=(2, *shape))).astype(DTYPES[dtype])
    for shape in ((3, 4), (2, 5))
  )
  assert _products.at_least_float32(x).dtype == np.float32
  norm, after = _normalized(normalize)(x, y)
  assert norm.shape == after.shape == (2, 1, 1)
  exact = np.sqrt(
    sum(np.sum(np.float64(z) ** 2, axis=(-2, -1)) for z in (x, y))
  )
  # Fewer than thirty terms in float32.
  np.testing.assert_allclose(np.ravel(norm), exact, rtol=1e-5)
  expected = {
    'max1': np.minimum(exact, 1), 'frobenius': np.sign(exact), 'none': exact,
  }[normalize]  # fmt: skip
  np.testing.assert_allclose(np.ravel(after), expected, rtol=1e-5)


@functools.cache
def _iterated(degree, steps, normalize):
  return jax.jit(
    functools.partial(
      muon.newton_schulz,
      degree=degree, steps=steps, normalize=normalize,
    )
  )  # fmt: skip


@x64
@cases.few
@given(
  cases.seeds, st.sampled_from([(3, 5), (5, 3), (4, 4)]),
  st.sampled_from([0.0, 1e-3, 1.0, 1e6]),
  st.sampled_from([(1, 3, 'max1'), (2, 5, 'frobenius'), (3, 2, 'none')]),
)  # fmt: skip
def test_iteration_acts_on_singular_values_alone(seed, shape, size, options):
  degree, steps, normalize = options
  rng = np.random.default_rng(seed)
  x = size * rng.normal(size=shape)
  if normalize == 'none' and size:
    x /= np.linalg.norm(x)  # Beyond the root of three it may diverge.
  run = _iterated(*options)
  found = run(x)
  u, s, vt = np.linalg.svd(x, full_matrices=False)
  norm = np.linalg.norm(s)
  s = s / {
    'max1': max(norm, 1), 'frobenius': norm or 1, 'none': 1,
  }[normalize]  # fmt: skip
  values = muon_oracle.singular_values(s, degree, steps)
  np.testing.assert_allclose(found, (u * values) @ vt, atol=1e-12)
  # Towards one and never beyond; by no more than the slope at zero.
  gain = sum(_polynomials.coefficients(degree)) ** steps
  assert (values <= 1 + 1e-12).all()
  assert (values <= gain * s * (1 + 1e-12)).all()
  q = [oracles.random_orthonormal(rng, k, k) for k in shape]
  np.testing.assert_allclose(
    run(q[0] @ x @ q[1].T), q[0] @ found @ q[1].T, atol=1e-11
  )
  np.testing.assert_allclose(run(x.T), found.T, atol=1e-12)
  if normalize == 'frobenius':
    np.testing.assert_allclose(run(3 * x), found, atol=1e-12)


@functools.cache
def _transformed(stacked):
  """The transformation on a tree of a matrix, a stack and a vector."""
  numbers = optax.contrib.MuonDimensionNumbers
  tx = transforms.orthogonalize(
    degree=2,
    steps=3,
    weight_dimension_numbers={
      'matrix': numbers(1, 0),
      'stack': numbers((0, 3), 2) if stacked else None,
      'vector': None,
    },
  )
  return jax.jit(lambda updates: tx.update(updates, tx.init(updates))[0])


@pytest.mark.slow
@cases.few
@given(
  cases.seeds, st.sampled_from(VARIANTS),
  st.sampled_from(['none', 'nan', 'inf', 'zero']),
)  # fmt: skip
def test_the_transformation_takes_each_matrix_by_itself(seed, variant, oddity):
  dtype, stacked = variant
  rng = np.random.default_rng(seed)
  updates = {
    name: rng.normal(size=shape).astype(DTYPES[dtype])
    for name, shape in (
      ('matrix', (3, 4)), ('stack', (2, 3, 4, 2)), ('vector', (3,)),
    )
  }  # fmt: skip
  value = {'none': 1.0, 'nan': np.nan, 'inf': np.inf, 'zero': 0.0}[oddity]
  updates['stack'][:, 1] *= DTYPES[dtype](value)
  found = _transformed(stacked)(updates)
  for name, x in updates.items():
    assert found[name].dtype == x.dtype
    assert found[name].shape == x.shape
  exact = muon_oracle.orthogonalize(updates['matrix'], 2, 3)
  # float32 inside: the rounding of the result to its type.
  rounding = {'float32': 1e-5, 'bfloat16': 2**-8}[dtype]
  np.testing.assert_allclose(np.float64(found['matrix']), exact, atol=rounding)
  np.testing.assert_array_equal(found['vector'], updates['vector'])
  if not stacked:
    same = (np.float64(x['stack']) for x in (found, updates))
    np.testing.assert_array_equal(*same)
    return
  for layer in range(3):
    x = np.float64(updates['stack'][:, layer])
    got = np.float64(found['stack'][:, layer])
    if layer == 1 and oddity in ('nan', 'inf'):
      assert not np.isfinite(got).any()
      continue
    # Reduction axes 0 and 3 of the leaf are the rows: (2, 2), then 4 columns.
    rows = x.transpose(0, 2, 1).reshape(4, 4)
    exact = muon_oracle.orthogonalize(rows, 2, 3)
    np.testing.assert_allclose(
      got.transpose(0, 2, 1).reshape(4, 4), exact, atol=rounding
    )
