"""An adapted step size: z and c by dense matrices; noise has no direction."""

import jax
import numpy as np
import pytest

import prism_optax
from prism_optax import transforms
from tests.oracles import oracles, problems

SHAPES = [(5, 6, 2)] * 2
B1, GROWTH, THRESHOLD = 0.8, 0.3, 1.2


def _both(stddevs):
  """Without and with an adapted step size."""
  plain = prism_optax.scale_by_rank_preconditioner(b1=B1, noise_stddev=stddevs)
  return plain, transforms.adapt_step_size(
    plain, noise_stddev=stddevs, growth=GROWTH, threshold=THRESHOLD
  )


@jax.jit
def _updates(stddevs, updates, states, params):
  return [
    tx.update(updates, state, params)
    for tx, state in zip(_both(stddevs), states, strict=True)
  ]


def _on_tangent(factors, dense):
  pl, pr = (q @ q.T for q in (np.linalg.qr(x)[0] for x in factors))
  return pl @ dense + dense @ pr - pl @ dense @ pr


def _ramp(z):
  return min(max(z / THRESHOLD - 1, 0), 1)


def test_equals_the_formula(x64):
  """Gradients that go on, turn back, and go on, at points that move."""
  for stddevs in ([0.03, 0.04, 0.02, 0.03, 0.03], [0.0] * 5):  # Of one program.
    _equals_the_formula(stddevs)


def _equals_the_formula(stddevs):
  problem = problems.Problem(SHAPES)
  rng = np.random.default_rng(1)
  first = [oracles.random_factors(rng, *x, 3.0) for x in SHAPES]
  states = None
  mu, log_scale, seen = None, 0.0, []
  for stddev, sign in zip(stddevs, (1, 1, 1.2, -3, 0.4), strict=True):
    factors = [
      tuple(x + 0.3 * rng.normal(size=x.shape) for x in pair) for pair in first
    ]
    dense = problems.Dense(
      [0.02 * sign + rng.normal(0, 0.01, s[:2]) for s in SHAPES],
      0.01 * sign + rng.normal(0, 0.01, 5),
    )
    params = problem.params(factors, np.zeros(5))
    states = states or [tx.init(params) for tx in _both(np.array(stddevs))]
    given = problem.coordinates(params, dense)
    (expected, plain), (out, state) = _updates(
      np.array(stddevs), given, states, params
    )
    states = plain, state

    def tangents(of, points=factors):
      pairs = zip(points, of.modules, strict=True)
      return [*(_on_tangent(*x) for x in pairs), of.extra]

    x = tangents(dense)
    if mu is not None:
      mu = tangents(mu)
      product, square = (
        sum(np.sum(a * b) for a, b in zip(mu, y, strict=True)) for y in (x, mu)
      )
      z = product / (stddev * square**0.5) if stddev else np.inf * product
      seen.append(_ramp(z) - _ramp(-z))
      log_scale += GROWTH * seen[-1]
    old = mu or [0 * y for y in x]
    mixed = [B1 * a + (1 - B1) * b for a, b in zip(old, x, strict=True)]
    mu = problems.Dense(mixed[:-1], mixed[-1])
    np.testing.assert_allclose(state.log_scale, log_scale, atol=1e-6)
    for a, b in zip(*map(jax.tree.leaves, (out, expected)), strict=True):
      # c is kept in float32.
      np.testing.assert_allclose(a, b * np.exp(log_scale), rtol=1e-6)
  assert min(seen) < 0 < max(seen)
  if stddevs[0]:  # Not only at the ends of the ramp.
    assert any(0 < abs(x) < 1 for x in seen)


@pytest.mark.slow
def test_noise_alone_leaves_the_steps_as_they_are():
  """Its walk has no drift, and the size that the docstring says."""
  problem = problems.Problem([(40, 30, 2)] * 2)
  params = problem.params(problem.start()[0], np.zeros(5), np.float32)
  stddev = 0.7
  chain = prism_optax.chain(
    prism_optax.tangent_privatizer(stddev, prng_key=0),
    transforms.adapt_step_size(
      prism_optax.scale_by_rank_preconditioner(noise_stddev=stddev),
      noise_stddev=stddev,
    ),
    prism_optax.retract(),
  )
  nothing = jax.tree.map(np.zeros_like, params)

  def one(state, _):
    state = chain.update(nothing, state, params)[1]
    return state, state[1].log_scale

  walk = jax.jit(lambda x: jax.lax.scan(one, x, length=400)[1])
  steps = np.diff(walk(chain.init(params)))
  assert 0.01 < np.std(steps) < 0.018  # 0.1 times 0.138.
  assert abs(np.sum(steps)) < 4 * 0.0138 * 20


@pytest.mark.slow
def test_agreement_for_ever_overflows_nothing():
  problem = problems.Problem([(6, 5, 2)] * 2)
  params = problem.params(problem.start()[0], np.zeros(5), np.float32)
  tx = transforms.adapt_step_size(
    prism_optax.scale_by_rank_preconditioner(noise_stddev=0.1),
    noise_stddev=0.1, growth=60.0,
  )  # fmt: skip
  state, update = tx.init(params), jax.jit(tx.update)
  for size, limit in ((9, 1), (9, 1e4), (9, 1e4), (-81, 1e-4)):
    gradient = jax.tree.map(lambda x, y=size: np.full_like(x, y), params)
    out, state = update(gradient, state, params)
    np.testing.assert_allclose(np.exp(state.log_scale), limit, rtol=1e-5)
  assert np.isfinite(np.concatenate(jax.tree.leaves(out), None)).all()
