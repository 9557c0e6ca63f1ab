"""Laws of what follows the noise: no gauge, bounded, and exact decay."""

import functools

import hypothesis.strategies as st
import jax
import numpy as np
import optax
import pytest
from hypothesis import given

import prism_optax
from tests import oracles, problems
from tests.properties import cases

# Each transformation is compiled for one problem, in double precision.
pytestmark = [pytest.mark.usefixtures('x64'), pytest.mark.slow]
PROBLEM = problems.Problem([(5, 4, 2), (4, 6, 1)])
STDDEV, DECAY = 0.3, 0.1


@functools.cache
def _transformation(kind):
  tx = {
    'preconditioner': prism_optax.scale_by_rank_preconditioner(
      b1=0.5, b2=0.9, noise_stddev=STDDEV
    ),
    'debiased': prism_optax.scale_by_rank_preconditioner(
      b2=0.9, noise_stddev=STDDEV, debias=True, max_update_norm=1.0
    ),
    'orthogonal': prism_optax.orthogonalize_tangents(0.5),
    'decay': prism_optax.add_decayed_factors(DECAY),
    'retraction': prism_optax.retract(),
  }[kind]
  return tx, jax.jit(tx.update)


def _draw(rng, size):
  factors = [oracles.random_factors(rng, *x, 3.0) for x in PROBLEM.shapes]
  dense = problems.Dense(
    [size * rng.normal(size=x[:2]) for x in PROBLEM.shapes],
    size * rng.normal(size=5),
  )
  return factors, dense


def _close(a, b, size):
  for x, y in zip((*a.modules, a.extra), (*b.modules, b.extra), strict=True):
    np.testing.assert_allclose(x, y, atol=1e-9 * size)


@cases.few
@given(
  st.sampled_from(
    ['preconditioner', 'debiased', 'orthogonal', 'decay', 'retraction']
  ),
  cases.seeds,
  st.sampled_from([1.0, 1e3]),
  st.sampled_from([0.0, 1e-6, 1.0, 1e6]),
)
def test_what_happens_to_the_matrices_does_not_depend_on_the_gauge(
  kind, seed, condition, size
):
  """Over points far apart, each in two gauges that have nothing in common."""
  tx, update = _transformation(kind)
  rng = np.random.default_rng(seed)
  states = [None, None]
  for _ in range(3):
    factors, dense = _draw(rng, size)
    others = [
      oracles.change_gauge(
        x, oracles.random_gauge(rng, x[0].shape[-1], condition)
      )
      for x in factors
    ]
    extra, found = rng.normal(size=5), []
    for i, pairs in enumerate((factors, others)):
      params = PROBLEM.params(pairs, extra)
      states[i] = tx.init(params) if states[i] is None else states[i]
      x = PROBLEM.coordinates(params, dense)
      out, states[i] = update(x, states[i], params)
      if kind == 'retraction':
        found.append(PROBLEM.dense(optax.apply_updates(params, out)))
      else:
        found.append(PROBLEM.embed(params, out))
    _close(*found, max(size, 1.0))
    z, t = PROBLEM.dense(params), PROBLEM.embed(params, x)
    if kind == 'decay':  # Of the matrices, not of the other leaf.
      _close(found[0], t.plus(z._replace(extra=0 * extra), DECAY), 1 + size)
    if kind == 'retraction':
      best = [
        oracles.best_approximation(a + b, rank)
        for a, b, rank in zip(z.modules, t.modules, PROBLEM.ranks, strict=True)
      ]
      _close(found[0], problems.Dense(best, extra + dense.extra), 1 + size)
    if kind == 'orthogonal':
      for y, rank in zip(found[0].modules, PROBLEM.ranks, strict=True):
        assert np.linalg.norm(y, 2) <= 2 + 1e-9
        assert np.linalg.norm(y) <= np.sqrt(2 * rank) + 1e-9
    if kind == 'debiased':
      assert cases.norm(out) <= 1 + 1e-9


@cases.few
@given(cases.seeds, st.sampled_from([0.0, 1e-6, 1.0, 1e6]))
def test_the_preconditioner_never_amplifies_beyond_the_noise(seed, size):
  """||U|| <= ||mu|| / s (PRISM, Eq. 27), and it is invariant under signs."""
  tx, update = _transformation('preconditioner')
  factors, dense = _draw(np.random.default_rng(seed), size)
  params = PROBLEM.params(factors, dense.extra)
  x = PROBLEM.coordinates(params, dense)
  out, _ = update(x, tx.init(params), params)
  assert cases.norm(out) <= cases.norm(x) / STDDEV * (1 + 1e-9)
  minus, _ = update(jax.tree.map(np.negative, x), tx.init(params), params)
  difference = jax.tree.map(lambda a, b: a + b, out, minus)
  assert cases.norm(difference) <= 1e-9 * (1 + cases.norm(out))
