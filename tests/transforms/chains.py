"""The problem of the tests of chains: modules of two shapes, and a head."""

import jax
import numpy as np
import optax

import prism_optax
from tests.oracles import oracles, problems

# Two modules of one shape (they are stacked), one of another; and a head.
SHAPES = [(8, 6, 3), (5, 9, 2), (8, 6, 3)]
CLIP, MULTIPLIER, BATCH_SIZE = 2.0, 0.4, 5.0
STDDEV = MULTIPLIER * CLIP / BATCH_SIZE
OPTIONS = {
  'l2_clip_norm': CLIP,
  'noise_multiplier': MULTIPLIER,
  'expected_batch_size': BATCH_SIZE,
  'prng_key': 7,
}
# The fused chain keeps sums where the other one multiplies them out, and adds
# them in another order: some roundings of 1e-16, which a few steps with
# factors of condition 3 carry on. Measured 1e-14.
ROUNDING = 1e-11


def clip():
  return prism_optax.intrinsic_clip(CLIP, normalize_by=BATCH_SIZE)


def noise():
  return prism_optax.tangent_privatizer(STDDEV, prng_key=7)


def direction():
  return prism_optax.scale_by_rank_preconditioner(noise_stddev=STDDEV)


def problem_and_params():
  problem = problems.Problem(SHAPES)
  return problem, problem.params(*problem.start())


def batch(problem, params, step=0):
  return problem.factor_gradients(
    params, problem.gradients(step, problem.dense(params))
  )


def train(tx, *, steps=3, jit=True):
  """The parameters after every step."""
  problem, params = problem_and_params()
  state = tx.init(params)
  update = jax.jit(tx.update) if jit else tx.update
  out = []
  for step in range(steps):
    updates, state = update(batch(problem, params, step), state, params)
    params = optax.apply_updates(params, updates)
    out.append(params)
  return out


def assert_bits(found, expected):
  jax.tree.map(np.testing.assert_array_equal, found, expected)


def assert_close(found, expected, tolerance=ROUNDING):
  for x, y in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
    assert oracles.relative_error(x, y) < tolerance
