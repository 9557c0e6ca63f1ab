"""Between trees, leaves and stacks: nothing is lost, mixed up or rescaled."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prism_optax._modules._layout import LeafAxes
from prism_optax._modules._tree import ModuleTree
from tests import cases


@pytest.mark.parametrize('rank', range(4))
def test_stacks_and_matrices_invert(rank):
  shape = (2, 3, 5, 7)
  others = [i for i in range(4) if i != rank]
  stacks = [
    x for size in range(3) for x in itertools.permutations(others, size)
  ]
  leaf = np.arange(2 * 3 * 5 * 7).reshape(shape)

  @jax.jit  # One program for all: they are small and many.
  def there_and_back(leaf):
    out = []
    for stack in stacks:
      axes = LeafAxes.create('w', shape, rank, stack)
      stacked = axes.to_stack(leaf)
      matrices = axes.matrix.to_matrices(stacked)
      back = axes.from_stack(stacked), axes.matrix.from_matrices(matrices)
      out.append((stacked, matrices, *back))
    return out

  for stack, (stacked, matrices, again, stacked_again) in zip(
    stacks, jax.device_get(there_and_back(leaf)), strict=True
  ):
    np.testing.assert_array_equal(again, leaf)
    assert matrices.shape[-1] == shape[rank]
    np.testing.assert_array_equal(stacked_again, stacked)
    # By hand: stack axes first, then features in order, then the rank.
    features = [i for i in others if i not in stack]
    expected = np.transpose(leaf, (*stack, *features, rank))
    np.testing.assert_array_equal(
      np.ravel(matrices), np.ravel(expected), err_msg=f'{stack=}'
    )


@pytest.mark.parametrize(
  ('rank', 'stack', 'match'),
  [
    (3, (), 'out of range'),
    (0, (0,), 'distinct'),
    (0, (1, 2), 'at least one more'),
  ],
)
def test_bad_axes_are_refused(rank, stack, match):
  with pytest.raises(ValueError, match=match):
    LeafAxes.create('w', (2, 3, 4), rank, stack)


# Trees.


def test_same_shapes_share_a_stack_and_trees_come_back():
  params = cases.adapters([(5, 6, 2), (7, 4, 2)], dtype=jnp.bfloat16)
  stack = jax.tree.map(lambda x: np.stack([x] * 3), params['m0'])
  params |= {'m2': jax.tree.map(np.float32, stack)}
  tree = ModuleTree(params)
  stacks = tree.factors(params)
  assert [x.left.shape for x in stacks.pairs] == [(4, 5, 2), (1, 7, 2)]
  assert [x.right.shape for x in stacks.pairs] == [(4, 6, 2), (1, 4, 2)]
  np.testing.assert_array_equal(
    stacks.pairs[0].left[0], params['m0']['lora_b'].T
  )
  back = tree.tree(stacks)
  jax.tree.map(np.testing.assert_array_equal, back, params)
  assert back['extra'].dtype == jnp.float32


def test_both_factors_of_each_module_have_one_label():
  tree = ModuleTree(cases.adapters([(5, 6, 2), (5, 6, 2)]))
  labels = list('abcdd')  # Of `extra`, and of two modules.
  with pytest.raises(ValueError, match='one label for both factors'):
    tree.rows(labels)
  labels[1:3] = 'cc'
  assert [x.tolist() for x in tree.rows(labels)] == [
    ['c', 'd'], ['c', 'd'], 'a'
  ]  # fmt: skip
