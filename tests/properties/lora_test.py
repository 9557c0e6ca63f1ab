"""Laws of trees: pairs, stacks, parts, differences and merged weights."""

import functools

import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given

import prism_optax
from prism_optax import _lattice, contrib, fixed_rank, lora, transforms
from prism_optax._modules import ModuleTree, Stacks, map_pairs
from prism_optax.contrib import _input_metric, _one_shot_release, heads
from prism_optax.fixed_rank import _tangents
from tests.properties import cases

DTYPES = st.sampled_from([jnp.float32, jnp.bfloat16])
batch_sizes = st.sampled_from([0, 3])


def _equal(a, b):
  jax.tree.map(np.testing.assert_array_equal, a, b)


def _close(a, b, rtol=1e-5):
  for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
    x, y = np.float64(x), np.float64(y)
    np.testing.assert_allclose(x, y, atol=rtol * np.abs(y).max(initial=1e-30))


def _products(tree, layout):
  """scale * left @ right.T of each module by its name, in float64."""
  return {
    name: np.float64(x.left) @ np.swapaxes(np.float64(x.right), -1, -2)
    for name, x in lora.deltas(tree, layout=layout).items()
  }


@cases.few
@given(cases.trees, cases.seeds, DTYPES)
def test_trees_come_back_from_their_stacks(name, seed, dtype):
  """Bit for bit, in any layout; one array of each shape and type of module."""
  params, layout = cases.draw_tree(name, seed), cases.layout_of(name)
  params = jax.tree.map(lambda x: x.astype(dtype), params)
  tree = ModuleTree(params, layout)
  stacks = tree.coordinates(params)
  assert isinstance(stacks, Stacks)
  assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(stacks))
  back = tree.tree(stacks)
  assert cases.shapes_of(back) == cases.shapes_of(params)
  _equal(back, jax.tree.map(lambda x: x.astype(jnp.float32), params))
  # Positions in a stack belong to modules by their names.
  numbered = [jnp.arange(x.left.shape[0]) for x in stacks.pairs]
  for module in tree.modules:
    numbers = tree.by_module(numbered)[module.name]
    assert numbers.shape == module.stack
  # A functor: composed maps are maps of the composition.
  twice = map_pairs(
    lambda x: x[::-1], map_pairs(lambda x, y: (y, x), *[stacks.pairs] * 2)
  )
  _equal(twice, map_pairs(lambda x, y: (x, y), *[stacks.pairs] * 2))


@cases.few
@given(cases.trees, cases.seeds, DTYPES)
def test_stacked_adapters_are_the_same_adapters(name, seed, dtype):
  """Without a layout, whatever the scale; and they come back."""
  params, layout = cases.draw_tree(name, seed), cases.layout_of(name)
  params = jax.tree.map(lambda x: x.astype(dtype), params)
  stacked = lora.stack(params, layout=layout)
  back = lora.unstack(stacked, params, layout=layout)
  assert cases.shapes_of(back) == cases.shapes_of(params)
  assert [x.dtype for x in jax.tree.leaves(back)] == [
    x.dtype for x in jax.tree.leaves(params)
  ]
  # A scale goes in and comes out as its root: two roundings.
  _close(back, params, 0 if layout is None else jnp.finfo(dtype).eps)
  products = _products(stacked, None)
  ours = np.sort(np.concatenate([x.ravel() for x in products.values()]))
  wide = jax.tree.map(lambda x: x.astype(jnp.float32), params)
  products = _products(wide, layout)
  theirs = np.sort(np.concatenate([x.ravel() for x in products.values()]))
  np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


@cases.few
@given(cases.trees, cases.seeds, st.randoms(use_true_random=False))
def test_lists_with_names_are_read_as_trees(name, seed, random):
  """In any order of the list, which may be without any structure."""
  params, layout = cases.draw_tree(name, seed), cases.layout_of(name)
  flat, _ = jax.tree_util.tree_flatten_with_path(params)
  random.shuffle(flat)
  names = ['/'.join(key.key for key in path) for path, _ in flat]
  leaves = [leaf for _, leaf in flat]
  pairs = lora.pairs_by_name(names, leaves)
  if layout:  # The scale is not in the names.
    pairs = [
      x._replace(layout=lora.Layout(0, 1, (), (), scale=2.0)) for x in pairs
    ]
  found, expected = _products(leaves, pairs), _products(params, layout)
  assert set(found) == set(expected)
  for module, z in expected.items():
    np.testing.assert_array_equal(found[module], z)


@functools.cache
def _coordinates(name, size):
  layout = cases.layout_of(name)

  @jax.jit
  def run(params, grads):
    tree = ModuleTree(params, layout)
    frames = tree.frames(params)
    lead = 0 if size is None else 1
    stacks = tree.gradients(grads, lead).map_pairs(
      lambda pair, frame: fixed_rank.tangent_from_gradients(frame, pair), frames
    )
    if lead:
      return jax.vmap(tree.tree)(stacks)
    transform = prism_optax.tangent_coordinates(params, layout=layout)
    return tree.tree(stacks), transform(grads)

  return run


@pytest.mark.slow
@cases.few
@given(st.sampled_from(['file', 'stacked']), cases.seeds, batch_sizes)
def test_coordinates_of_a_batch_are_those_of_its_examples(name, seed, size):
  params = cases.draw_tree(name, seed)
  grads = cases.draw_tree(name, seed + 1, lead=(size,))
  together = _coordinates(name, size)(params, grads)
  assert cases.shapes_of(together) == cases.shapes_of(grads)
  for i in range(size):
    one = jax.tree.map(lambda x, i=i: x[i], grads)
    alone, transformed = _coordinates(name, None)(params, one)
    _equal(alone, transformed)
    # The same products in another order of summation.
    _close(jax.tree.map(lambda x, i=i: x[i], together), alone)


def _shift_pairs(layout):
  """A transformation of our own: no state, and it needs the frames."""

  def update(stacks, state, step):
    def shifted(x, frame):
      x = fixed_rank.multiply_out(x)
      return fixed_rank.Tangent(x.left - frame.left, 2 * x.right)

    return stacks.map_pairs(shifted, step.frames), state

  return transforms.tangent_transformation('shift', update, layout=layout)


def _projection(layout):
  """A transformation whose result is not multiplied out."""

  def update(stacks, state, step):
    def projected(x, frame):
      x = fixed_rank.multiply_out(x)
      out = _tangents.projected(frame, x)
      assert isinstance(out, _tangents.TangentSum)
      expected = fixed_rank.project(frame, x)
      _close(fixed_rank.multiply_out(out), expected, 1e-6)
      return out

    return stacks.map_pairs(projected, step.frames), state

  return transforms.tangent_transformation('project', update, layout=layout)


@functools.cache
def _chains(name):
  """The same transformations by optax.chain, one of ours each, and fused."""
  layout = cases.layout_of(name)
  scale, trace = optax.scale(-0.5), optax.trace(0.9)
  shift, projection = _shift_pairs(layout), _projection(layout)
  together = [scale, shift, projection, scale, trace]
  return {
    'plain': optax.chain(*together),
    'separate': optax.chain(
      *(prism_optax.chain(x, layout=layout) for x in together)
    ),
    'together': prism_optax.chain(*together, layout=layout),
  }


@pytest.mark.slow
@cases.few
@given(st.sampled_from(['file', 'stacked']), cases.seeds)
def test_a_fused_chain_is_the_chain_of_its_transformations(name, seed):
  params = cases.draw_tree(name, seed)
  found = {}
  for kind, tx in _chains(name).items():
    state = tx.init(params)
    for step in (1, 2):
      updates = cases.draw_tree(name, seed + step)
      out, state = tx.update(updates, state, params)
    found[kind] = out
  _close(found['separate'], found['plain'], 1e-6)
  _close(found['together'], found['plain'], 1e-6)


@pytest.mark.slow
@cases.few
@given(
  st.sampled_from(['file', 'full rank', 'stacked']),
  cases.seeds,
  st.sampled_from([1e-3, 1.0, 1e3]),
)
def test_differences_and_their_merge_are_those_of_the_products(
  name, seed, size
):
  layout = cases.layout_of(name)
  old, new = (cases.draw_tree(name, seed + i, scale=size) for i in range(2))
  change = lora.difference(new, old, layout=layout)
  # An adapter of twice the rank, or of the full one.
  before, after, found = (_products(x, layout) for x in (old, new, change))
  expected = {k: after[k] - before[k] for k in found}
  _close(found, expected, 1e-5)
  for module in ModuleTree(change, layout).modules:
    rank = ModuleTree(new, layout).modules
    rank = next(x.rank for x in rank if x.name == module.name)
    assert module.rank == min(2 * rank, module.m, module.n)
  # Weights with their axes in another order, given by the kernel.
  flat, kernels = {}, {}
  for module in ModuleTree(change, layout).modules:
    lead = len(module.stack)
    flat[module.name] = jnp.zeros((module.m, *module.stack, module.n))
    axes = (*range(1, 1 + lead), 1 + lead, 0)
    kernels[module.name] = module.name, axes
  weights = lora.merge(new, flat, kernels=kernels, layout=layout)
  weights = lora.merge(
    lora.difference(jax.tree.map(np.zeros_like, old), old, layout=layout),
    weights,
    kernels=kernels,
    layout=layout,
  )
  merged = lora.merge(change, flat, kernels=kernels, layout=layout)
  for name, z in expected.items():
    largest = max(np.abs(x[name]).max() for x in (before, after))
    for got in (weights, merged):
      # From (out, *stack, in).
      found = np.moveaxis(got[name], 0, -2)
      np.testing.assert_allclose(found, z, atol=1e-5 * largest)


@pytest.mark.slow
@hypothesis.settings(cases.few, max_examples=5)
@given(
  st.sampled_from(['file', 'stacked']),
  cases.seeds,
  DTYPES,
  st.sampled_from([0.5, 1.0, 8.0]),
  st.sampled_from([1e-3, 1.0, 1e3]),
)
def test_starts_have_the_singular_values_asked_for(
  name, seed, dtype, scale, size
):
  """In any type and under any scale of the module; a key is a start."""
  layout = cases.layout_of(name)
  layout = (
    [x._replace(layout=lora.Layout(0, 1, scale=scale)) for x in layout]
    if layout
    else lora.Layout(scale=scale)
  )
  params = cases.draw_tree(name, seed, dtype=dtype)
  balanced, again, one_sided = (
    lora.initialize(params, key, method=method, size=size, layout=layout)
    for key, method in ((3, 'balanced'), (3, 'balanced'), (4, 'one_sided'))
  )
  assert cases.shapes_of(balanced) == cases.shapes_of(params)
  assert jax.tree.structure(balanced) == jax.tree.structure(params)
  _equal(balanced, again)
  # Rounding of the factors to their type.
  rtol = 40 * float(jnp.finfo(dtype).eps)
  right_sides = lora.deltas(one_sided, layout=layout)
  for module, z in _products(balanced, layout).items():
    other = right_sides[module]
    rank = other.right.shape[-1]
    values = np.linalg.svd(z, compute_uv=False)
    np.testing.assert_allclose(values[..., :rank], size, rtol=rtol)
    np.testing.assert_allclose(values[..., rank:], 0, atol=rtol * size)
    assert not np.any(other.left)
    values = np.linalg.svd(np.float64(other.right), compute_uv=False)
    np.testing.assert_allclose(values, size * scale**0.5, rtol=rtol)


@functools.cache
def _gradients(batched):
  def losses(params, x):
    y = lora.per_example_product(x, params['lora_a'], params['lora_b'])
    axes = tuple(range(1, y.ndim))
    return jnp.sum(jnp.sin(y), axes) * jnp.mean(x, axes)

  def one(params, x):
    return losses(params, x[None])[0]

  if batched:
    return jax.jit(lora.per_example_gradients(losses))
  return jax.jit(jax.vmap(jax.grad(one), (None, 0)))


@cases.few
@given(
  cases.seeds,
  st.sampled_from([(0, 2), (1,), (3,), (3, 2), (3, 2, 4)]),
  st.sampled_from([(1, 1, 1), (3, 5, 2), (5, 3, 3)]),
)
def test_one_backward_pass_is_that_of_every_example(seed, lead, shape):
  rows, columns, rank = shape
  keys = jax.random.split(jax.random.key(seed), 3)
  params = {
    'lora_a': jax.random.normal(keys[0], (rows, rank)),
    'lora_b': jax.random.normal(keys[1], (rank, columns)),
  }
  x = jax.random.normal(keys[2], (*lead, rows))
  batched, mapped = (_gradients(kind)(params, x) for kind in (True, False))
  _close(batched, mapped)


@functools.cache
def _sum_by_parts(size):
  """Of six examples, whose gradients are the examples; None is all at once."""
  tx = prism_optax.chain(
    prism_optax.intrinsic_clip(1.0),
    prism_optax.tangent_privatizer(1e-3, prng_key=0),
    retract_elsewhere=True,
  )
  params = cases.draw_tree('one', 0)
  state = tx.init(params)

  def gradients(params, batch):
    del params
    return batch

  if size is not None:
    gradients = lora.in_microbatches(gradients, size)
  return jax.jit(
    lambda batch, is_padding: tx.update(
      gradients(params, batch), state, params, is_padding_example=is_padding
    )[0]
  )


@cases.settings
@given(
  cases.seeds,
  cases.scales,
  cases.oddities,
  st.sampled_from([1, 2, 7]),
  hnp.arrays(bool, 6),
)
def test_parts_of_any_size_give_one_sum(seed, scale, odd, size, is_padding):
  batch = cases.draw_tree('one', seed, lead=(6,), scale=scale)
  batch = cases.spoiled(batch, odd, seed)
  whole, parts = (_sum_by_parts(x)(batch, is_padding) for x in (None, size))
  _equal(parts, whole)


# A record is what two modules read at two positions: ordinary, tiny, huge, odd.
records = hnp.arrays(
  np.float32,
  (2, 2, 3),
  elements=st.floats(allow_nan=True, allow_infinity=True, width=32),
)


@pytest.mark.parametrize('form', ['second_moment', 'mean'])
def test_one_record_moves_the_input_metric_by_one_at_most(form):
  """Before the noise, over both modules together, whatever is in the record."""
  unit = _lattice.unit_of(1.0, 1.0, jnp.float32)
  others = np.random.default_rng(0).normal(size=(4, 2, 2, 3))
  terms = {
    'second_moment': _input_metric._second_moment_of,
    'mean': _input_metric._mean_of,
  }[form]

  def released(rows):
    inputs = {'x': rows[:, 0], 'y': rows[:, 1]}
    sums = _one_shot_release.sum_of_batch(inputs, unit, terms)
    steps = [_lattice.integers_of(x) for x in sums.values()]
    return np.concatenate(steps) * float(unit)

  without = released(np.float32(others))

  @cases.settings
  @given(records)
  @hypothesis.example(np.full((2, 2, 3), 1e38, np.float32))
  @hypothesis.example(np.ones((2, 2, 3), np.float32))
  def law(record):
    moved = released(np.float32([*others, record])) - without
    size = np.linalg.norm(moved)
    assert size <= 1
    if not np.isfinite(record).all():
      assert size == 0

  law()


@cases.settings
@given(
  hnp.arrays(
    np.float32,
    5,
    elements=st.floats(allow_nan=True, allow_infinity=True, width=32),
  ),
  st.integers(-3, 5),
)
@hypothesis.example(np.full(5, 3e38, np.float32), 0)
@hypothesis.example(np.full(5, 1e-45, np.float32), 2)
def test_one_record_moves_a_head_by_one_at_most(feature, label):
  """``heads`` before the noise, whatever is in the record."""
  unit = _lattice.unit_of(1.0, 1.0, jnp.float32)
  record = (feature[None], np.array([label]))
  for term in (heads._class_term_of(3), heads._ridge_term_of(3)):
    sums = _one_shot_release.sum_of_batch(record, unit, term)
    moved = [_lattice.integers_of(x) * float(unit) for x in sums.values()]
    size = np.linalg.norm(np.concatenate([x.ravel() for x in moved]))
    assert size <= 1
    if not np.isfinite(feature).all() or not 0 <= label < 3:
      assert size == 0
    elif 1e-30 < np.abs(feature).max() < 1e38:
      assert size == pytest.approx(1, abs=1e-4)
      column = _lattice.integers_of(sums['sums'])
      assert np.count_nonzero(column.any(0)) == 1
  options = {'num_classes': 3, 'noise_multiplier': 1.0, 'dataset_size': 1}
  for head in (
    heads.class_means([record], **options), heads.ridge([record], **options)
  ):  # fmt: skip
    assert isinstance(head, heads.LinearHead)
    assert np.isfinite(head.kernel).all()


@given(cases.seeds)
@cases.few
def test_metrics_are_undone_and_change_right_factors_alone(seed):
  rng = np.random.default_rng(seed)
  metric = contrib.input_metric(
    [{'x': rng.normal(size=(9, 4)) + 1, 'y': rng.normal(size=(9, 3))}],
    noise_multiplier=rng.uniform(0, 3),
    dataset_size=9,
  )
  assert isinstance(metric, contrib.InputMetric)
  tree = cases.draw_tree('two shapes', seed)
  changed = metric.to_params(tree)
  for name in tree:
    _equal(changed[name]['lora_b'], tree[name]['lora_b'])
    s = np.linalg.norm(changed[name]['lora_a'], 2)
    assert s <= np.linalg.norm(tree[name]['lora_a'], 2) * (1 + 1e-6)
  _close(metric.from_params(changed), tree, 1e-4)
