"""The decoder of the benchmark is one, and all its methods train it."""

import dataclasses

import jax
import numpy as np
import pytest

from benchmarks.common import timing
from benchmarks.speed import decoder, steps
from benchmarks.speed import decoder_step_time as benchmark
from prism_optax import _modules

TINY = dataclasses.replace(
  decoder.SHAPES['small'],
  layers=2, width=12, heads=4, key_heads=2, head=6, inner=20, vocabulary=30,
  length=5, batch=4, microbatch=2,
)  # fmt: skip


@pytest.fixture(scope='module')
def problem():
  @jax.jit
  def make(keys):
    params = decoder.adapters(TINY, 2, keys[0])
    params = jax.tree.map(lambda x: x + 0.1, params)
    tokens = jax.random.randint(keys[2], (4, 6), 0, 30)
    return params, decoder.weights(TINY, keys[1]), tokens

  return jax.device_get(make(jax.random.split(jax.random.key(1), 3)))


def test_shapes_are_those_of_gemma_3_4b():
  """Adapters of rank 16 on q, k, v, up and down have 20.3 million entries."""
  gemma = decoder.SHAPES['gemma']
  frozen = jax.eval_shape(
    lambda k: decoder.weights(gemma, k), jax.random.key(0)
  )
  params = jax.eval_shape(
    lambda k: decoder.adapters(gemma, 16, k), jax.random.key(0)
  )
  count = sum(x.size for x in jax.tree.leaves(frozen))
  assert 3.8e9 < count < 4.0e9
  assert sum(x.size for x in jax.tree.leaves(params)) == 34 * 16 * 37376
  assert len(_modules.ModuleTree(params, benchmark.LAYOUT).modules) == 5


@pytest.mark.slow
def test_no_position_sees_what_comes_after_it(problem):
  """The last target alone may change the loss by its own term."""
  params, frozen, tokens = problem

  losses = {
    n: jax.jit(decoder.make_loss(dataclasses.replace(TINY, length=n)))
    for n in (1, 2, 5)
  }

  def first_losses(tokens):
    # One sequence, all losses but the last: from prefixes of every length.
    return [
      float(loss(params, frozen, tokens[:1, : n + 1])) * n
      for n, loss in losses.items()
    ]

  changed = tokens.copy()
  changed[0, -1] = (tokens[0, -1] + 1) % 30
  before, after = first_losses(tokens), first_losses(changed)
  np.testing.assert_allclose(before[:2], after[:2])
  assert abs(before[2] - after[2]) > 1e-3


@pytest.mark.slow
def test_every_method_moves_every_adapter():
  # All kernels of one shape: each further one would be compiled by itself.
  shape = dataclasses.replace(TINY, heads=2, inner=12)
  assert set(shape.dense.values()) == {(12, 12)}
  made, fixed = benchmark.made(shape, 2)
  assert tuple(made) == benchmark.METHODS
  for name, (carried, step_of) in made.items():
    step = timing.Step(step_of, carried, fixed)
    before = jax.tree.map(np.array, step._carried[0])
    for _ in range(2):  # In the first one a zero factor hides the other.
      step()
    for old, new in zip(
      jax.tree.leaves(before), jax.tree.leaves(step._carried[0]), strict=True
    ):
      assert np.isfinite(new).all(), name
      moved = np.abs(np.subtract(new, old)).max(axis=(1, 2))
      assert (moved > 0).all(), name


@pytest.mark.slow
def test_micro_batches_give_the_gradient_of_the_batch(problem):
  """With AdamW's first step, of size one in the sign of the gradient."""
  params, frozen, tokens = problem
  carried, step = steps.plain(decoder.make_loss(TINY), params, 2)
  new, _ = jax.jit(step)(carried, (frozen, tokens))
  gradient = jax.jit(jax.grad(decoder.make_loss(TINY)))
  whole = jax.device_get(gradient(params, frozen, tokens))
  for p, q, g in zip(*map(jax.tree.leaves, (params, new, whole)), strict=True):
    clear = np.abs(g) > 1e-5
    np.testing.assert_array_equal(np.sign(p - q)[clear], np.sign(g)[clear])
