"""The problem of the tests of chains: modules of two shapes, and a head."""

import jax

import prism_optax
from tests import cases
from tests.oracles import oracles, problems

# Two modules of one shape (they are stacked), one of another but of the same
# rank (the groups share a call); and a head.
SHAPES = [(8, 6, 3), (5, 9, 3), (8, 6, 3)]
# What is compiled takes half the time without the other shape.
ONE_SHAPE = SHAPES[::2]
CLIP, MULTIPLIER, BATCH_SIZE = 2.0, 0.4, 5.0
STDDEV = MULTIPLIER * CLIP / BATCH_SIZE
OPTIONS = {
  'l2_clip_norm': CLIP, 'noise_multiplier': MULTIPLIER,
  'expected_batch_size': BATCH_SIZE, 'prng_key': 7,
}  # fmt: skip
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


def problem_and_params(shapes=ONE_SHAPE):
  problem = problems.Problem(shapes)
  return problem, problem.params(*problem.start())


def batch(problem, params, step=0):
  return jax.device_get(
    problem.factor_gradients(
      params, problem.gradients(step, problem.dense(params))
    )
  )


def assert_same_program(found, expected, *, mean=False):
  """The same start and the same program: the same bits, for all gradients."""
  problem, params = problem_and_params()
  # Of a mean in tangent coordinates, the shapes alone are looked at.
  grads = params if mean else batch(problem, params)
  programs, starts = [], []
  for tx in (found, expected):
    # Leaves alone: how a chain nests its states is no part of the numbers.
    start, treedef = jax.tree.flatten(tx.init(params))

    def update(grads, state, params, tx=tx, treedef=treedef):
      state = jax.tree.unflatten(treedef, state)
      return jax.tree.leaves(tx.update(grads, state, params))

    programs.append(jax.jit(update).lower(grads, start, params).as_text())
    starts.append(cases.saved(start))
  assert programs[0] == programs[1]
  cases.assert_same_bits(*starts)


def assert_close(found, expected, tolerance=ROUNDING):
  for x, y in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
    assert oracles.relative_error(x, y) < tolerance
