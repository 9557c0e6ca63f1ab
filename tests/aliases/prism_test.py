"""The whole `prism` chain against the oracle, step by step."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import prism_optax
from prism_optax import lora
from tests import cases
from tests.oracles import optimizer_oracles, oracles, problems
from tests.transforms import chains

pytestmark = pytest.mark.usefixtures('x64')

CLIP, BATCH_SIZE, STDDEV = chains.CLIP, chains.BATCH_SIZE, chains.STDDEV
ONE_SHAPE, REQUIRED = [(8, 6, 3)] * 3, chains.OPTIONS


def spelled_out(learning_rate, **options):
  """The chain that `prism` is, for options that `prism` does not have."""
  return problems.chain_of(learning_rate, **REQUIRED, **options)


@functools.cache
def privatizer(layout):
  """The noise of `prism` alone: the same privatizer with the same key."""
  tx = prism_optax.tangent_privatizer(STDDEV, prng_key=7, layout=layout)
  return tx.init, jax.jit(tx.update)


@functools.cache
def release(layout):
  """Clip and noise of `prism` alone."""
  tx = prism_optax.chain(
    chains.clip(), chains.noise(), layout=layout, retract_elsewhere=True
  )
  return jax.jit(tx.update)


@jax.jit
def traced_update(grads, state, params, padding, learning_rate, **options):
  """An update with hyper-parameters that are known at run time."""
  tx = spelled_out(learning_rate, **options)
  return tx.update(grads, state, params, is_padding_example=padding)


def clipped_mean(points, grads, padding):
  modules, (extra,), _ = oracles.clipped_mean(
    points, grads.modules, [grads.extra], l2_clip_norm=CLIP,
    normalize_by=BATCH_SIZE, padding=padding,
  )  # fmt: skip
  return problems.Dense(modules, extra)


def assert_same_trajectory(
  problem, start, update, state, *, steps=20, learning_rate=0.05,
  weight_decay=0.1, layout=None, padding=(), regauge=lambda x: x, **options,
):  # fmt: skip
  """Trains factors, changed before each step, and the oracle on the same."""
  params = problem.params(*start)
  oracle = optimizer_oracles.PrismOracle(
    problem.points(params), problem.ranks, start[1:],
    optimizer_oracles.Options(**options),
  )  # fmt: skip
  start = here = problem.dense(params)
  zeros = optax.tree.zeros_like(params)
  padding = np.isin(np.arange(problem.batch), padding)
  init_noise, update_noise = privatizer(layout)
  noise_state = init_noise(params)
  for step in range(steps):
    params = regauge(params)
    grads = problem.gradients(step, problem.dense(params))
    factor_grads = problem.factor_gradients(params, grads)
    given = factor_grads, (optax.EmptyState(), noise_state), params
    released, _ = release(layout)(*given, is_padding_example=padding)
    noise, noise_state = update_noise(zeros, noise_state, params)
    # What the lattice cuts off, at most a step of each example's entries.
    points = problem.points(params)
    dense_noise = problem.embed(params, noise)
    there = clipped_mean(points, grads, padding).plus(dense_noise)
    cut = problem.embed(params, released).plus(there, -1.0)
    assert optax.tree.norm(cut) < 1e-4 * STDDEV
    # Each is trained at its own point: an error feeds back.
    mean = clipped_mean(oracle.points, problem.gradients(step, here), padding)
    noisy = mean.plus(dense_noise).plus(cut)
    rate = learning_rate(step) if callable(learning_rate) else learning_rate
    oracle.step(rate, noisy.modules, [noisy.extra], STDDEV, weight_decay)
    updates, state = update(factor_grads, state, params)
    params = optax.apply_updates(params, updates)
    here = problems.Dense([p.z for p in oracle.points], oracle.extras[0])
    # What 20 steps with feedback make of rounding, with room.
    chains.assert_close(problem.dense(params), here, 1e-9)
  for before, after in zip(start.modules, here.modules, strict=True):
    assert np.linalg.norm(after - before) > 0.1  # Something has happened.


@pytest.mark.slow
def test_prism_follows_the_oracle_with_every_option():
  problem = problems.Problem(chains.SHAPES, scale=4.0, seed=2)
  start = problem.start()
  options = {
    'b1': 0.8, 'b2': 0.99, 'eps': 1e-3, 'floor_factor': 0.5,
    'bias_correction': True, 'max_condition_number': 3.0,
  }  # fmt: skip
  # The scale: clip, noise and learning rate act on scale * left @ right.T.
  options |= {'weight_decay': 0.1, 'layout': lora.Layout(scale=4.0)}
  # Powers of two: the same numbers in whatever type optax computes them.
  learning_rate = optax.piecewise_constant_schedule(0.125, {10: 0.25})
  tx = spelled_out(learning_rate, **options)
  state = tx.init(problem.params(*start))
  assert_same_trajectory(
    problem, start, jax.jit(tx.update), state, learning_rate=learning_rate,
    **options,
  )  # fmt: skip


OPTIONS = {
  'default': {},
  'without a floor': {'floor_factor': 0.0},
  'flat spectrum': {'max_condition_number': 1.5, 'floor_factor': 0.1},
  'large eps': {'eps': 0.05},
  'short memory': {'b1': 0.0, 'b2': 0.5, 'floor_factor': 0.3},
  'decayed': {'weight_decay': 0.3},
}


def follow_traced(
  seed, make, steps=20, padding=(), regauge=lambda x: x, **options
):
  """Hyper-parameters as arrays, so that all of these compile once."""
  problem = problems.Problem(ONE_SHAPE, seed=seed)
  factors, extra = problem.start()
  start = make(factors), extra
  everything = {
    'b1': 0.9, 'b2': 0.999, 'eps': 1e-8, 'floor_factor': 1.0,
    'max_condition_number': 1e4, 'weight_decay': 0.0, 'learning_rate': 0.05,
  } | options  # fmt: skip
  arrays = {k: jnp.asarray(v) for k, v in everything.items()}
  # A traced decay has its place in the chain, whatever its value.
  tx = spelled_out(0.05, weight_decay=1.0)
  state = tx.init(problem.params(*start))
  mask = np.isin(np.arange(problem.batch), padding)
  update = functools.partial(traced_update, padding=mask, **arrays)
  assert_same_trajectory(
    problem, start, update, state, steps=steps, padding=padding,
    regauge=regauge, **everything,
  )  # fmt: skip


@pytest.mark.parametrize('options', OPTIONS)
def test_prism_follows_the_oracle_with_traced(options):
  follow_traced(0, list, **OPTIONS[options])


def test_prism_follows_the_oracle_with_padding():
  follow_traced(3, list, steps=5, padding=[1, 4], weight_decay=0.1)


def zero_left(factors):
  return [(0 * left, right) for left, right in factors]


def zero_right(factors):
  return [(left, 0 * right) for left, right in factors]


def mixed(factors):
  """Full rank, zero, and a factor that has lost a column."""
  (a, b), (c, d), (e, f) = factors
  e = e.copy()
  e[:, 1] = e[:, 0]
  return [(a, b), (0 * c, d), (e, f)]


@pytest.mark.parametrize('make', [zero_left, zero_right, mixed])
def test_prism_follows_the_oracle_from_deficient_factors(make):
  """The first step is one-sided, and the noise it has seen is, too."""
  follow_traced(1, make)


@pytest.mark.parametrize(
  ('condition', 'scale', 'steps'), [(1e3, 1e3, 1), (1e6, 1, 1), (1e3, 1, 50)]
)
def test_the_gauge_may_change_before_every_step(condition, scale, steps):
  """So that what is carried from step to step is transported rightly.

  The oracle knows no gauge.
  """
  rng, left = np.random.default_rng(4), [True] * steps  # One: the start alone.

  def regauge(params):
    if not left:
      return params
    left.pop()
    factors = [
      oracles.change_gauge(
        x, oracles.random_gauge(rng, x[0].shape[1], condition, scale)
      )
      for x in cases.factors_of(params)
    ]
    return cases.tree_of(factors, params['extra'])

  follow_traced(0, list, steps=50, regauge=regauge)
