"""Laws of the Newton-Schulz iteration, and of its parts."""

import math

import hypothesis.strategies as st
import jax
import numpy as np
import pytest
from hypothesis import given

from prism_optax import muon
from tests.oracles import muon_oracle, oracles
from tests.properties import cases

x64 = pytest.mark.usefixtures('x64')


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


_iterated = jax.jit(
  muon.newton_schulz, static_argnames=('degree', 'steps', 'normalize')
)


@x64
@pytest.mark.slow
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

  def run(x):
    return _iterated(x, degree=degree, steps=steps, normalize=normalize)

  found = run(x)
  u, s, vt = np.linalg.svd(x, full_matrices=False)
  norm = np.linalg.norm(s)
  s = s / {
    'max1': max(norm, 1), 'frobenius': norm or 1, 'none': 1,
  }[normalize]  # fmt: skip
  values = muon_oracle.singular_values(s, degree, steps)
  np.testing.assert_allclose(found, (u * values) @ vt, atol=1e-12)
  # Towards one and never beyond; by no more than the slope at zero.
  gain = ((2 * degree + 1) * math.comb(2 * degree, degree) / 4**degree) ** steps
  assert (values <= 1 + 1e-12).all()
  assert (values <= gain * s * (1 + 1e-12)).all()
  q = [oracles.random_orthonormal(rng, k, k) for k in shape]
  np.testing.assert_allclose(
    run(q[0] @ x @ q[1].T), q[0] @ found @ q[1].T, atol=1e-11
  )
  np.testing.assert_allclose(run(x.T), found.T, atol=1e-12)
  if normalize == 'frobenius':
    np.testing.assert_allclose(run(3 * x), found, atol=1e-12)
