"""Laws of the transformations, whatever the tree and a record holds."""

import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given

import prism_optax
from prism_optax import lora, transforms
from tests.properties import cases

CLIP, DIVISOR = 0.7, 4.0


@functools.cache
def _clip(name, kind):
  """A compiled clip for one tree, and its bound for one record."""
  params = cases.draw_tree(name, 0)
  if kind == 'intrinsic':
    tx = prism_optax.intrinsic_clip(
      CLIP, normalize_by=DIVISOR, layout=cases.layout_of(name)
    )
    bound = tx.sensitivity()
  else:
    tx = prism_optax.per_matrix_clip(CLIP, normalize_by=DIVISOR)
    bound = float(tx.sensitivity(params=params))

  @jax.jit
  def clip(grads, params, padding):
    state = tx.init(params)
    return tx.update(grads, state, params, is_padding_example=padding)[0]

  return lambda *args: jax.device_get(clip(*args)), bound


# What becomes of the factors that were drawn.
POINTS = {
  'as drawn': lambda key, x: x,
  'a start': lambda key, x: 0 * x if key == 'lora_b' else x,
  'rank one': lambda key, x: x**0 if key == 'lora_a' else x,
  'ill-conditioned': lambda key, x: (
    x * np.logspace(0, -4, x.shape[-1], dtype=x.dtype) if 'lora' in key else x
  ),
}


@pytest.mark.slow
@hypothesis.settings(cases.settings, max_examples=80)
@given(
  cases.batches, cases.seeds, cases.scales, cases.oddities,
  cases.st.sampled_from(['intrinsic', 'per matrix']),
  cases.st.sampled_from([*POINTS, 'canonical']),
)  # fmt: skip
def test_clips_are_bounded_and_total(batch, seed, scale, oddity, kind, point):
  name, size, dtype = batch
  clip, bound = _clip(name, kind)
  params = cases.draw_tree(name, seed)
  if point == 'canonical':  # Norms are taken in place.
    params = lora.canonicalize(params, layout=cases.layout_of(name))
  else:
    params = jax.tree_util.tree_map_with_path(
      lambda path, x: POINTS[point](path[-1].key.lower(), x), params
    )
  grads = cases.spoiled(
    cases.draw_tree(name, seed + 1, lead=(size,), scale=scale, dtype=dtype),
    oddity, seed,
  )  # fmt: skip
  here = np.zeros(size, bool)
  total = clip(grads, params, here)
  assert cases.shapes_of(total) == cases.shapes_of(params)
  assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(total))
  assert cases.is_finite(total)
  assert cases.norm(total) <= size * bound * (1 + 1e-6)
  assert cases.norm(clip(grads, params, ~here)) == 0
  # Any one of them moves it by at most the sensitivity.
  if size:
    less = clip(grads, params, np.arange(size) == seed % size)
    moved = cases.norm(jax.tree.map(np.subtract, total, less))
    assert moved <= bound * (1 + size * 2e-7)


@functools.cache
def _each_matrix(kind):
  norms = {'lora_a': 0.5, 'lora_b': 1.0, 'head': 1.0}
  rows = 1 if kind == 'stacks' else (0, 1)  # Or each leaf is one matrix.
  plain = optax.contrib.MuonDimensionNumbers(rows, 2)
  other = None if kind == 'rest' else plain  # What is no matrix is one group.
  numbers = {'lora_a': plain, 'lora_b': other, 'head': None}
  whole = transforms.per_matrix_clip(norms, weight_dimension_numbers=numbers)
  clip = jax.jit(whole.pre_clipping_transform)
  return norms, lambda grads: jax.device_get(clip(grads))


@cases.settings
@given(
  cases.st.sampled_from(['leaves', 'stacks', 'rest']), cases.seeds,
  cases.scales, cases.oddities,
  cases.st.sampled_from([jnp.float32, jnp.bfloat16]),
)  # fmt: skip
def test_matrices_are_clipped_one_by_one(kind, seed, scale, oddity, dtype):
  norms, clip = _each_matrix(kind)
  grads = cases.draw_tree('stacked', seed, scale=scale, dtype=dtype)
  grads = cases.spoiled(grads, oddity, seed)
  found = clip(grads)
  assert cases.shapes_of(found) == cases.shapes_of(grads)
  # Squares in units of the norms overflow beyond 1e19.
  whole = cases.is_finite(grads) and all(
    np.max(np.abs(np.float64(x))) < 1e18 for x in grads.values()
  )
  if not whole:
    assert cases.norm(found) == 0
    return
  groups = [[grads[name], found[name]] for name in norms]
  if kind == 'rest':
    groups = [groups[0], [(x['head'], x['lora_b']) for x in (grads, found)]]
  for norm, group in zip(norms.values(), groups, strict=False):
    assert {x.dtype for x in jax.tree.leaves(group[1])} == {np.dtype('float32')}
    stacks = kind == 'stacks' and group[0].ndim == 3
    pairs = zip(*group, strict=True) if stacks else [group]
    for pair in pairs:
      z, y = (
        np.concatenate([np.ravel(np.float64(x)) for x in jax.tree.leaves(one)])
        for one in pair
      )
      length = np.linalg.norm(z)
      exact = z * min(1.0, norm / length) if length else z
      # A little below the bound: 1e-6 of it.
      np.testing.assert_allclose(y, exact, rtol=1e-5, atol=1e-6 * length)
      assert np.linalg.norm(y) <= norm
  again = clip(found)
  assert cases.norm(
    jax.tree.map(np.subtract, again, found)
  ) <= 1e-5 * cases.norm(found)
