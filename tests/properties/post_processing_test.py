"""Laws of what follows the noise: no gauge, bounded, and exact decay."""

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given

import prism_optax
from prism_optax import contrib
from tests.oracles import oracles, problems
from tests.properties import cases

# Each transformation is compiled for one problem, in double precision.
pytestmark = [pytest.mark.usefixtures('x64'), pytest.mark.slow]
PROBLEM = problems.Problem([(5, 4, 2), (4, 6, 1)])
STDDEV, DECAY = 0.3, 0.1


TRANSFORMATIONS = {
  'preconditioner': prism_optax.scale_by_rank_preconditioner(
    b1=0.5, b2=0.9, noise_stddev=STDDEV
  ),
  'rows': contrib.scale_by_row_moments(0.9, noise_stddev=STDDEV),
  'orthogonal': contrib.orthogonalize_tangents(0.5),
  'decay': prism_optax.add_decayed_factors(DECAY),
  'retraction': prism_optax.retract(),
}


@jax.jit
def _updated(x, states, params):
  """{kind: (update, state)}: one program, in which they share the frames."""
  return {
    kind: tx.update(x, states[kind], params)
    for kind, tx in TRANSFORMATIONS.items()
  }


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
  cases.seeds, st.sampled_from([1.0, 1e3]),
  st.sampled_from([0.0, 1e-6, 1.0, 1e6]),
)  # fmt: skip
def test_what_happens_to_the_matrices_does_not_depend_on_the_gauge(
  seed, condition, size
):
  """Over points far apart, each in two gauges that have nothing in common."""
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
      if states[i] is None:
        states[i] = {k: x.init(params) for k, x in TRANSFORMATIONS.items()}
      x = PROBLEM.coordinates(params, dense)
      results = _updated(x, states[i], params)
      states[i] = {kind: state for kind, (_, state) in results.items()}
      found.append(
        {
          kind: PROBLEM.dense(optax.apply_updates(params, out))
          if kind == 'retraction'
          else PROBLEM.embed(params, out)
          for kind, (out, _) in results.items()
        }
      )
    for kind, result in found[0].items():
      _close(result, found[1][kind], 1 + size)
    z, t = PROBLEM.dense(params), PROBLEM.embed(params, x)
    # Of the matrices, not of the other leaf.
    decayed = t.plus(z._replace(extra=0 * extra), DECAY)
    _close(found[0]['decay'], decayed, 1 + size)
    best = [
      oracles.best_approximation(a + b, rank)
      for a, b, rank in zip(z.modules, t.modules, PROBLEM.ranks, strict=True)
    ]
    moved = problems.Dense(best, extra + dense.extra)
    _close(found[0]['retraction'], moved, 1 + size)
    directions = found[0]['orthogonal'].modules
    for y, rank in zip(directions, PROBLEM.ranks, strict=True):
      assert np.linalg.norm(y, 2) <= 2 + 1e-9
      assert np.linalg.norm(y) <= np.sqrt(2 * rank) + 1e-9


@cases.few
@given(cases.seeds, st.sampled_from([0.0, 1e-6, 1.0, 1e6]))
def test_the_preconditioner_never_amplifies_beyond_the_noise(seed, size):
  """||U|| <= ||mu|| / s (PRISM, Eq. 27), and it is odd."""
  factors, dense = _draw(np.random.default_rng(seed), size)
  params = PROBLEM.params(factors, dense.extra)
  states = {k: x.init(params) for k, x in TRANSFORMATIONS.items()}
  x = PROBLEM.coordinates(params, dense)
  out, minus = (
    _updated(y, states, params)['preconditioner'][0]
    for y in (x, jax.tree.map(jnp.negative, x))
  )
  assert cases.norm(out) <= cases.norm(x) / STDDEV * (1 + 1e-9)
  total = jax.tree.map(jnp.add, out, minus)
  assert cases.norm(total) <= 1e-9 * (1 + cases.norm(out))
