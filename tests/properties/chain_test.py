"""Laws of chains and of whole optimizers, on drawn trees."""

import functools
import math

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given

import prism_optax
from prism_optax import accounting, contrib, fixed_rank, transforms
from tests.properties import cases


def _shift(layout):
  """Without a state, and it needs the frames."""

  def shifted(x, frame):
    left, right = fixed_rank.multiply_out(x)
    return fixed_rank.Tangent(left - frame.left, 2 * right)

  def update(stacks, state, step):
    return stacks.map_pairs(shifted, step.frames), state

  return transforms.tangent_transformation('shift', update, layout=layout)


def _projection(layout):
  def update(stacks, state, step):
    return stacks.map_pairs(
      lambda x, frame: fixed_rank.project(frame, fixed_rank.multiply_out(x)),
      step.frames,
    ), state

  return transforms.tangent_transformation('project', update, layout=layout)


@functools.cache
def _chains(name):
  """One after another in `optax.chain`, and fused."""
  layout = cases.layout_of(name)
  parts = (
    optax.scale(-0.5),
    _shift(layout),
    _projection(layout),
    prism_optax.scale_by_learning_rate(0.3, layout=layout),
    optax.trace(0.9),
  )
  fused = prism_optax.chain(*parts, layout=layout)
  chains = {'plain': optax.chain(*parts), 'fused': fused}
  return {k: (tx.init, jax.jit(tx.update)) for k, tx in chains.items()}


@pytest.mark.slow
@cases.few
@given(cases.trees, cases.seeds, st.sampled_from([1e-8, 1.0, 1e8]))
def test_a_fused_chain_gives_what_its_parts_give(name, seed, scale):
  params = cases.draw_tree(name, seed)
  grads = cases.draw_tree(name, seed + 1, scale=scale)
  found = {}
  for kind, (init, update) in _chains(name).items():
    state = init(params)
    for _ in range(2):
      updates, state = update(grads, state, params)
    found[kind] = updates
  size = 1e-5 * (1 + cases.norm(found['plain']))
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, atol=size), *found.values()
  )


OPTIMIZERS = ('prism', 'prism_muon', 'published_prism', 'dp_muon')
MAKE = {
  'prism': prism_optax.prism,
  'prism_muon': contrib.prism_muon,
  'published_prism': prism_optax.published_prism,
  'dp_muon': prism_optax.dp_muon,
}


@functools.cache
def _optimizer(kind, name):
  tx = MAKE[kind](
    0.1,
    **(
      {'l2_clip_norms': 2.0}
      if kind == 'dp_muon'
      else {'l2_clip_norm': 2.0, 'layout': cases.layout_of(name)}
    ),
    noise_multiplier=1.0,
    expected_batch_size=8.0,
    prng_key=1,
  )
  # By Muon each of the four matrices is clipped by itself.
  if kind == 'dp_muon':
    bound = tx.sensitivity(params=cases.draw_tree(name, 0))
    assert math.isclose(bound, 0.5)
  else:
    assert math.isclose(tx.sensitivity(), 0.25)
  return tx.init, jax.jit(tx.update)


@pytest.mark.slow
@cases.few
@given(
  st.sampled_from(OPTIMIZERS), cases.seeds, cases.scales, cases.oddities,
)  # fmt: skip
def test_one_record_of_any_numbers_harms_no_optimizer(
  kind, seed, scale, oddity
):
  """Finite updates in the shapes of the parameters, twice in a row."""
  name = 'two shapes'
  init, update = _optimizer(kind, name)
  params = cases.draw_tree(name, seed)
  state = init(params)
  for step in (1, 2):
    grads = cases.draw_tree(name, seed + step, lead=(5,), scale=scale)
    grads = cases.spoiled(grads, oddity, seed)
    updates, state = update(grads, state, params)
    assert cases.is_finite(updates)
    assert cases.shapes_of(updates) == cases.shapes_of(params)
    params = optax.apply_updates(params, updates)


@functools.cache
def _published_form(name):
  tx = transforms.scale_by_published_preconditioner(
    noise_stddev=0.3, layout=cases.layout_of(name)
  )
  return tx.init, jax.jit(tx.update)


@cases.few
@given(cases.seeds, st.sampled_from([0.0, 1e-6, 1.0, 1e6]))
def test_the_published_preconditioner_is_odd(seed, size):
  name = 'one'
  init, update = _published_form(name)
  params = cases.draw_tree(name, seed)
  x = cases.draw_tree(name, seed + 1, scale=size)
  out, minus = (
    update(y, init(params), params)[0]
    for y in (x, jax.tree.map(jnp.negative, x))
  )
  assert cases.is_finite(out)
  total = jax.tree.map(jnp.add, out, minus)
  assert cases.norm(total) <= 1e-4 * (1 + cases.norm(out))
  assert (cases.norm(out) == 0) == (size == 0)


@cases.settings
@given(
  st.lists(
    st.tuples(st.floats(0.01, 100.0), st.integers(1, 99)), min_size=1,
    max_size=6,
  ),
  st.floats(0.1, 20.0),
  st.sampled_from(['equal', 'least_energy']),
)  # fmt: skip
def test_groups_are_one_mechanism_of_the_multiplier_asked_for(
  groups, noise_multiplier, noise_split
):
  split = transforms.split_noise_multiplier(
    noise_multiplier, *zip(*groups, strict=True), noise_split=noise_split
  )
  joint = accounting.joint_noise_multiplier(split)
  assert math.isclose(joint, noise_multiplier, rel_tol=1e-9)
