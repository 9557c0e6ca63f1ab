"""Accumulation over micro-batches by optax.MultiSteps."""

import functools

import jax
import numpy as np
import optax
import pytest

from tests.integration import cases

K = 3


@functools.partial(jax.jit, static_argnums=2)
def _accumulated(grads, normalize_by, use_grad_mean):
  """What one release of K parts is, and the state before the last of them."""
  params = cases.trainable(cases.params())
  tx = optax.chain(
    cases.clip(normalize_by),
    optax.MultiSteps(
      cases.privatizer(), K, use_grad_mean=use_grad_mean
    ).gradient_transformation(),
  )

  def one(state, part):
    released, new = tx.update(part, state, params)
    return new, (released, new[1].acc_grads)

  _, (released, held) = jax.lax.scan(one, tx.init(params), grads)
  return jax.tree.map(lambda x: x[-1], released), held


@pytest.mark.slow
@pytest.mark.parametrize(
  ('use_grad_mean', 'normalize_by', 'share'),
  [
    (True, cases.BATCH / K, 1.0),
    (False, cases.BATCH, 1.0),
    (False, cases.BATCH / K, 1 / K),  # Less privacy than was claimed.
    (True, cases.BATCH, K),
  ],
)
def test_mean_or_sum_decides_the_divisor(use_grad_mean, normalize_by, share):
  """The page's table: a share of the noise multiplier that was claimed."""
  grads = jax.tree.map(
    lambda x: np.zeros((K, 2, *x.shape), x.dtype),
    cases.trainable(cases.params()),
  )
  record = jax.tree.map(np.copy, grads)
  for x in jax.tree.leaves(record):
    x[1, 0] = 1e3
  (one, nothing), (other, held) = (
    jax.device_get(_accumulated(x, np.float32(normalize_by), use_grad_mean))
    for x in (grads, record)
  )
  moved = optax.tree.norm(jax.tree.map(np.subtract, other, one))
  true = cases.STDDEV / moved
  assert true == pytest.approx(share * cases.MULTIPLIER, rel=1e-3)
  # Between two releases the state holds the clipped sum, and no noise.
  assert not any(x.any() for x in jax.tree.leaves(nothing))
  sizes = jax.vmap(optax.tree.norm)(held)
  whole = cases.CLIP / normalize_by
  part = whole / 2 if use_grad_mean else whole  # The mean so far.
  np.testing.assert_allclose(sizes, [0.0, part, 0.0], rtol=1e-5)


@pytest.mark.parametrize('clip', cases.CLIPS)
def test_no_accumulation_in_front_of_a_clip(clip):
  """It would average examples first: then one of them moves the sum by 2 C."""
  params = cases.trainable(cases.params())
  tx = optax.MultiSteps(cases.CLIPS[clip], K)
  grads = jax.tree.map(lambda x: np.zeros((2, *x.shape), x.dtype), params)
  with pytest.raises(ValueError, match='Inside of optax.MultiSteps there can'):
    tx.update(grads, tx.init(params), params)
