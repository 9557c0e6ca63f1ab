"""optax.masked, partition and multi_transform around parts of a chain.

A mask hides leaves from what is inside of it, and hands their updates around
it. Around a clip those are raw per-example gradients.
"""

import jax
import numpy as np
import optax
import pytest

from tests import cases as shared
from tests.integration import cases

LABELS = {'frozen': 'stays', 'head': 'trains', 'layer': 'trains'}


@pytest.mark.slow
def test_frozen_leaves_stay_and_take_no_part():
  """As if they were not there: the recipe against the subtree alone."""
  params = cases.params()
  grads = cases.per_example_gradients(params, cases.batch())

  def where_trained(tx):  # Also known as multi_transform.
    return optax.partition({'trains': tx, 'stays': optax.set_to_zero()}, LABELS)

  tx = optax.chain(
    where_trained(optax.identity()),
    cases.clip(),
    # Without noise: it depends on the position of a leaf in the tree.
    cases.privatizer(0.0),
    where_trained(cases.after_the_noise()),
  )
  updates, _ = jax.jit(tx.update)(grads, tx.init(params), params)
  assert not np.any(updates['frozen'])
  assert updates['frozen'].shape == params['frozen'].shape
  alone = optax.chain(cases.clip(), cases.after_the_noise())
  trained = cases.trainable(params)
  want, _ = jax.jit(alone.update)(
    cases.trainable(grads), alone.init(trained), trained
  )
  # The order of float32 sums.
  shared.assert_close(cases.trainable(updates), want, 1e-6)
  assert all(np.any(x) for x in jax.tree.leaves(want))


HIDE_HEAD = {'frozen': False, 'head': False, 'layer': True}
WRAPPERS = {
  'masked': lambda tx: optax.masked(tx, HIDE_HEAD),
  'partition': lambda tx: optax.partition(
    {'trains': tx, 'stays': optax.set_to_zero()}, LABELS
  ),
}


@pytest.mark.parametrize('wrapper', WRAPPERS)
@pytest.mark.parametrize('clip', cases.CLIPS)
def test_no_mask_around_a_clip(clip, wrapper):
  """Also where zeros replace the hidden leaves: (B, ...) zeros broadcast."""
  name = {'prism': 'intrinsic_clip', 'dp_muon': 'per_matrix_clip'}
  with pytest.raises(
    ValueError,
    match=rf"{name.get(clip, clip)}: optax.masked.*hides \['frozen'\].*"
    r'outside of any mask: optax.chain',
  ):
    WRAPPERS[wrapper](cases.CLIPS[clip]).init(cases.params())


@pytest.mark.parametrize('clip', ['intrinsic_clip', 'per_matrix_clip'])
def test_no_mask_in_an_update_either(clip):
  """Where `init` was skipped or restored: the clip has no state."""
  params = cases.params()
  tx = optax.masked(cases.CLIPS[clip], HIDE_HEAD)
  grads = cases.per_example_gradients(params, cases.batch())
  state = optax.MaskedState(optax.EmptyState())
  with pytest.raises(ValueError, match=r"hides \['frozen'\], \['head'\] from"):
    tx.update(grads, state, params)
  many = dict.fromkeys('abcdef', optax.MaskedNode())
  with pytest.raises(ValueError, match=r"\['c'\], \['d'\] and 2 more from"):
    cases.CLIPS[clip].init(params | many)
