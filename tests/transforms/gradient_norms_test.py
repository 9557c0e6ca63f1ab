"""Norms of per-example gradients in place, against those of the coordinates."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prism_optax import fixed_rank, lora
from prism_optax._modules import ModuleTree
from prism_optax.transforms import _intrinsic_clip
from tests.oracles import oracles

BATCH = 7
pytestmark = pytest.mark.usefixtures('x64')

# Shapes of a and b with their axes, all of rank 3: (in, r) and (r, out); PEFT's
# transposed ones; stacked layers; several features before and behind the rank.
LAYOUTS = {
  'plain': ((9, 3), (3, 7), None),
  'peft': ((3, 9), (7, 3), lora.Layout(a_rank_axis=0, b_rank_axis=1)),
  'scaled': ((9, 3), (3, 7), lora.Layout(scale=16.0)),
  'stack': ((4, 9, 3), (4, 3, 7), None),
  'heads': (
    (5, 2, 3),
    (3, 4, 2),
    lora.Layout(a_rank_axis=2, b_rank_axis=0, a_stack_axes=(), b_stack_axes=()),
  ),
}


def _params(rng, layout):
  a, b, how = LAYOUTS[layout]
  params = {
    f'm{i}': {
      'lora_a': jnp.asarray(rng.normal(size=a)),
      'lora_b': jnp.asarray(rng.normal(size=b)),
    }
    for i in range(2)
  }
  return lora.canonicalize(params, layout=how), how


def _both(params, grads, layout):
  """Squares in place, and of the coordinates of each example."""
  tree = ModuleTree(params, layout)
  frames = tree.frames(params)
  assert _intrinsic_clip.columns_are_orthogonal(frames)
  groups, others = tree.per_module(grads, 1)
  assert not others
  got = _intrinsic_clip.squared_norms(frames, groups)
  stacks = tree.gradients(grads, 1).map_pairs(
    lambda pair, frame: fixed_rank.tangent_from_gradients(frame, pair), frames
  )
  want = sum(
    np.sum(np.square(x), axis=(1, 2, 3)) for x in jax.tree.leaves(stacks)
  )
  return np.asarray(got), want


@pytest.mark.parametrize('layout', LAYOUTS)
def test_norms_of_gradients_of_a_matrix_are_exact(layout):
  rng = np.random.default_rng(0)
  params, how = _params(rng, layout)
  products = lora.deltas(params, layout=how, dense=True)
  dense = jax.tree.map(
    lambda x: jnp.asarray(rng.normal(size=(BATCH, *x.shape))), products
  )

  def inner(params, dense):
    products = lora.deltas(params, layout=how, dense=True)
    return sum(
      jnp.vdot(x, g)
      for x, g in zip(
        jax.tree.leaves(products), jax.tree.leaves(dense), strict=True
      )
    )

  grads = jax.vmap(jax.grad(inner), (None, 0))(params, dense)
  got, want = _both(params, grads, how)
  np.testing.assert_allclose(got, want, rtol=1e-13)


@pytest.mark.parametrize('layout', LAYOUTS)
def test_other_gradients_are_never_taken_too_small(layout):
  """Gradients of no matrix: independent, one side stopped, inside only."""
  rng = np.random.default_rng(1)
  params, how = _params(rng, layout)
  grads = jax.tree.map(
    lambda x: jnp.asarray(rng.normal(size=(BATCH, *x.shape))), params
  )
  for name, factor in (('', 1.0), ('lora_a', 0.0), ('lora_b', 0.0)):
    some = {
      module: {k: x * (factor if k == name else 1.0) for k, x in pair.items()}
      for module, pair in grads.items()
    }
    got, want = _both(params, some, how)
    assert (got >= want * (1 - 1e-13)).all()
    assert (got <= want * 1.02).all()
  inside = {
    module: {
      'lora_a': jnp.zeros((BATCH, *pair['lora_a'].shape)),
      'lora_b': jnp.stack([1e6 * pair['lora_b']] * BATCH),
    }
    for module, pair in params.items()
  }
  got, want = _both(params, inside, how)
  # In coordinates nothing is left of it but rounding; here a hundredth of what
  # there was before the projection.
  tree = ModuleTree(params, how)
  whole = sum(
    np.sum(np.square(pair.left @ frame.right_inverse), axis=(1, 2, 3))
    for frame, pair in zip(
      tree.frames(params),
      tree.gradients(inside, 1).pairs,
      strict=True,
    )
  )
  assert (want < 1e-25 * whole).all()
  np.testing.assert_allclose(got, 0.01 * whole, rtol=1e-12)


def _frame(factors):
  return fixed_rank.frame(fixed_rank.Factors(*(x[None] for x in factors)))


def test_another_gauge_has_no_orthogonal_columns():
  rng = np.random.default_rng(2)
  balanced = oracles.balance(oracles.random_factors(rng, 12, 9, 4, 10.0))
  assert _intrinsic_clip.columns_are_orthogonal([_frame(balanced)])
  for size in (1e-4, 1e-2, 1.0):
    k = np.eye(4) + size * np.triu(np.ones((4, 4)), 1)
    turned = oracles.change_gauge(balanced, (k, np.linalg.inv(k).T))
    assert not _intrinsic_clip.columns_are_orthogonal([_frame(turned)])
    # One module is enough.
    both = [_frame(balanced), _frame(turned)]
    assert not _intrinsic_clip.columns_are_orthogonal(both)


@pytest.mark.parametrize('size', [1e-8, 1e-7, 3e-7])
def test_the_slack_covers_what_the_diagonal_leaves_out(size):
  """Columns that are nearly orthogonal, and the worst gradients for them."""
  rng = np.random.default_rng(3)
  balanced = oracles.balance(oracles.random_factors(rng, 12, 9, 4, 10.0))
  k = np.eye(4) + size * rng.normal(size=(4, 4))
  left, right = oracles.change_gauge(balanced, (k, np.linalg.inv(k).T))
  params = {'lora_a': jnp.asarray(right), 'lora_b': jnp.asarray(left.T)}
  frame = _frame((left, right))
  # Rows that are, scaled, the singular vectors of what is left out.
  inverse = np.asarray(frame.left_inverse[0])
  plain = np.diag(inverse)
  u, _, _ = np.linalg.svd(inverse / plain[:, None])
  grads = {
    'lora_a': jnp.stack([jnp.outer(jnp.ones(9), x / plain) for x in u.T]),
    'lora_b': jnp.zeros((4, 4, 12)),
  }
  got, want = _both(params, grads, None)
  assert (got >= want * (1 - 1e-14)).all()
  assert (got <= want * (1 + 2.1e-5)).all()
  # There is something to cover.
  alone = np.sum(np.square(np.asarray(grads['lora_a']) * plain), (1, 2))
  assert (alone < want * (1 - 1e-9)).any()


def test_a_dead_direction_with_entries_beside_it_is_not_scaled_alone():
  frame = _frame((np.eye(5, 2), np.eye(6, 2)))
  assert _intrinsic_clip.columns_are_orthogonal([frame])
  odd = jnp.asarray([[[0.0, 1.0], [0.0, 1.0]]])
  for side in ('left_inverse', 'right_inverse'):
    assert not _intrinsic_clip.columns_are_orthogonal(
      [frame._replace(**{side: odd})]
    )
